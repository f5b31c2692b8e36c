"""Flower's `PrivacyAccountant` over what the sites' own ledgers state.

    accountant = SiteAccountant(PrivacyConfig(target_delta=1e-5, population_size=4, max_epsilon=8.0, ...))
    strategy = OpenUpdates(FedAvg(fraction_evaluate=0.0), largest_range=1.0, accountant=accountant)

Flower's own accountant counts the noise that a server adds. Here each site counts its own, in its ledger, and states
with every update what the ledger holds and what it would hold after one more. The server can end the run before a round
that would exceed its limit; that no site exceeds its own budget does not depend on it, nor on what other sites state.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields

from flwr.app import Message
from flwr.serverapp import PrivacyConfig, PrivacySpent, SamplingMethod

from bqsgd._src.errors import FrameError, InvalidParameter
from bqsgd._src.params import check_delta, check_int
from bqsgd._src.private.gate import UpdateGate

UPDATE = "update"
"""The record of an update beside its frame."""
_METHOD = "the largest epsilon that a site's ledger states"


@dataclass(frozen=True, kw_only=True)
class Statement:
    """What a site says that its ledger holds, over all that it has ever sent.

    following: the epsilon after one more update; infinite if its study or its budget has no room for one.
    """

    epsilon: float
    delta: float
    following: float

    def __post_init__(self) -> None:
        if not all(type(value) is float for value in (self.epsilon, self.delta, self.following)):
            raise FrameError("a site states epsilon, delta and following as floats")
        check_delta("delta", self.delta)
        if not 0 <= self.epsilon <= self.following or math.isinf(self.epsilon):  # NaN fails too
            raise FrameError(f"a site states epsilon {self.epsilon} and, after one more update, {self.following}")


def stated_by(gate: UpdateGate) -> Statement:
    """The statement of a site that has just counted an update."""
    guarantee = gate.guarantee()
    assert guarantee is not None
    return Statement(epsilon=guarantee.epsilon, delta=guarantee.delta, following=gate.epsilon_after_next())


def stated_in(reply: Message) -> Statement:
    """What a node states with its update. Raises FrameError or KeyError if that is not a statement."""
    stated = reply.content.config_records[UPDATE]
    return Statement(**{field.name: stated[field.name] for field in fields(Statement)})  # type: ignore[arg-type]


class SiteAccountant:
    """An accountant for `OpenUpdates`, and for Flower's own strategies inside it. It has Flower's protocol.

    Args:
        config: `max_epsilon` is the server's limit for every site; None if only the sites' own count. The sampling must
            be NO_AMPLIFICATION: that a site was not asked is not counted as privacy.
    """

    def __init__(self, config: PrivacyConfig) -> None:
        if config.sampling_method is not SamplingMethod.NO_AMPLIFICATION:
            raise InvalidParameter("the sites count every update in full: give sampling_method NO_AMPLIFICATION")
        self._config, self._releases = config, 0
        self._statements: dict[int, Statement] = {}

    @property
    def config(self) -> PrivacyConfig:
        """As given."""
        return self._config

    @property
    def num_releases(self) -> int:
        """Rounds that were aggregated."""
        return self._releases

    def note(self, node: int, statement: Statement) -> None:
        """What a node stated with its update."""
        self._statements[node] = statement

    def compose(self, event: object = None, count: int = 1) -> None:
        """Count rounds. Their epsilon is in the statements; noise that a server adds besides only lowers it."""
        self._releases += check_int("count", count, 1, 2**40)

    def get_epsilon(self, delta: float) -> float:
        """The largest epsilon of a site at this delta; infinite if a site stated its own at a larger delta."""
        if any(each.delta > delta for each in self._statements.values()):
            return math.inf
        return max((each.epsilon for each in self._statements.values()), default=0.0)

    def get_delta(self, epsilon: float) -> float:
        """The largest delta of a site at this epsilon; 1 if a site's epsilon is larger."""
        if any(each.epsilon > epsilon for each in self._statements.values()):
            return 1.0
        return max((each.delta for each in self._statements.values()), default=0.0)

    def get_privacy_spent(self, delta: float | None = None) -> PrivacySpent:
        """The site that has spent most."""
        at = self._config.target_delta if delta is None else delta
        return PrivacySpent(
            epsilon=self.get_epsilon(at), delta=at, num_releases=self._releases, accounting_method=_METHOD
        )

    def would_exceed(self, event: object = None, max_epsilon: float | None = None, count: int = 1) -> bool:
        """Whether one more round takes a site beyond the limit, or no site is left that would send an update.

        A site without room declines by itself, so it does not exceed anything. More rounds than one cannot be told.
        """
        limit = self._config.max_epsilon if max_epsilon is None else max_epsilon
        if not self._statements:
            return False
        willing = [each for each in self._statements.values() if each.following < math.inf]
        # An epsilon at a larger delta than the target says nothing about the limit, which is for the target.
        beyond = limit is not None and any(
            each.following > limit or each.delta > self._config.target_delta for each in willing
        )
        return count > 1 or not willing or beyond

    def state_dict(self) -> dict[str, object]:
        """For a checkpoint of the server."""
        return {"releases": self._releases, "sites": {str(n): asdict(each) for n, each in self._statements.items()}}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Continue from `state_dict`."""
        try:
            sites, releases = state["sites"], state["releases"]
            if not isinstance(sites, Mapping):
                raise TypeError("sites is not a table")
            stated = {int(node): Statement(**fields) for node, fields in sites.items()}
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidParameter(f"not the state of a SiteAccountant: {error}") from error
        self._releases, self._statements = check_int("releases", releases, 0, 2**40), stated
