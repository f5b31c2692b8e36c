"""To and from Google's `dp_accounting`: our releases as its loss distributions and events, its events in our ledger."""

from __future__ import annotations

from typing import Any

import attr
from dp_accounting import dp_event, privacy_accountant
from dp_accounting.pld import pld_pmf, pld_privacy_accountant
from dp_accounting.pld import privacy_loss_distribution as google

from bqsgd._src.errors import InvalidParameter
from bqsgd._src.events import OutsideEvent
from bqsgd._src.params import check_int, check_positive
from bqsgd._src.privacy._pairs import FLOAT_CHARGE, Pair
from bqsgd._src.privacy._rounds import beyond_meaning, sampled_message
from bqsgd._src.release import RELATIONS, Relation, Release, Scheme, Trust, Unit

_INTERVAL = 1e-4
_MOST_POINTS = 1 << 22
_WHOLE = ("count", "sensitivity", "num_buckets", "dataset_size", "truncated_batch_size")
_NEIGHBOURS = {
    Relation.ADD_REMOVE: privacy_accountant.NeighboringRelation.ADD_OR_REMOVE_ONE,
    Relation.REPLACE: privacy_accountant.NeighboringRelation.REPLACE_ONE,
}


def privacy_loss_distribution(
    release: Release, *, value_discretization_interval: float = _INTERVAL
) -> google.PrivacyLossDistribution:
    """One message as Google's loss distribution: an upper bound for all data, which composes with their others.

    Its "remove" and "add" are those of a null record in the place of a record; under replace-one both orders are the
    same. The figures are as tight as the interval of the grid allows.

    Raises:
        InvalidParameter: the release reveals too much for a grid of this interval, was made elsewhere, or is a sum
            (whose small charge to delta grows with epsilon, which a loss distribution cannot say; use `Accountant`).
        AccountingError: no pair is proven for the release.

    >>> import bqsgd
    >>> terms = bqsgd.Terms.of_batch(dimension=10, batch_size=32, dataset_size=1000)
    >>> release = bqsgd.Release(mechanism=bqsgd.Mechanism(levels=1, trials=251), terms=terms)
    >>> loss = privacy_loss_distribution(release).self_compose(100)
    >>> 0.0 < loss.get_epsilon_for_delta(1e-5) < 0.02
    True
    """
    interval = check_positive("value_discretization_interval", value_discretization_interval)
    if release.event is not None:
        raise InvalidParameter("this release was made elsewhere; compose its own event")
    if release.terms.trust is Trust.SUMS_ONLY:
        raise InvalidParameter("a sum cannot be given as a loss distribution; use bqsgd.Accountant for sums")
    if beyond_meaning(release):
        raise InvalidParameter("the release reveals more than any meaningful epsilon, so there is no distribution")
    atoms = sampled_message(release)
    if not atoms.loss.size or float(atoms.loss[-1] - atoms.loss[0]) / interval > _MOST_POINTS:
        raise InvalidParameter(f"the losses of this release do not fit a grid with the interval {interval:g}")
    pair = atoms.on_grid(interval)
    remove = _pmf(pair)
    if release.terms.sampling.scheme is Scheme.FIXED_SIZE:
        return google.PrivacyLossDistribution(remove)
    return google.PrivacyLossDistribution(remove, _pmf(pair.reversed()))


def _pmf(pair: Pair) -> pld_pmf.DensePLDPmf:
    mass = pair.p
    # What is missing from 1 may have had any loss.
    infinite = pair.p_only + FLOAT_CHARGE + max(0.0, 1.0 - float(mass.sum()) - pair.p_only)
    return pld_pmf.DensePLDPmf(pair.step, pair.first, mass, min(1.0, infinite), True)


@attr.s(frozen=True, slots=True, auto_attribs=True)
class ReleaseDpEvent(dp_event.DpEvent):  # type: ignore[misc]
    """One message of ours as a DpEvent; `PLDAccountant` of this module composes it with any of Google's."""

    release: Release


