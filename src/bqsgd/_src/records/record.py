"""The records of a run: a client in a round, a round, and the whole run. The same types are written and read as JSON.

Numbers that JSON cannot hold are the strings "inf", "-inf" and "nan"; null means "not measured". docs/commands.md has
the schema. A run folder may come from somebody else, so every field is checked for type and range before it is used.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from bqsgd._src.errors import BqsgdError, InvalidParameter
from bqsgd._src.params import short_repr
from bqsgd._src.privacy.guarantee import Guarantee

MAX_COUNT = 2**63 - 1
MAX_TEXT = 4096
# The limits below bound the memory that a hostile run folder can make its reader use.
_MAX_CLIENTS_PER_ROUND = 100_000
_MAX_STAGES = 16
STAGES = ("gradients", "clip", "encode", "frame", "decode", "aggregate", "ledger")
"""The stages of a round that are timed, in order. A run may record others beside these."""


class RunFolderError(BqsgdError, ValueError):
    """A run folder is missing, unreadable, too large, or does not follow the schema."""


class Status(StrEnum):
    """The outcome of one client in one round."""

    OK = "ok"
    DECLINED = "declined"
    REFUSED = "refused"
    MISSING = "missing"


@dataclass(frozen=True, kw_only=True)
class ClientRecord:
    """One client in one round: whether its frame was used, the reason if not, and the size of the frame.

    client is None for a refused frame that does not name its client. points and width describe the coarsening; both are
    0 without one.
    """

    client: int | None
    status: Status
    reason: str | None = None
    frame_bytes: int = 0
    levels: int = 0
    trials: int = 0
    points: int = 0
    width: int = 0

    def __post_init__(self) -> None:
        if self.client is not None:
            _count("client", self.client)
        for name in ("frame_bytes", "levels", "trials", "points", "width"):
            _count(name, getattr(self, name))
        # `object.__setattr__` because the class is frozen: JSON brings text where we keep an enum or a checked value.
        try:
            object.__setattr__(self, "status", Status(self.status))
        except ValueError:
            allowed = ", ".join(Status)
            raise RunFolderError(f"status must be one of {allowed}, got {_shown(self.status)}") from None
        if self.reason is not None:
            object.__setattr__(self, "reason", _text("reason", self.reason))


@dataclass(frozen=True, kw_only=True)
class RoundRecord:
    """One line of rounds.jsonl. It holds public figures only: no field may depend on private data except through
    frames.

    time: seconds since the run began. epsilon_max: the largest proven epsilon that any client has spent so far.
    bytes_*: of this round alone, headers included.
    bytes_up_float32: the size of the used updates as 32-bit floats. bytes_down_float32: the same for the models sent.
    sum_width: bits of a coordinate of the round's secure sum; 0 without one.
    stepped: false if too few clients replied.
    seeded: true if the noise of any frame can be recomputed from a seed.
    """

    round: int
    time: float = 0.0
    test_accuracy: float | None = None
    test_metric: float | None = None
    test_loss: float | None = None
    epsilon_max: float | None = None
    bytes_up: int = 0
    bytes_down: int = 0
    bytes_up_float32: int = 0
    bytes_down_float32: int = 0
    sum_width: int = 0
    clients: tuple[ClientRecord, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)
    stepped: bool = True
    seeded: bool = False

    @property
    def used(self) -> int:
        """Number of frames that the server used."""
        return sum(entry.status is Status.OK for entry in self.clients)

    @property
    def trouble(self) -> list[ClientRecord]:
        """The clients whose frame was not used, and refused frames from unknown clients."""
        return [entry for entry in self.clients if entry.status is not Status.OK]

    def __post_init__(self) -> None:
        for name in ("round", "bytes_up", "bytes_down", "bytes_up_float32", "bytes_down_float32", "sum_width"):
            _count(name, getattr(self, name))
        for name in ("test_accuracy", "test_metric", "test_loss", "epsilon_max"):
            value = getattr(self, name)
            object.__setattr__(self, name, None if value is None else number(name, value))
        if not isinstance(self.stepped, bool) or not isinstance(self.seeded, bool):
            raise RunFolderError("stepped and seeded must be true or false")
        # JSON has "inf" and lists where we keep floats and tuples.
        object.__setattr__(self, "time", number("time", self.time))
        object.__setattr__(self, "clients", tuple(self.clients))
        if len(self.seconds) > _MAX_STAGES:
            raise RunFolderError(f"seconds must name at most {_MAX_STAGES} stages, got {len(self.seconds)}")
        object.__setattr__(self, "seconds", {name: number(name, value) for name, value in self.seconds.items()})

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types, the inverse of `from_dict`."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "clients"}
        # Client records hold checked integers and text only, so they skip `plain`; with 1,000 clients that saves time.
        return {**plain(fields), "clients": [dict(entry.__dict__) for entry in self.clients]}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> RoundRecord:
        """Read and check one round. Unknown fields are ignored, so that folders of newer versions can be read."""
        known = _select(cls, fields, "a round")
        clients = known.get("clients") or ()
        if not isinstance(clients, (list, tuple)) or len(clients) > _MAX_CLIENTS_PER_ROUND:
            raise RunFolderError(f"clients must be a list of at most {_MAX_CLIENTS_PER_ROUND} entries")
        known["clients"] = [ClientRecord(**_select(ClientRecord, entry, "a client")) for entry in clients]
        known["seconds"] = _mapping("seconds", known.get("seconds") or {})
        return cls(**known)


def plain(value: Any) -> Any:
    """`value` in JSON types. Infinities and NaN become "inf", "-inf" and "nan"; NumPy scalars become numbers.

    >>> plain({"epsilon": float("inf"), "accuracy": 0.5})
    {'epsilon': 'inf', 'accuracy': 0.5}
    """
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(entry) for entry in value]
    # An enum is also a str: this test must come first, or the enum itself would be kept.
    if isinstance(value, StrEnum):
        return str(value)
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if hasattr(value, "item"):  # a NumPy scalar
        return plain(value.item())
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    raise RunFolderError(f"a record can hold numbers, text, lists and tables, got {type(value).__name__}")


def number(name: str, value: object) -> float:
    """Check that `value` is a number and return it as a float; the strings of `plain` are read back."""
    if isinstance(value, str) and value in ("inf", "-inf", "nan", "infinity", "-infinity"):
        return float(value)
    if hasattr(value, "item") and not isinstance(value, (bool, int, float)):
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise RunFolderError(f'{name} must be a number, "inf", "-inf" or "nan", got {_shown(value)}')
    try:
        # An integer in JSON can have thousands of digits.
        return float(value)
    except OverflowError:
        raise RunFolderError(f"{name} is too large for a float") from None


def _text(name: str, value: object) -> str:
    """Check that `value` is a string; return at most 4,096 characters of it."""
    if not isinstance(value, str):
        raise RunFolderError(f"{name} must be text, got {_shown(value)}")
    return value if len(value) <= MAX_TEXT else value[: MAX_TEXT - 1] + "…"


def _mapping(name: str, value: object) -> dict[str, Any]:
    """Check that `value` is a table with text keys."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise RunFolderError(f"{name} must be a table, got {_shown(value)}")
    return dict(value)


