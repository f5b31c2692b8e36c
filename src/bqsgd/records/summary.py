"""summary.json: what a finished (or stopped) run came to, with everything an epsilon must be stated with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bqsgd.errors import InvalidParameter
from bqsgd.privacy.guarantee import Guarantee
from bqsgd.records.round import RunFolderError, count, mapping, number, plain


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The figures of the headline. Absent figures are None, never guessed.

    guarantee: of the client with the largest epsilon (`guarantee_client`), None when nothing private was sent.
    nominal_epsilon: as published; not a guarantee. config: the run's settings, a table per group.
    """

    accuracy: float | None = None
    loss: float | None = None
    rounds: int = 0
    guarantee: Guarantee | None = None
    guarantee_client: int | None = None
    nominal_epsilon: float | None = None
    bytes_up: int = 0
    bytes_down: int = 0
    bytes_up_float32: int = 0
    seeded: bool = False
    seconds: float | None = None
    versions: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def bits_per_coordinate(self) -> float | None:
        """Measured: all bytes sent up, headers included, over the coordinates of the frames that were used."""
        return 32 * self.bytes_up / self.bytes_up_float32 if self.bytes_up_float32 else None

    @property
    def saving(self) -> float | None:
        """How many times fewer bytes went up than as 32-bit floats."""
        return self.bytes_up_float32 / self.bytes_up if self.bytes_up and self.bytes_up_float32 else None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types, the inverse of `from_dict`."""
        own = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "guarantee"}
        own["guarantee"] = None if self.guarantee is None else self.guarantee.to_dict()
        fields: dict[str, Any] = plain(own | {"bits_per_coordinate": self.bits_per_coordinate})
        return fields

    @classmethod
    def from_dict(cls, fields: object) -> Summary:
        """Read and check summary.json; unknown fields are ignored."""
        table = mapping("summary.json", fields)
        # Fail closed: a guarantee whose noise may have been seeded is not shown as one.
        claimed = table.get("guarantee")
        marks = [part["seeded"] for part in (table, claimed) if isinstance(part, Mapping) and "seeded" in part]
        if not all(isinstance(mark, bool) for mark in marks) or (claimed is not None and not marks):
            raise RunFolderError("seeded must be true or false, and must be there beside a guarantee")
        known: dict[str, Any] = {"seeded": any(marks)}
        for names, read in (
            (("accuracy", "loss", "nominal_epsilon", "seconds"), number),
            (("rounds", "guarantee_client", "bytes_up", "bytes_down", "bytes_up_float32"), count),
            (("versions", "config"), mapping),
        ):
            known |= {name: read(name, table[name]) for name in names if table.get(name) is not None}
        if claimed is not None:
            try:
                known["guarantee"] = Guarantee.from_dict({"seeded": any(marks), **mapping("guarantee", claimed)})
            except InvalidParameter as error:
                raise RunFolderError(str(error)) from error
        return cls(**known)
