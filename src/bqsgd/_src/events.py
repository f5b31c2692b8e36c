"""Releases that were made elsewhere, as `dp_accounting` describes them: a DpEvent in plain JSON types.

A ledger stores the text. It names one of the events that Google's PLD accountant composes, with its parameters; nothing
of it is imported or evaluated. `privacy/_events.py` turns it into a loss distribution.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bqsgd._src.errors import InvalidParameter
from bqsgd._src.params import check_int, check_positive, short_repr

MOST_TEXT = 1 << 14
_MOST_DEPTH = 6
_MOST_COUNT = 1 << 16
"""How often an event may be composed with itself, all levels together."""
_MOST_LOSS = 1000.0
"""An event whose loss may spread further has no meaningful epsilon, and would need grids without bound."""
_NUMBERS = {
    "NoOpDpEvent": (),
    "GaussianDpEvent": ("noise_multiplier",),
    "LaplaceDpEvent": ("noise_multiplier",),
    "DiscreteLaplaceDpEvent": ("noise_parameter", "sensitivity"),
    "RandomizedResponseDpEvent": ("noise_parameter", "num_buckets"),
    "TruncatedSubsampledGaussianDpEvent": (
        "dataset_size",
        "sampling_probability",
        "truncated_batch_size",
        "noise_multiplier",
    ),
}
"""The events without parts, and their numbers."""
_WHOLE = ("sensitivity", "num_buckets", "dataset_size", "truncated_batch_size")


@dataclass(frozen=True)
class OutsideEvent:
    """A release that was not made by this library: canonical JSON of a DpEvent. Make it with `OutsideEvent.of`.

    Raises:
        InvalidParameter: the text is not such an event, or one that cannot be accounted here.

    >>> OutsideEvent.of({"event": "GaussianDpEvent", "noise_multiplier": 4.0})
    OutsideEvent(text='{"event":"GaussianDpEvent","noise_multiplier":4.0}')
    """

    text: str

    def __post_init__(self) -> None:
        if not isinstance(self.text, str) or len(self.text) > MOST_TEXT:
            raise InvalidParameter(f"an event must be JSON text of at most {MOST_TEXT} characters")
        try:
            fields = json.loads(self.text)
        except (ValueError, RecursionError) as error:
            raise InvalidParameter(f"an event must be JSON text: {str(error)[:100]}") from error
        # Canonical, because equal events must be equal keys of a tally.
        object.__setattr__(self, "text", _canonical(_checked(fields, depth=0, count=1)))

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> OutsideEvent:
        """The event with these fields: its class name as `event`, and its parameters."""
        return cls(_canonical(fields))

    @property
    def fields(self) -> dict[str, Any]:
        """The event in plain JSON types."""
        fields: dict[str, Any] = json.loads(self.text)
        return fields


def _canonical(fields: Mapping[str, Any]) -> str:
    try:
        return json.dumps(fields, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidParameter(f"an event must be of plain JSON types: {str(error)[:100]}") from error


def _checked(fields: object, *, depth: int, count: int) -> dict[str, Any]:
    """The fields with every number checked; `count` is how often the event is composed by those around it."""
    if not isinstance(fields, dict) or not isinstance(fields.get("event"), str) or depth > _MOST_DEPTH:
        raise InvalidParameter(f"not an event: {short_repr(fields)}")
    name, given = fields["event"], {key: value for key, value in fields.items() if key != "event"}
    if name in _NUMBERS:
        _expect(given, *_NUMBERS[name])
        numbers: dict[str, Any] = {
            key: check_int(key, value, 1, 10**6) if key in _WHOLE else check_positive(key, value)
            for key, value in given.items()
        }
        _check_loss(name, numbers, count)
        return {"event": name, **numbers}
    if name == "SelfComposedDpEvent":
        _expect(given, "event_of", "count")
        times = check_int("count", given["count"], 1, max(1, _MOST_COUNT // count))
        return {"event": name, "event_of": _checked(given["event_of"], depth=depth + 1, count=count * times)} | {
            "count": times
        }
    if name == "ComposedDpEvent":
        _expect(given, "events")
        if not isinstance(given["events"], list) or not 1 <= len(given["events"]) <= 100:
            raise InvalidParameter("a composed event has 1 to 100 events")
        return {"event": name, "events": [_checked(one, depth=depth + 1, count=count) for one in given["events"]]}
    if name == "PoissonSampledDpEvent":
        _expect(given, "event_of", "sampling_probability")
        rate = check_positive("sampling_probability", given["sampling_probability"])
        inner = _checked(given["event_of"], depth=depth + 1, count=1)
        if rate > 1 or inner["event"] not in ("GaussianDpEvent", "LaplaceDpEvent"):
            raise InvalidParameter("a sampled event is a Gaussian or Laplace one, with a probability of at most 1")
        return {"event": name, "event_of": inner, "sampling_probability": rate}
    if name == "MixtureOfGaussiansDpEvent":
        _expect(given, "sensitivities", "sampling_probs", "standard_deviation")
        lists = [given["sensitivities"], given["sampling_probs"]]
        if not all(isinstance(one, list) and 1 <= len(one) <= 1000 for one in lists) or len(lists[0]) != len(lists[1]):
            raise InvalidParameter("sensitivities and sampling_probs must be lists of one length, up to 1,000")
        moves, chances = ([0.0 if x == 0 else check_positive("an entry", x) for x in one] for one in lists)
        deviation = check_positive("standard_deviation", given["standard_deviation"])
        if abs(math.fsum(chances) - 1) > 1e-9:
            raise InvalidParameter("sampling_probs must add up to 1")
        _check_loss(name, {"spread": max(moves) / deviation}, count)
        return {"event": name, "sensitivities": moves, "sampling_probs": chances, "standard_deviation": deviation}
    known = [*_NUMBERS, "MixtureOfGaussiansDpEvent", "SelfComposedDpEvent", "ComposedDpEvent", "PoissonSampledDpEvent"]
    raise InvalidParameter(f"unknown event {short_repr(name)}; known are {', '.join(known)}")


def _expect(given: Mapping[str, Any], *names: str) -> None:
    if set(given) != set(names):
        raise InvalidParameter(
            f"an event of this kind has the fields {', '.join(names)}, got {short_repr(list(given))}"
        )


def _check_loss(name: str, numbers: Mapping[str, Any], count: int) -> None:
    """Refuse an event whose loss, so often, is beyond any meaning."""
    loss = 0.0
    if numbers.get("sampling_probability", 0.5) > 1:
        raise InvalidParameter("sampling_probability must be at most 1")
    if "Gaussian" in name:
        mu = math.sqrt(count) * (numbers["spread"] if "spread" in numbers else 1 / numbers["noise_multiplier"])
        loss = mu * mu / 2 + 10 * mu  # a product may be infinite, where a power would raise an error of its own
    elif name == "LaplaceDpEvent":
        loss = count / numbers["noise_multiplier"]
    elif name == "DiscreteLaplaceDpEvent":
        loss = count * numbers["noise_parameter"] * numbers["sensitivity"]
    elif name == "RandomizedResponseDpEvent":
        if numbers["noise_parameter"] > 1:
            raise InvalidParameter("noise_parameter of a randomised response must be at most 1")
        loss = count * math.log1p(numbers["num_buckets"] / numbers["noise_parameter"])
    if not loss <= _MOST_LOSS:
        raise InvalidParameter(f"an event of {name} with these parameters, {count} times, reveals too much to account")
