"""What a setting is: a field with a help text and rules, in a group that checks it.

A group is a table of config.toml, a panel of `bqsgd train --help` and a frozen dataclass. A setting has one name
everywhere outside its group: as an option, as a keyword and in Flower's run configuration.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import Field, fields
from difflib import get_close_matches
from functools import partial
from typing import Any, ClassVar, Self

from bqsgd._src.errors import InvalidParameter
from bqsgd._src.params import check_int, check_positive, short_repr

_KINDS: dict[str, type] = {"int": int, "float": float, "str": str, "bool": bool}
_KIND_NAMES = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}


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
    """One field of a group: its default, its help text and the rule for its values.

    name: what the setting is called outside the group, if not like the field. key: its key in config.toml, if not like
    the field. choices: the words that it may be; a field whose default is a tuple holds one or more of them.
    option: whether `bqsgd train` has an option for it.
    """
    rules = {"help": help, "name": name, "key": key, "between": between, "positive": positive, "choices": choices}
    return dataclasses.field(default=default, metadata=rules | {"option": option})


file_setting = partial(setting, option=False)
"""A setting without an option on the command line: it is set in a settings file (`bqsgd train --config`)."""


class Group:
    """A group of settings that checks each field by its own rule. A field that is None is not set and not checked."""

    title: ClassVar[str]

    def __post_init__(self) -> None:
        for name, field in self.settings().items():
            check_setting(field, name, getattr(self, field.name))

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
        """Build from the names that the settings have outside the group. An unknown name is refused."""
        return cls(**by_group({"": cls}, values)[""])

    def to_table(self) -> dict[str, Any]:
        """Plain values by key. A setting that is None is left out, because TOML has no null."""
        table: dict[str, Any] = {}
        for field in fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            # The only tuples are those of budget changes; TOML has neither tuples nor objects.
            if isinstance(value, tuple):
                value = [{k: v for k, v in vars(change).items() if v is not None} for change in value]
            if value is not None:
                table[field.metadata["key"] or field.name] = value
        return table

    @classmethod
    def read_table(cls, name: str, table: Any) -> dict[str, Any]:
        """The settings in the table `name`, by their names outside the group; values are not checked yet.

        Raises:
            InvalidParameter: `table` is not a table, or a key is not a setting of this group.
        """
        if not isinstance(table, Mapping):
            raise InvalidParameter(f"[{name}] must be a table of settings, got {type(table).__name__}")
        keys = cls.keys()
        # A key may also be spelt like the field: `optimizer`, which files hold as `optimiser`.
        names = {field.name: outside for outside, field in cls.settings().items()}
        names |= {key: outside for outside, key in keys.items()}
        unknown = sorted(str(key) for key in table if key not in names)
        if unknown:
            known = ", ".join(sorted(keys.values()))
            raise InvalidParameter(f"unknown setting {unknown[0]!r} in [{name}]; known: {known}")
        return {names[key]: value for key, value in table.items()}


def check_setting(field: Field[Any], name: str, value: Any) -> None:
    """Raise InvalidParameter, which calls the setting `name`, unless `value` obeys the rule of the field."""
    # `field.type` is a text, because every module of groups has `from __future__ import annotations`.
    rules, kind, several = field.metadata, kind_of(field), isinstance(field.default, tuple)
    if value is None:
        if not str(field.type).endswith("| None"):
            raise InvalidParameter(f"{name} must be given")
    elif rules["between"] is not None:
        check_int(name, value, *rules["between"])
    elif rules["positive"]:
        check_positive(name, value)
    elif rules["choices"]:
        words = value if several else (value,)
        if not isinstance(words, tuple) or not words or any(word not in rules["choices"] for word in words):
            number, choices = "some" if several else "one", ", ".join(rules["choices"])
            raise InvalidParameter(f"{name} must be {number} of {choices}, got {short_repr(value)}")
    # True and False are integers in Python: without the first test, `momentum = true` would pass for 1.
    elif (isinstance(value, bool) and kind in (int, float)) or not isinstance(
        value, (int, float) if kind is float else kind
    ):
        raise InvalidParameter(f"{name} must be {_KIND_NAMES[kind]}, got {short_repr(value)}")


def kind_of(field: Field[Any]) -> type:
    """The type of a setting's values: int for `int` and for `int | None`; object if it is not a plain value."""
    return _KINDS.get(str(field.type).removesuffix(" | None"), object)


def by_group(groups: Mapping[str, type[Group]], values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Sort settings into their groups: table -> field -> value.

    Raises:
        InvalidParameter: no group has a setting of that name.
    """
    grouped: dict[str, dict[str, Any]] = {table: {} for table in groups}
    for name, value in values.items():
        table = table_of(groups, name)
        if table is None:
            near = get_close_matches(name, [key for table in groups.values() for key in table.settings()], n=1)
            meant = f"; did you mean {near[0]!r}?" if near else ";"
            raise InvalidParameter(f"unknown setting {name!r}{meant} docs/training.md lists all settings")
        grouped[table][groups[table].settings()[name].name] = value
    return grouped


def table_of(groups: Mapping[str, type[Group]], name: str) -> str | None:
    """The table of config.toml that the setting `name` belongs to; None for an unknown name."""
    return next((table for table, group in groups.items() if name in group.settings()), None)


def read_tables(groups: Mapping[str, type[Group]], tables: Mapping[str, Any]) -> dict[str, Any]:
    """The settings in the tables of a file, by the names that options and keywords have; values are not checked yet.

    Raises:
        InvalidParameter: a table or a key is unknown. For a setting outside of its table, the message names the table.
    """
    settings: dict[str, Any] = {}
    for name, table in tables.items():
        if name not in groups:
            owner = table_of(groups, name)
            advice = f"it belongs in the table [{owner}]" if owner else f"the tables are {', '.join(groups)}"
            raise InvalidParameter(f"unknown table or setting {name!r}; {advice}")
        settings |= groups[name].read_table(name, table)
    return settings
