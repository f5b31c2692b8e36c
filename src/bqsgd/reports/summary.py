"""summary.json: what a finished (or stopped) run claims, with everything an epsilon must be stated with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bqsgd.reports.records import RunFolderError, count, mapping, number, plain, text


@dataclass(frozen=True, kw_only=True)
class Claim:
    """An epsilon and what must stand beside it. `nominal` figures use the same shape, and are no guarantee."""

    epsilon: float
    delta: float
    relation: str = "not stated"
    unit: str = "not stated"
    trust: str = "not stated"
    sampling: str = "not stated"
    method: str = "not stated"
    delta_floor: float | None = None

    def __post_init__(self) -> None:
        if not (self.epsilon >= 0 and self.delta >= 0):
            raise RunFolderError(f"epsilon and delta must be at least 0, got {self.epsilon} and {self.delta}")

    @classmethod
    def from_dict(cls, fields: object) -> Claim:
        """Read a guarantee as `Guarantee.to_dict` or the training loop writes it; sampling may be text or a table."""
        table = mapping("guarantee", fields)
        for name in ("epsilon", "delta"):
            if name not in table:
                raise RunFolderError(f"a guarantee without {name} cannot be shown")
        words = {
            name: _words(name, table[name])
            for name in ("relation", "unit", "trust", "sampling", "method")
            if table.get(name) is not None
        }
        floor = table.get("delta_floor")
        return cls(
            epsilon=number("epsilon", table["epsilon"]),
            delta=number("delta", table["delta"]),
            delta_floor=None if floor is None else number("delta_floor", floor),
            **words,
        )


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The figures of the headline. Absent figures are None, never guessed."""

    accuracy: float | None = None
    rounds: int = 0
    guarantee: Claim | None = None
    nominal: Claim | None = None
    bytes_up: int = 0
    bytes_down: int = 0
    bytes_up_float32: int = 0
    seeded: bool = False
    seconds: float | None = None
    versions: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_dict(cls, fields: object) -> Summary:
        """Read and check summary.json; unknown fields are ignored."""
        table = mapping("summary.json", fields)
        # Fail closed: a guarantee whose noise may have been seeded is not shown as one.
        claimed = table.get("guarantee")
        marks = [part["seeded"] for part in (table, claimed) if isinstance(part, Mapping) and "seeded" in part]
        if not all(isinstance(mark, bool) for mark in marks) or (claimed is not None and not marks):
            raise RunFolderError("seeded must be true or false, and must be there beside a guarantee")
        optional = {name: number(name, table[name]) for name in ("accuracy", "seconds") if table.get(name) is not None}
        counts = {
            name: count(name, table[name])
            for name in ("rounds", "bytes_up", "bytes_down", "bytes_up_float32")
            if table.get(name) is not None
        }
        claims = {
            name: Claim.from_dict(table[name]) for name in ("guarantee", "nominal") if table.get(name) is not None
        }
        if "guarantee" in claims and claims["guarantee"].delta >= 1:
            raise RunFolderError("the delta of a guarantee must be below 1")
        tables = {name: mapping(name, table[name]) for name in ("versions", "config") if table.get(name) is not None}
        return cls(seeded=any(marks), **optional, **counts, **claims, **tables)  # type: ignore[arg-type]


def _words(name: str, value: object) -> str:
    if isinstance(value, Mapping):
        return text(name, ", ".join(f"{key} {plain(entry)}" for key, entry in list(value.items())[:16]))
    return text(name, value)
