"""What a setting is: a field with a help text and rules, in a group that checks it.

A group is a table of config.toml, a panel of `bqsgd train --help` and a frozen dataclass. A setting has one name
everywhere outside its group: as an option, as a keyword and in Flower's run configuration.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import Field, fields
from typing import Any, ClassVar, Self

from bqsgd._src.errors import InvalidParameter
from bqsgd._src.params import check_int, check_positive

_KINDS: dict[str, type] = {"int": int, "float": float, "str": str, "bool": bool}
_WORDS = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}


def setting(
    default: Any,
    help: str,
    *,
    name: str | None = None,
    key: str | None = None,
    between: tuple[int, int] | None = None,
    positive: bool = False,
    choices: tuple[str, ...] = (),
    option: bool = True,
) -> Any:
    """One field of a group: its default, what it means and which values it may have.

    name: outside the group, where it differs from the field. key: in config.toml, where it differs from the field.
    option: whether `bqsgd train` has an option for it; a setting without one is set in a settings file.
    """
    rules = {"help": help, "name": name, "key": key, "between": between, "positive": positive, "choices": choices}
    return dataclasses.field(default=default, metadata=rules | {"option": option})


class Group:
    """A group of settings that checks each field by its own rules. What is None is not set and not checked."""

    title: ClassVar[str]

    def __post_init__(self) -> None:
        for field in fields(self):  # type: ignore[arg-type]
            _check_setting(field, getattr(self, field.name))

    @classmethod
    def settings(cls) -> dict[str, Field[Any]]:
        """Name outside the group -> field."""
        return {field.metadata["name"] or field.name: field for field in fields(cls)}  # type: ignore[arg-type]

    @classmethod
    def keys(cls) -> dict[str, str]:
        """Name outside the group -> key in the group's table of config.toml."""
        return {name: field.metadata["key"] or field.name for name, field in cls.settings().items()}

    @classmethod
    def of(cls, **values: Any) -> Self:
        """Build from the names that the settings have outside the group; an unknown one is refused."""
        return cls(**by_group({"": cls}, values)[""])

    @classmethod
    def options(cls) -> Iterator[tuple[str, Field[Any]]]:
        """The settings that have an option on the command line, by name."""
        return ((name, field) for name, field in cls.settings().items() if field.metadata["option"])

    def to_table(self) -> dict[str, Any]:
        """Plain values by key; what is None is left out, as TOML has no null."""
        table: dict[str, Any] = {}
        for field in fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if isinstance(value, tuple):
                value = [{k: v for k, v in vars(change).items() if v is not None} for change in value]
            if value is not None:
                table[field.metadata["key"] or field.name] = value
        return table

    @classmethod
    def from_table(cls, name: str, table: Any) -> Self:
        """Rebuild from the table `name`; an unknown key is refused, never ignored."""
        return cls.of(**cls.read_table(name, table))

    @classmethod
    def read_table(cls, name: str, table: Any) -> dict[str, Any]:
        """The settings of the table `name` by their names outside the group; values are not checked yet.

        Raises:
            InvalidParameter: not a table, or a key that is not a setting of this group.
        """
        if not isinstance(table, Mapping):
            raise InvalidParameter(f"[{name}] must be a table of settings, got {type(table).__name__}")
        keys = cls.keys()
        # A field may also be spelt as in Python: `optimizer`, which files hold as `optimiser`.
        names = {field.name: outside for outside, field in cls.settings().items()}
        names |= {key: outside for outside, key in keys.items()}
        unknown = sorted(str(key) for key in table if key not in names)
        if unknown:
            known = ", ".join(sorted(keys.values()))
            raise InvalidParameter(f"unknown setting {unknown[0]!r} in [{name}]; known: {known}")
        return {names[key]: value for key, value in table.items()}


def _check_setting(field: Field[Any], value: Any) -> None:
    """Raise InvalidParameter unless `value` obeys the field's rules."""
    rules, name = field.metadata, field.metadata["name"] or field.name
    if value is None:
        if field.default is not None:
            raise InvalidParameter(f"{name} must be given")
    elif rules["between"] is not None:
        check_int(name, value, *rules["between"])
    elif rules["positive"]:
        check_positive(name, value)
    elif rules["choices"] and value not in rules["choices"]:
        raise InvalidParameter(f"{name} must be one of {', '.join(rules['choices'])}, got {value!r}")
    else:
        _check_kind(kind_of(field), name, value)


def kind_of(field: Field[Any]) -> type:
    """The type of a setting's values: int for `int` and for `int | None`; object for what is not a plain value."""
    return _KINDS.get(str(field.type).removesuffix(" | None"), object)


def _check_kind(kind: type, name: str, value: Any) -> None:
    truth_for_a_number = isinstance(value, bool) and kind in (int, float)  # bool is an int in Python
    if truth_for_a_number or not isinstance(value, (int, float) if kind is float else kind):
        raise InvalidParameter(f"{name} must be {_WORDS[kind]}, got {value!r}")


def by_group(groups: Mapping[str, type[Group]], values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Sort settings into their groups: group -> field -> value.

    Raises:
        InvalidParameter: a name that no group knows.
    """
    grouped: dict[str, dict[str, Any]] = {table: {} for table in groups}
    for name, value in values.items():
        table = table_of(groups, name)
        if table is None:
            raise InvalidParameter(f"unknown setting {name!r}; docs/training.md lists all settings")
        grouped[table][groups[table].settings()[name].name] = value
    return grouped


def table_of(groups: Mapping[str, type[Group]], name: str) -> str | None:
    """The table of config.toml that the setting `name` belongs to; None for an unknown name."""
    return next((table for table, group in groups.items() if name in group.settings()), None)


def group_of(groups: Mapping[str, type[Group]], table: str) -> type[Group]:
    """The group whose settings stand in a table of config.toml.

    Raises:
        InvalidParameter: there is no such table; the message says where a setting of that name belongs.
    """
    if table in groups:
        return groups[table]
    owner = table_of(groups, table)
    advice = f"it belongs in the table [{owner}]" if owner else f"the tables are {', '.join(groups)}"
    raise InvalidParameter(f"unknown table or setting {table!r}; {advice}")
