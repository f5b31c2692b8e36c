"""Releases that were made elsewhere, as loss distributions of Google's `dp_accounting`."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from bqsgd._src.errors import AccountingError
from bqsgd._src.privacy._pairs import MASS_TOLERANCE, Atoms, Floats
from bqsgd._src.release import Relation, Spent

_COARSE_STEP = 2e-3
"""The grid on which events are looked at first, to see how far their losses spread."""
_FINE_POINTS = 1 << 15
_MOST_EXCESS = 1e-6
_LEAST_LOSS = -600.0


def _dp_event(fields: dict[str, Any]) -> Any:
    """The DpEvent with these fields, which are not those of a composed one."""
    from dp_accounting import dp_event  # imported here: it takes a second, and most processes never need it

    cls = getattr(dp_event, fields["event"])  # one of the names that OutsideEvent allows
    values = {name: value for name, value in fields.items() if name not in ("event", "event_of")}
    if "event_of" in fields:
        values["event"] = _dp_event(fields["event_of"])
    return cls(**values)


def _parts(fields: dict[str, Any], times: int) -> Iterator[tuple[dict[str, Any], int]]:
    """The events that a composed one consists of, none of them composed, and how often each happens."""
    if fields["event"] == "SelfComposedDpEvent":
        yield from _parts(fields["event_of"], times * fields["count"])
    elif fields["event"] == "ComposedDpEvent":
        for one in fields["events"]:
            yield from _parts(one, times)
    else:
        yield fields, times


def _loss_distribution(spent: Spent, step: float) -> Any:
    """Google's PrivacyLossDistribution of all outside events among `spent`, on the grid with this step.

    Raises:
        AccountingError: an event cannot be accounted under its relation.
    """
    from dp_accounting.pld import privacy_loss_distribution as google
    from dp_accounting.pld.pld_privacy_accountant import PLDAccountant
    from dp_accounting.privacy_accountant import NeighboringRelation, UnsupportedEventError

    names = {
        Relation.ADD_REMOVE: NeighboringRelation.ADD_OR_REMOVE_ONE,
        Relation.REPLACE: NeighboringRelation.REPLACE_ONE,
    }
    total = google.identity(value_discretization_interval=step)
    try:
        with warnings.catch_warnings(action="ignore", category=RuntimeWarning):
            for release, rounds in spent:
                for fields, times in _parts(release.event.fields, rounds) if release.event is not None else ():
                    accountant = PLDAccountant(names[release.terms.sensitivity.relation], step)
                    # Google's accountant counts a randomised response once, however often it happens.
                    often = 1 if fields["event"] == "RandomizedResponseDpEvent" else times
                    accountant.compose(_dp_event(fields), often)
                    total = total.compose(accountant._pld.self_compose(times // often))
    except UnsupportedEventError as error:
        raise AccountingError(f"an outside event cannot be accounted: {str(error)[:200]}") from error
    except (ArithmeticError, IndexError, MemoryError, ValueError) as error:
        raise AccountingError(f"outside events could not be composed: {str(error)[:200]}") from error
    return total


def atoms(spent: Spent) -> tuple[Atoms, Atoms]:
    """All outside events among `spent`, composed, as atoms: see `_atoms_of`."""
    return _atoms_of(tuple((release, rounds) for release, rounds in spent if release.event is not None))


@lru_cache(maxsize=32)  # a ledger asks about the same events with ever more messages
def _atoms_of(spent: Spent) -> tuple[Atoms, Atoms]:
    """The events, composed, as atoms on a grid of their own: "remove" and "add".

    Google's code takes long for some events on a fine grid, so theirs is as fine as its span allows; whoever composes
    them with messages puts these atoms on the messages' grid.
    """
    coarse = _loss_distribution(spent, _COARSE_STEP)
    points = max(float(np.ptp(_points(pmf)[0])) + 1 for pmf in (coarse._pmf_remove, coarse._pmf_add))
    fine = _loss_distribution(spent, points * _COARSE_STEP / _FINE_POINTS)
    return _atoms(fine._pmf_remove), _atoms(fine._pmf_add)


def _points(law: Any) -> tuple[npt.NDArray[np.int64], Floats]:
    """The grid points that have mass, and their P-masses; Google keeps laws of few points as a dictionary."""
    if hasattr(law, "_loss_probs"):
        index = np.fromiter(sorted(law._loss_probs), np.int64)
        return index, np.array([law._loss_probs[i] for i in index.tolist()])
    seen = np.flatnonzero(law._probs)
    return law._lower_loss + seen, np.asarray(law._probs)[seen]


def _atoms(law: Any) -> Atoms:
    index, p = _points(law)
    infinite, loss = law._infinity_mass, index * law._discretization
    mass = float(np.sum(p)) + infinite
    # Mass above 1 makes the figure larger, and Google's sums leave some 1e-8 of it.
    if not -MASS_TOLERANCE <= mass - 1.0 <= _MOST_EXCESS:
        raise AccountingError(f"the loss distribution of an outside event weighs {mass!r}, not 1")
    # Transforms leave masses of 1e-17 at losses far below 0, whose Q-masses would overflow. A larger loss is allowed.
    loss = np.maximum(loss, _LEAST_LOSS)
    if np.any(p < -1e-12):
        raise AccountingError("the loss distribution of an outside event has negative mass")
    p = np.maximum(p, 0.0)
    # What is missing from 1 may have had any loss.
    lost = max(0.0, 1.0 - mass)
    # Only the P-masses are composed further.
    return Atoms(loss=loss, p=p, q=p * np.exp(-loss), p_only=min(1.0, infinite + lost), q_only=0.0)
