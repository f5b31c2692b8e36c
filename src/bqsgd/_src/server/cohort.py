"""Which clients are asked in a round: all, or a cohort that is drawn at random or chosen by the user's function.

A client's noise is planned for a number of messages, its *turns*, so no client is asked more often than that. By
default every client is asked once before any is asked twice, in an order that is drawn anew each time; then
ceil(rounds * asked / clients) turns are enough. Being asked uses up a turn, whether the reply comes in time or not.

The server knows whom it asks, so no guarantee here is improved by the chance of not being asked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence

import numpy as np

from bqsgd._src.client.draws import Purpose, seed_for
from bqsgd._src.errors import InvalidParameter
from bqsgd._src.noise import privacy_rng, seeded_rng
from bqsgd._src.params import short_repr
from bqsgd._src.settings.config import Config

Choose = Callable[[int, Sequence[int], int], Iterable[int]]
"""(round, clients with turns left in ascending order, how many are wanted) -> the clients to ask, best first."""


class Cohorts:
    """Draws the cohorts of a run and counts turns.

    Args:
        config: the run's settings.
        clients: the clients of the run.
        choose: picks the cohort instead of a random draw. It must not use private data, because the
            choice is not protected: whom the server asks can be observed.
    """

    def __init__(self, config: Config, clients: Iterable[int], *, choose: Choose | None = None) -> None:
        self.config, self.clients, self.choose = config, sorted(clients), choose
        if choose is not None and config.clients.cohort is None:
            raise InvalidParameter("choose needs the size of the cohort; set cohort as well")
        self.turns: Counter[int] = Counter()
        """Client -> how often it was asked."""

    def draw(self, round: int, *, lost: Container[int] = ()) -> list[int]:
        """The clients to ask in `round`, most wanted first; fewer than a cohort, or none, when turns run out."""
        wanted = self.config.asked
        if self.config.clients.cohort is None:
            return [client for client in self.clients if client not in lost]
        eligible = [client for client in self.clients if client not in lost and self.turns[client] < self.config.turns]
        if self.choose is not None:
            return self._checked(list(self.choose(round, eligible, wanted)), eligible, wanted)
        seed = self.config.privacy.seed
        rng = privacy_rng() if seed is None else seeded_rng(seed=seed_for(seed, Purpose.COHORT, round=round))
        words = rng.words(len(eligible)) if eligible else np.empty(0, np.uint64)
        # Fewest turns first, so that nobody is asked twice before everybody was asked once; chance decides the rest.
        order = sorted(range(len(eligible)), key=lambda place: (self.turns[eligible[place]], int(words[place])))
        return [eligible[place] for place in order[:wanted]]

    def _checked(self, chosen: list[int], eligible: Sequence[int], wanted: int) -> list[int]:
        known = set(eligible)
        strange = next((client for client in chosen if client not in known), None)
        if strange is not None or len(set(chosen)) != len(chosen) or len(chosen) > wanted:
            raise InvalidParameter(
                f"choose must return at most {wanted} different clients that have turns left, got {len(chosen)}"
                + ("" if strange is None else f"; {short_repr(strange)} is not one of them")
            )
        return chosen
