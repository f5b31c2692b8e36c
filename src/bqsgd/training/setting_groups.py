"""What a setting is: a field with a help text and rules, in a group that checks it.

A group is a table of config.toml, a panel of `bqsgd train --help`, and a frozen dataclass. A setting has one name
everywhere outside its group: as option, as keyword and in Flower's run configuration.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import Field, field, fields
from typing import Any, ClassVar, Self

from bqsgd.errors import InvalidParameter
from bqsgd.params import check_int, check_positive

_NO_OPTION = "no option"
_KINDS: dict[str, type] = {"int": int, "float": float, "str": str, "bool": bool}
_WORDS = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}


def setting(
    default: Any,
    help: str,
    *,
    name: str | None = None,
    between: tuple[int, int] | None = None,
    positive: bool = False,
    choices: tuple[str, ...] = (),
    option: bool = True,
) -> Any:
    """One field of a group: its default, what it means, what it may be, and its name outside the group if different."""
    rules = {"help": help, "name": name, "between": between, "positive": positive, "choices": choices}
    return field(default=default, metadata=rules | {_NO_OPTION: not option})


class Group:
    """A group of settings that checks each field by its own rules. What is None is not set and not checked."""

    title: ClassVar[str]

    def __post_init__(self) -> None:
        for each in fields(self):  # type: ignore[arg-type]
            _check_setting(each, getattr(self, each.name))

    @classmethod
    def settings(cls) -> dict[str, Field[Any]]:
        """Name outside the group -> field."""
        return {each.metadata["name"] or each.name: each for each in fields(cls)}  # type: ignore[arg-type]

    @classmethod
    def of(cls, **values: Any) -> Self:
        """Build from the names that the settings have outside the group; an unknown one is refused."""
        return cls(**by_group({"": cls}, values)[""])

    @classmethod
    def options(cls) -> Iterator[tuple[str, Field[Any]]]:
        """The settings that have an option on the command line, by name."""
        return ((name, each) for name, each in cls.settings().items() if not each.metadata[_NO_OPTION])

    def to_table(self) -> dict[str, Any]:
        """Plain values by field; what is None is left out, as TOML has no null."""
        plain: dict[str, Any] = {}
        for each in fields(self):  # type: ignore[arg-type]
            value = getattr(self, each.name)
            if isinstance(value, tuple):
                value = [{k: v for k, v in vars(change).items() if v is not None} for change in value]
            if value is not None:
                plain[each.name] = value
        return plain

    @classmethod
    def from_table(cls, name: str, table: Any) -> Self:
        """Rebuild from the table `name`; an unknown field is refused, never ignored."""
        if not isinstance(table, Mapping):
            raise InvalidParameter(f"[{name}] must be a table of settings, got {type(table).__name__}")
        known = {each.name for each in fields(cls)}  # type: ignore[arg-type]
        unknown = sorted(str(key) for key in table if key not in known)
        if unknown:
            raise InvalidParameter(f"unknown setting {unknown[0]!r} in [{name}]; known: {', '.join(sorted(known))}")
        return cls(**table)


def _check_setting(each: Field[Any], value: Any) -> None:
    """Raise unless `value` obeys the field's rules."""
    rules, name = each.metadata, each.metadata["name"] or each.name
    if value is None:
        if each.default is not None:
            raise InvalidParameter(f"{name} must be given")
    elif rules["between"] is not None:
        check_int(name, value, *rules["between"])
    elif rules["positive"]:
        check_positive(name, value)
    elif rules["choices"] and value not in rules["choices"]:
        raise InvalidParameter(f"{name} must be one of {', '.join(rules['choices'])}, got {value!r}")
    else:
        _check_kind(kind_of(each), name, value)


def kind_of(each: Field[Any]) -> type:
    """The type of a setting that is set: `int | None` and `int` are both int; object for what is no plain value."""
    return _KINDS.get(str(each.type).removesuffix(" | None"), object)


def _check_kind(kind: type, name: str, value: Any) -> None:
    truth_for_a_number = isinstance(value, bool) and kind in (int, float)
    if truth_for_a_number or not isinstance(value, (int, float) if kind is float else kind):
        raise InvalidParameter(f"{name} must be {_WORDS[kind]}, got {value!r}")


def by_group(groups: Mapping[str, type[Group]], values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Sort settings into their groups: group -> field -> value.

    Raises:
        InvalidParameter: a name that no group knows.
    """
    sorted_: dict[str, dict[str, Any]] = {name: {} for name in groups}
    for name, value in values.items():
        owner = next((group for group, kind in groups.items() if name in kind.settings()), None)
        if owner is None:
            raise InvalidParameter(f"unknown setting {name!r}; `bqsgd train --help` lists them all")
        sorted_[owner][groups[owner].settings()[name].name] = value
    return sorted_