class PLDAccountant(pld_privacy_accountant.PLDAccountant):  # type: ignore[misc]
    """Google's PLD accountant, which knows our messages too, also inside composed events.

    >>> import bqsgd
    >>> from dp_accounting import dp_event
    >>> terms = bqsgd.Terms.of_batch(dimension=10, batch_size=32, dataset_size=1000)
    >>> release = bqsgd.Release(mechanism=bqsgd.Mechanism(levels=1, trials=251), terms=terms)
    >>> accountant = PLDAccountant().compose(ReleaseDpEvent(release), 100).compose(dp_event.GaussianDpEvent(4.0))
    >>> 0.9 < accountant.get_epsilon(1e-5) < 1.1
    True
    """

    def _maybe_compose(self, event: dp_event.DpEvent, count: int, do_compose: bool) -> Any:
        if isinstance(event, dp_event.RandomizedResponseDpEvent) and do_compose and count > 1:
            # Google's accountant counts it once, however often it happens.
            alone = pld_privacy_accountant.PLDAccountant(
                self._neighboring_relation, self._value_discretization_interval
            )
            alone.compose(event)
            total = getattr(self, "_pld")  # noqa: B009  # typed nowhere, so an attribute access has no type
            self._pld = total.compose(alone._pld.self_compose(count))
            return None
        if not isinstance(event, ReleaseDpEvent):
            return super()._maybe_compose(event, count, do_compose)
        terms = event.release.terms
        # What hides a replacement hides a removal as well, but not the other way round (Claim 11).
        if (
            terms.sensitivity.relation is not Relation.REPLACE
            and self._neighboring_relation is not (_NEIGHBOURS[Relation.ADD_REMOVE])
        ):
            return self.CompositionErrorDetails(
                invalid_event=event, error_message=f"the release is accounted under {terms.sensitivity.relation}"
            )
        if do_compose and count:
            one = privacy_loss_distribution(
                event.release, value_discretization_interval=self._value_discretization_interval
            )
            total = getattr(self, "_pld")  # noqa: B009  # typed nowhere, so an attribute access has no type
            self._pld = total.compose(one.self_compose(count) if count > 1 else one)
        return None


def outside_release(event: dp_event.DpEvent, *, relation: str = "add-remove", unit: str = "sample") -> Release:
    """A release that was made elsewhere, described by Google's event, to be counted in a ledger or an `Accountant`.

    relation, unit: whom that release hides. It must be the same record that the ledger's messages hide: in add/remove
    one, with a null record in its place. Nothing here can check that; the guarantee states it as an assumption.

    Raises:
        InvalidParameter: Google's PLD accountant does not know the event under this relation, or it reveals too much.

    >>> import bqsgd
    >>> from dp_accounting import dp_event
    >>> histogram = outside_release(dp_event.LaplaceDpEvent(noise_multiplier=2.0))
    >>> round(bqsgd.Accountant().compose(histogram).epsilon(1e-9), 4)
    0.5
    """
    if relation not in RELATIONS or unit not in list(Unit):
        raise InvalidParameter(f"relation is one of {', '.join(RELATIONS)}, unit one of {', '.join(Unit)}")
    neighbours = RELATIONS[relation]
    known = OutsideEvent.of(_fields(event, 0))
    if not pld_privacy_accountant.PLDAccountant(_NEIGHBOURS[neighbours]).supports(event):
        raise InvalidParameter(f"dp_accounting cannot account {event} under {neighbours}")
    return Release.outside(known, relation=neighbours, unit=Unit(unit))


def _fields(event: dp_event.DpEvent, depth: int) -> dict[str, Any]:
    if not isinstance(event, dp_event.DpEvent) or not attr.has(type(event)) or depth > 10:
        raise InvalidParameter("an event must be one of dp_accounting.dp_event")
    fields: dict[str, Any] = {"event": type(event).__name__}
    for field in attr.fields(type(event)):
        value = getattr(event, field.name)
        if isinstance(value, dp_event.DpEvent):
            fields["event_of"] = _fields(value, depth + 1)
        elif field.name == "events":
            fields["events"] = [_fields(one, depth + 1) for one in value]
        elif field.name in _WHOLE:
            fields[field.name] = check_int(field.name, value, 0, 2**53)
        else:
            single = isinstance(value, (int, float))
            fields[field.name] = float(value) if single else [float(one) for one in value]
    return fields
