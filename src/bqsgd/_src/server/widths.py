"""How wide the modulus of a run's secure sums is: it follows the sums that were released.

A modulus needs room for the sums that occur, not for all that are possible. So the first key batch is one round in the
widest modulus of the plan. Every later key batch has the least width with room for the noise and for twice the largest
signal of late. If a sum comes near the edge of its modulus, the signal has grown: the key batch ends, and one round in
the widest modulus finds out how far.

All of this is computed from sums that the server has opened, so it costs no privacy. The grid, the trials and thus what
the ledger counts stay the same: a narrower modulus is a function of the same sum (claim 12 of docs/accounting.md).
"""

from __future__ import annotations

import math
from collections import deque
from typing import Any

from bqsgd._src.errors import InvalidParameter
from bqsgd._src.params import check_int
from bqsgd._src.planner.sums import SumPlan, width_of
from bqsgd._src.secure.opening import Total

_MARGIN = 2.0
"""Room for signals so many times as large as the largest of late."""
_REMEMBERED = 10
"""Rounds whose signals count."""
_NEAR = 0.9
"""Near the edge: so much of the way from where the noise alone reaches to the end of the modulus."""
_NO_END = 2**62


class Widths:
    """Chooses the width of every key batch.

    Args:
        plan: of the sums. If it has a window, the width is always that of the plan.
        dimension: coordinates of a sum.
        first: the first round whose sums say how large those of later rounds are.
    """

    def __init__(self, plan: SumPlan, *, dimension: int, first: int = 0) -> None:
        self._plan, self._dimension, self._first = plan, dimension, first
        self.width = plan.width
        """The width of the key batch."""
        self.last_round = -1 if plan.adapts else _NO_END
        """The last round for which this width was chosen."""
        self._signals: deque[float] = deque(maxlen=_REMEMBERED)
        """What the largest means of the last rounds have beyond the noise, in ranges."""

    def batch(self, round: int, *, most: int) -> tuple[int, int]:
        """The width and the number of rounds, at most `most`, of the key batch that begins with `round`.

        If keys are exchanged again before the last round that a width was chosen for, it stays the same. So a run that
        is resumed has the widths that it would have had.
        """
        if round > self.last_round:
            self.width = self._fitting()
            self.last_round = round + (most if self._signals else 1) - 1
        return self.width, min(most, self.last_round - round + 1)

    def _fitting(self) -> int:
        plan = self._plan
        if not self._signals:
            return plan.width
        return width_of(plan.rule, plan.levels, plan.trials, window=_MARGIN * max(self._signals))

    def observe(self, total: Total, *, round: int) -> None:
        """Learn from the sum of a round; the key batch ends with it if the sum came near the edge of the modulus."""
        plan, survivors = self._plan, len(total.survivors)
        if not plan.adapts or round < self._first:
            return
        largest = float(abs(plan.mean(total.lanes, survivors=survivors, width=total.width)).max())
        deviation = math.sqrt(plan.variance(survivors) + plan.rounding)
        # Of so many coordinates of noise alone, the largest is about this large.
        noise = deviation * math.sqrt(2 * math.log(2 * self._dimension))
        edge = 2.0 ** (total.width - 1) / (survivors * plan.levels)
        if total.width < plan.width and largest - noise > _NEAR * (edge - noise):
            # A sum that has wrapped does not say how large it was, so nothing that was learnt before counts.
            self._signals.clear()
            self.last_round = round
        else:
            self._signals.append(max(0.0, largest - noise))

    def state(self) -> dict[str, Any]:
        """Everything that a checkpoint must hold for `restore`, in plain JSON types."""
        return {"width": self.width, "last_round": self.last_round, "signals": list(self._signals)}

    def restore(self, state: Any) -> None:
        """Continue from a checkpoint. One without a state, from before widths changed, starts anew.

        Raises:
            InvalidParameter: not a state of `state`.
        """
        if state is None or not self._plan.adapts:
            return
        try:
            signals = [float(signal) for signal in state["signals"]]
            width = check_int("width", state["width"], 2, self._plan.width)
            last_round = check_int("last_round", state["last_round"], -1, _NO_END)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise InvalidParameter(f"the widths of the secure sums cannot be read: {error}") from error
        if len(signals) > _REMEMBERED or not all(0 <= signal < math.inf for signal in signals):
            raise InvalidParameter("the widths of the secure sums need at most 10 signals, all finite and not negative")
        self.width, self.last_round = width, last_round
        self._signals = deque(signals, maxlen=_REMEMBERED)