def _select(kind: Any, fields: object, name: str) -> dict[str, Any]:
    """The entries of `fields` that the dataclass `kind` has. Raises if a required one is missing."""
    table = _mapping(name, fields)
    known = {key: table[key] for key in kind.__dataclass_fields__ if key in table}
    for key in ("round", "client", "status"):
        if key in kind.__dataclass_fields__ and key not in known:
            raise RunFolderError(f"{name} has no {key!r}")
    return known


def _count(name: str, value: object) -> int:
    """Check that `value` is an integer from 0 to 2^63 - 1."""
    # In Python true is an int, but in a record it is a mistake.
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_COUNT:
        raise RunFolderError(f"{name} must be an integer from 0 to 2^63 - 1, got {_shown(value)}")
    return value


def _shown(value: object) -> str:
    """An untrusted value, short enough for an error message."""
    return type(value).__name__ if isinstance(value, (list, dict, tuple)) else short_repr(value)


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The figures of a whole run. A figure that was not measured is None.

    metric: the value of the task's own metric, called metric_name; accuracy is None then.
    guarantee: that of the client with the largest epsilon (`guarantee_client`); None if nothing private was sent.
    config: the run's settings, a table per group.
    one_liar: how far one lying client can move the aggregate, in words.
    stopped: why the run ended by itself before its last round, if it did.
    best_rounds: with `patience`, the rounds done when the test data gave the best result, best_value of best_metric;
        the model of then is in the file best_model.
    """

    accuracy: float | None = None
    metric: float | None = None
    metric_name: str | None = None
    loss: float | None = None
    rounds: int = 0
    guarantee: Guarantee | None = None
    guarantee_client: int | None = None
    bytes_up: int = 0
    bytes_down: int = 0
    bytes_up_float32: int = 0
    bytes_down_float32: int = 0
    seeded: bool = False
    seconds: float | None = None
    one_liar: str | None = None
    stopped: str | None = None
    best_rounds: int | None = None
    best_metric: str | None = None
    best_value: float | None = None
    best_model: str | None = None
    versions: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def bits_per_coordinate(self) -> float | None:
        """Bits sent up, headers included, over the coordinates of the frames that were used."""
        return 32 * self.bytes_up / self.bytes_up_float32 if self.bytes_up_float32 else None

    @property
    def saving(self) -> float | None:
        """How many times fewer bytes went up than as 32-bit floats."""
        return self.bytes_up_float32 / self.bytes_up if self.bytes_up and self.bytes_up_float32 else None

    @property
    def saving_down(self) -> float | None:
        """How many times fewer bytes went down than as whole models of 32-bit floats."""
        return self.bytes_down_float32 / self.bytes_down if self.bytes_down and self.bytes_down_float32 else None

    @property
    def best_text(self) -> str | None:
        """The best model in a sentence; None if the run kept none."""
        if self.best_rounds is None or self.best_value is None:
            return None
        value = f"{self.best_value:.2%}" if self.best_metric == "accuracy" else f"{self.best_value:.4g}"
        return f"{self.best_metric} {value} after {self.best_rounds} rounds, in {self.best_model}"

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types, the inverse of `from_dict`."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "guarantee"}
        fields["guarantee"] = None if self.guarantee is None else self.guarantee.to_dict()
        in_json: dict[str, Any] = plain(fields | {"bits_per_coordinate": self.bits_per_coordinate})
        return in_json

    @classmethod
    def from_dict(cls, fields: object) -> Summary:
        """Read and check summary.json. Unknown fields are ignored."""
        table = _mapping("summary.json", fields)
        # Fail closed: if either place says that the noise was seeded, it was. A guarantee that does not say is refused,
        # because it might otherwise be shown as a privacy claim.
        claimed = table.get("guarantee")
        marks = [part["seeded"] for part in (table, claimed) if isinstance(part, Mapping) and "seeded" in part]
        if not all(isinstance(mark, bool) for mark in marks) or (claimed is not None and not marks):
            raise RunFolderError("seeded must be true or false, and must be there beside a guarantee")
        known: dict[str, Any] = {"seeded": any(marks)}
        for names, read in (
            (("accuracy", "metric", "loss", "seconds", "best_value"), number),
            (("rounds", "guarantee_client", "bytes_up", "bytes_down", "best_rounds"), _count),
            (("bytes_up_float32", "bytes_down_float32"), _count),
            (("one_liar", "metric_name", "stopped", "best_metric", "best_model"), _text),
            (("versions", "config"), _mapping),
        ):
            known |= {name: read(name, table[name]) for name in names if table.get(name) is not None}
        if claimed is not None:
            try:
                known["guarantee"] = Guarantee.from_dict({"seeded": any(marks), **_mapping("guarantee", claimed)})
            except InvalidParameter as error:
                raise RunFolderError(str(error)) from error
        return cls(**known)
