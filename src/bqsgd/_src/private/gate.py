"""The gate on updates: what a site's own training made leaves it clipped, noisy and counted, or not at all.

For federations that have a training loop and a framework of their own. The unit is the whole site (or user): the update
of its model is clipped as one vector, encoded with the noise of the study's plan, and the spend is in the site's ledger
before the update is even looked at. What comes out is a frame; `open_update` is the server's side.

`thin_update` is for updates that are private already, such as those of a model trained with `make_private`: the same
frames, without noise. Nothing is counted, because only the released model goes in.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bqsgd._src.client.draws import Sources
from bqsgd._src.client.sender import Outlet, Sender
from bqsgd._src.client.values import clip_update
from bqsgd._src.codec import decode_frame, encode_frame
from bqsgd._src.errors import FrameError, InvalidParameter
from bqsgd._src.ledger import Ledger, PrivacyBudget
from bqsgd._src.ledger.spending import Charge, Spending
from bqsgd._src.mechanism.properties import noise_variance
from bqsgd._src.noise import privacy_rng
from bqsgd._src.params import Mechanism, check_int, check_positive
from bqsgd._src.persample.clips import L2
from bqsgd._src.planner.plan import MAX_BITS, Budget, Plan
from bqsgd._src.planner.recipe import fitting_range
from bqsgd._src.planner.sums import SumPlan, in_sums, plan_sum
from bqsgd._src.privacy.accountant import Accountant
from bqsgd._src.privacy.guarantee import Guarantee
from bqsgd._src.release import Release, Sampling, Scheme, Terms, Unit
from bqsgd._src.runtime.interrupts import errors_dropped
from bqsgd._src.secure.graph import Thresholds
from bqsgd._src.settings.client_plan import clipped_terms, plan_release
from bqsgd._src.settings.study import Study, check_not_lost
from bqsgd._src.storage import Closing, closed_on_error
from bqsgd._src.wire.frame import read_frame

_log = logging.getLogger("bqsgd.gate")
Update = npt.NDArray[np.float64]
_FEWEST_BITS, _MOST_THIN_BITS = 2, 8


class UpdateGate(Closing):
    """Sends the updates of one site, one after another, for one study. Several processes may take turns.

    >>> import tempfile
    >>> gate = UpdateGate(
    ...     Path(tempfile.mkdtemp()) / "site.ledger", study="trial-7", rounds=2, epsilon=8, delta=1e-5, clip_norm=1.0)
    >>> frame = gate.send(lambda: np.array([0.3, -0.2, 0.0]), dimension=3)
    >>> open_update(frame, ranges=[gate.range], sizes=[3], largest_range=1.0).shape
    (3,)
    >>> gate.sent, gate.guarantee().unit.value
    (1, 'client')
    >>> gate.close()

    Args:
        ledger: the site's ledger, open, or its path. If the file does not exist, it is made with the study's budget.
        study: name of the study; its plan is made for the first update and kept beside the ledger.
        rounds: updates that the site sends in the whole study.
        epsilon, delta: the study's budget. The ledger's own, which counts all studies, holds as well.
        clip_norm: Euclidean bound of an update.
        bits: most bits per coordinate.
        mechanism: levels and trials to use instead of planned ones (of the whole sum, with a rule); the ledger still
            enforces the budget.
        rule: of the secure sums that the updates go into; the noise is then that of a whole sum. None for frames.
        seed: reproducible noise, without a privacy claim.
    """

    def __init__(
        self,
        ledger: str | Path | Ledger,
        *,
        study: str,
        rounds: int,
        epsilon: float,
        delta: float,
        clip_norm: float,
        bits: int = 8,
        mechanism: Mechanism | None = None,
        rule: Thresholds | None = None,
        seed: int | None = None,
    ) -> None:
        if rule is not None and mechanism not in (None, plain_of(mechanism)):
            raise InvalidParameter("the clients of a secure sum add binomial noise: give levels and trials alone")
        self._mechanism = mechanism
        if mechanism is not None and mechanism.noise is not None:
            mechanism.noise.to_bytes()  # raises if no frame can carry this law, before anything is spent
        self._clip, self._rounds, self._rule = L2(norm=clip_norm), check_int("rounds", rounds, 1, 2**40), rule
        self._budget = Budget(bits=bits, epsilon=epsilon, delta=delta)
        self._ledger = opened_ledger(ledger, self._budget.privacy)
        # A ledger that was open already belongs to the caller, who closes it.
        self._close = weakref.finalize(self, (lambda: None) if isinstance(ledger, Ledger) else self._ledger.close)
        with closed_on_error(self):
            self._study = Study(self._ledger, study)
        self._client = self._ledger.client
        spending = Spending(self._ledger, run=self._study.run, seeded=seed is not None)
        self._sender = Sender(spending, Sources(seed=seed, client=self._client))
        self._sender.next_round = self._study.taken

    @property
    def sent(self) -> int:
        """Updates of this study that the ledger has counted."""
        return self._sender.next_round

    @property
    def range(self) -> float:
        """R: a clipped update is clamped to [-R, R] and encoded there. The server must know it."""
        if self._study.plan is not None:
            return self._study.range
        return update_range(self._budget, clip_norm=self._clip.norm, rounds=self._rounds)

    def plan(self, dimension: int) -> Plan:
        """The study's plan for updates of this many coordinates, made on first use.

        Raises:
            Infeasible: no noise meets what is left of the budget.
            InvalidParameter: the study was planned with other settings or another dimension.
        """
        terms = self._terms(dimension)
        if self._study.plan is None:
            if self._mechanism is not None:
                release = Release(mechanism=self._mechanism, terms=terms)
            elif self._rule is not None:
                planned = update_sum(self._budget.privacy, terms, self._rule, rounds=self._rounds)
                release = Release(mechanism=planned.mechanism, terms=terms)
            else:
                release = plan_release(terms, self._budget, rounds=self._rounds)
            self._study.keep(self._planned(release), range=self.range)
        self._study.check_same(budget=self._budget, rounds=self._rounds, terms=terms)
        assert self._study.plan is not None
        if self._mechanism not in (None, self._study.plan.mechanism):
            raise InvalidParameter(
                f"the study {self._study.name!r} has the mechanism {self._study.plan.mechanism}, not {self._mechanism}"
            )
        return self._study.plan

    def _planned(self, release: Release) -> Plan:
        fitting = self._ledger.headroom(release)
        if fitting < self._rounds:
            _log.warning(
                "%s: of the %d updates of the study %r, %d fit into what is left of the ledger's budget",
                self._ledger.path, self._rounds, self._study.name, fitting,
            )  # fmt: skip
        guarantee = Accountant().compose(release, self._rounds).guarantee(delta=self._budget.delta)
        variance = noise_variance(release.mechanism)
        return Plan(budget=self._budget, release=release, rounds=self._rounds, variance=variance, guarantee=guarantee)

    def _terms(self, dimension: int) -> Terms:
        return update_terms(self._clip, range=self.range, dimension=dimension, rule=self._rule)

    def send(
        self,
        update: Callable[[], npt.ArrayLike],
        *,
        dimension: int,
        round: int | None = None,
        outlet: Outlet | None = None,
    ) -> bytes:
        """Count one update, then make it and encode it; the frame may leave.

        update: trains, and returns the update as one vector. It runs after the spend, so whatever it does there is a
            frame: if it raises an error, or returns another shape or a value that is not finite, the update is zero.
        round: of the study, for a secure sum; those that were left out cannot be sent later. Default: the next one.
        outlet: of a secure sum; a frame by default.

        Raises:
            BudgetExhausted: the study's updates are all sent, or the budget is spent. Nothing was recorded.
            LedgerError: another process sends for this study at the same time. Nothing may leave.
            InvalidParameter: the round was counted before. Nothing may leave.
        """
        plan, following = self.plan(dimension), self._sender.next_round
        round = following if round is None else check_int("round", round, 0, 2**40)
        if round < following:
            raise InvalidParameter(
                f"round {round} of the study {self._study.name!r} was counted before; the next is {following}"
            )
        if (outlet is None) != (self._rule is None):
            raise InvalidParameter("a gate with a rule of secure sums sends into those sums, and no other gate does")
        self._study.check_left(round)
        charge = Charge(release=plan.release, round=round, last_round=round, within=self._budget.privacy)
        frames = partial(encode_frame, client=self._client, range=self.range)
        return bytes(self._sender.send(charge, outlet or frames, lambda: self._clipped(update, dimension)))

    def _clipped(self, update: Callable[[], npt.ArrayLike], dimension: int) -> Update:
        with errors_dropped("the training failed; its update counts as zero"):
            values = np.asarray(update(), dtype=np.float64)
            if values.shape == (dimension,):
                return clip_update(values, self._clip)
        return np.zeros(dimension)

    def guarantee(self) -> Guarantee | None:
        """The guarantee of everything that the ledger holds; None before the first update."""
        return self._sender.spending.guarantee(delta=self._ledger.budget.delta)

    def epsilon_after_next(self) -> float:
        """What the ledger would hold after one more update of this study; infinite if there is no room for one."""
        plan, spending = self._study.plan, self._sender.spending
        if plan is None:
            raise InvalidParameter("the study has no plan yet: it is made for the first update")
        room = self._ledger.headroom(plan.release, run=self._study.run, within=self._budget.privacy)
        if self.sent >= plan.rounds or room < 1:
            return math.inf
        return spending.tally.compose(plan.release, 1).guarantee(delta=self._ledger.budget.delta).epsilon

    def close(self) -> None:
        """Close the ledger."""
        self._close()


def plain_of(mechanism: Mechanism | None) -> Mechanism | None:
    """The mechanism with the same levels and trials, binomial noise and all codes: what a secure sum adds up to."""
    return None if mechanism is None else Mechanism(levels=mechanism.levels, trials=mechanism.trials)


def update_range(budget: Budget, *, clip_norm: float, rounds: int) -> float:
    """R of a study of updates."""
    fitting = fitting_range(budget, clip_norm=2 * clip_norm, batch_size=1, rate=1.0, messages=rounds)
    return min(fitting, clip_norm)


def update_terms(clip: L2, *, range: float, dimension: int, rule: Thresholds | None = None) -> Terms:
    """The terms of a study of updates; rule: of the secure sums that they go into."""
    terms = clipped_terms(
        clip,
        range=range,
        batch_size=1,
        sampling=Sampling(scheme=Scheme.NONE),
        dimension=check_int("dimension", dimension, 1, 2**53),
        unit=Unit.CLIENT,
    )
    return terms if rule is None else in_sums(terms, rule)


@lru_cache(maxsize=64)
def update_sum(budget: PrivacyBudget, terms: Terms, rule: Thresholds, *, rounds: int) -> SumPlan:
    """The plan of the secure sums of a study of updates; kept, since it takes seconds."""
    return plan_sum(budget, terms, rule, rounds=rounds)


def thin_update(update: Sequence[npt.ArrayLike], *, bits: int = 8) -> tuple[bytes, list[float]]:
    """A frame of a few bits per coordinate, and the range of each array. It protects nothing: no noise is added.

    >>> frame, ranges = thin_update([np.array([1.0, -2.0]), np.zeros(3)], bits=3)
    >>> open_update(frame, ranges=ranges, sizes=[2, 3], largest_range=10.0)[1:]
    array([-2.,  0.,  0.,  0.])

    Raises:
        NonFiniteInput: a value is not finite.
    """
    levels = (1 << (check_int("bits", bits, _FEWEST_BITS, _MOST_THIN_BITS) - 1)) - 1
    arrays = [np.asarray(values, dtype=np.float64).ravel() for values in update]
    # An array of zeros has no size to go by, and any range encodes it without error.
    ranges = [float(np.max(np.abs(values), initial=0.0)) or 1.0 for values in arrays]
    mechanism, reach = Mechanism(levels=levels, trials=0), np.repeat(ranges, [values.size for values in arrays])
    frame = encode_frame(
        np.concatenate(arrays), mechanism, range=reach, rng=privacy_rng(), client=0, round=0, clamp=True
    )
    return bytes(frame), ranges


def open_update(
    frame: bytes, *, ranges: Sequence[float], sizes: Sequence[int], largest_range: float, bits: int = MAX_BITS
) -> Update:
    """The values of an update that a site sent, all arrays one after another. The site may be hostile.

    Args:
        ranges: as the site states them: one for all arrays, or one for each.
        sizes: coordinates of each array of the model.
        largest_range: the server accepts no larger range; the clip norm of a gate is enough.
        bits: it accepts no more bits per coordinate.

    Raises:
        FrameError: the frame is damaged, or not of this model.
        InvalidParameter: a range is not positive or too large, or there are too many.
    """
    dimension = sum(check_int("size", size, 0, 2**53) for size in sizes)
    if len(ranges) not in (1, len(sizes)):
        raise InvalidParameter(f"an update states one range, or one for each of {len(sizes)} arrays, not {len(ranges)}")
    most = check_positive("largest_range", largest_range)
    if any(check_positive("range", reach) > most for reach in ranges):
        raise InvalidParameter(f"the range of an update is {max(ranges)}, and {most} is the largest that is accepted")
    checked = read_frame(frame, dimension=dimension)
    if checked.header.mechanism.code_count > 1 << bits:
        raise FrameError(f"the frame has {checked.header.mechanism.code_count} codes; at most {bits} bits are accepted")
    reach = float(ranges[0]) if len(ranges) == 1 else np.repeat(np.asarray(ranges, np.float64), sizes)
    return decode_frame(checked, range=reach)


def opened_ledger(ledger: str | Path | Ledger, budget: PrivacyBudget) -> Ledger:
    """A site's ledger: as it is, or made with this budget if the site has none yet.

    Raises:
        LedgerError: plans of studies lie where the ledger should be.
    """
    if isinstance(ledger, Ledger):
        return ledger
    path = Path(ledger)
    if path.exists():
        return Ledger(path)
    check_not_lost(path)
    return Ledger.open(path, client=0, budget_epsilon=budget.epsilon, budget_delta=budget.delta)
