"""Who is asked in a round: all clients, or a cohort, drawn at random or chosen by a function of the user's.

A client's noise is planned for as many messages as it may send, its *turns*, so nobody is asked more often than that.
By default everybody is asked once before anybody is asked twice, in an order drawn anew each time: ceil(rounds * asked
/ clients) turns then are enough. Being asked is a turn, whether the answer comes in time or not.

Who is asked is known to the server, and no guarantee here gains by the chance of not being asked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence

import numpy as np

from bqsgd.errors import InvalidParameter
from bqsgd.noise import privacy_rng, seeded_rng
from bqsgd.params import shown
from bqsgd.training.draws import Purpose, seed_for
from bqsgd.training.settings import Config

Choose = Callable[[int, Sequence[int], int], Iterable[int]]
"""(round, clients with turns left in the order of their numbers, how many are wanted) -> whom to ask, best first."""


class Cohorts:
    """Draws the cohorts of a run and counts turns.

    Args:
        config: the run's settings.
        clients: the clients of the run.
        choose: picks the cohort in place of chance. It must not look at private data: whom the server asks is seen.
    """

    def __init__(self, config: Config, clients: Iterable[int], *, choose: Choose | None = None) -> None:
        self.config, self.clients, self.choose = config, sorted(clients), choose
        if choose is not None and config.clients.cohort is None:
            raise InvalidParameter("choose picks a cohort: say how large it is with cohort")
        self.turns: Counter[int] = Counter()
        """How often each client was asked."""

    def count(self, asked: Iterable[int]) -> None:
        """These clients were asked once more."""
        self.turns.update(asked)

    def draw(self, round: int, *, lost: Container[int] = ()) -> list[int]:
        """Whom to ask in `round`, in the order in which they are wanted; fewer, or nobody, where turns run out."""
        wanted = self.config.asked
        if self.config.clients.cohort is None:
            return [client for client in self.clients if client not in lost]
        left = [client for client in self.clients if client not in lost and self.turns[client] < self.config.turns]
        if self.choose is not None:
            return self._checked(list(self.choose(round, left, wanted)), left, wanted)
        seed = self.config.privacy.seed
        rng = privacy_rng() if seed is None else seeded_rng(seed=seed_for(seed, Purpose.COHORT, round=round))
        words = rng.words(len(left)) if left else np.empty(0, np.uint64)
        order = sorted(range(len(left)), key=lambda place: (self.turns[left[place]], int(words[place])))
        return [left[place] for place in order[:wanted]]

    def _checked(self, chosen: list[int], left: Sequence[int], wanted: int) -> list[int]:
        known = set(left)
        strange = next((client for client in chosen if client not in known), None)
        if strange is not None or len(set(chosen)) != len(chosen) or len(chosen) > wanted:
            raise InvalidParameter(
                f"choose must give at most {wanted} different clients that have turns left, got {len(chosen)}"
                + ("" if strange is None else f", of which {shown(strange)} is none")
            )
        return chosen
