"""Secure sums as a source of observations: values in, what a server learns from a whole protocol out.

Every run is a sum of real clients over the real messages. The server that attacks knows what all other clients hold and
looks for one record of one client. Coordinates are independent, so one sum over a long vector is many runs of a short
one: `blocks` of them.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from bqsgd.audit.bound import Scores
from bqsgd.audit.encoder import Inputs, LikelihoodRatio, worst_case_inputs
from bqsgd.errors import InvalidParameter
from bqsgd.noise import NoiseSource, privacy_rng, seeded_rng
from bqsgd.params import Codes, Mechanism
from bqsgd.planner.sums import SumPlan, width_of
from bqsgd.release import Release, Trust
from bqsgd.secure.agreement import Agreement
from bqsgd.secure.client import SumClient
from bqsgd.secure.graph import Thresholds
from bqsgd.secure.messages import is_sum_message
from bqsgd.secure.noise_shares import encode_base
from bqsgd.secure.roster import Roster, public_key
from bqsgd.training.sums import SumOutcome, SumRounds

VICTIM = 0
_BLOCKS = 500
_Lanes = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class _Said:
    """An answer, as an engine would give it."""

    client: int
    frame: bytes | bytearray | None
    reason: str | None = None
    declined: bool = False


@dataclass
class Sum:
    """One protocol from end to end. seed: of all clients' secrets; two sums with one seed have the same masks.

    said: (client, step) -> what it answered, the step by its first message's kind: a server keeps what it is told.
    """

    agreement: Agreement
    seed: int
    said: dict[int, list[bytes]] = field(default_factory=dict)

    def run(self, codes: Mapping[int, Codes], *, missing: frozenset[int] = frozenset()) -> SumOutcome:
        """The sum of these codes; of the missing clients no masked vector comes."""
        clients = {
            number: SumClient(self.agreement, identity=_identity(number), number=number, seed=self.seed)
            for number in self.agreement.roster.clients
        }

        def carry(messages: Mapping[int, bytes]) -> Iterator[_Said]:
            for number, message in sorted(messages.items()):
                if is_sum_message(message):
                    answer: bytes | bytearray | None = clients[number].answer(message)
                else:
                    answer = None if number in missing else clients[number].mask(0, codes[number])
                if answer is not None:
                    self.said.setdefault(number, []).append(bytes(answer))
                yield _Said(client=number, frame=answer)

        rounds = SumRounds(self.agreement, rounds=1, key_rounds=1)
        found = rounds.round(dict.fromkeys(clients, b"values"), round=0, carry=carry)
        if found.total is None:
            raise InvalidParameter(f"the audited sum failed: {found.lost}")
        return found


def _identity(client: int) -> Ed25519PrivateKey:
    """Nobody is deceived in an audit, so the identities may be known."""
    return Ed25519PrivateKey.from_private_bytes(client.to_bytes(32, "little"))


Observe = Callable[["SumRuns", int, Mapping[int, npt.NDArray[np.float64]]], _Lanes]
"""(runs, seed, values by client) -> codes of the victim as the server makes them out."""


class SumRuns:
    """Runs of secure sums over `rule.clients` clients, in one of which the record is present or not.

    Args:
        release: what is claimed of the sum; its levels and trials are what the clients run.
        rule: how many clients there are, may be missing and may collude.
        missing: clients whose masked vectors do not come; at most as many as the rule bears.
        observe: what the server looks at; the opened sum unless given.
        trials: in what it looks at, for the score; all of the sum's unless given.
        seed: makes the runs reproducible.
    """

    def __init__(
        self,
        release: Release,
        *,
        rule: Thresholds,
        missing: frozenset[int] = frozenset(),
        observe: Observe | None = None,
        trials: int | None = None,
        seed: int | None = None,
    ) -> None:
        if release.trust is not Trust.SUMS_ONLY:
            raise InvalidParameter("the claim must be one about sums over clients")
        self.release, self.rule, self.missing = release, rule, missing
        self.rounds, self.seed = 1, seed
        used = release.mechanism
        self.plan = SumPlan(
            rule=rule, levels=used.levels, trials=used.trials, width=width_of(rule, used.levels, used.trials)
        )
        self.inputs: Inputs = worst_case_inputs(release)
        survivors = rule.clients - len(missing)
        inside = self.plan.noise.in_sum(survivors) if trials is None else trials
        self.score = LikelihoodRatio(self.inputs, Mechanism(levels=used.levels, trials=inside), rate=1.0)
        self._observe = opened_sum if observe is None else observe
        self._made = 0

    @property
    def seeded(self) -> bool:
        """Whether the noise was seeded."""
        return self.seed is not None

    def agreement(self, dimension: int, *, trials: int | None = None) -> Agreement:
        """What the clients agree on for vectors of this length."""
        keys = {client: public_key(_identity(client)) for client in range(self.rule.clients)}
        total = self.plan.trials if trials is None else trials
        return Agreement(
            roster=Roster(keys), run="audit", rule=self.rule, dimension=dimension, width=self.plan.width, trials=total
        )

    def encoded(self, values: npt.NDArray[np.float64], *, trials: int, rng: NoiseSource) -> Codes:
        """A client's codes with so many trials of noise, before the further parts of it."""
        return encode_base(values, self.plan.levels, trials, width=self.plan.width, range=1.0, rng=rng)

    def source(self, number: int) -> NoiseSource:
        """Noise for one purpose of one sum."""
        return privacy_rng() if self.seed is None else seeded_rng(seed=number)

    def scores(self, runs: int, *, present: bool) -> Scores:
        """The score of each run in the world where the record is `present` or not."""
        row = self.inputs.with_record if present else self.inputs.without
        found = []
        for start in range(0, runs, _BLOCKS):
            blocks = min(_BLOCKS, runs - start)
            own = np.tile(row, blocks)
            values = {client: np.zeros(own.size) for client in range(self.rule.clients)} | {VICTIM: own}
            self._made += 1
            seed = secrets.randbits(62) if self.seed is None else (self.seed << 32) + 2 * self._made + present
            codes = self._observe(self, seed, values)
            most = self.score.tables.shape[1] - 1
            found.append(self.score(codes.reshape(blocks, -1).clip(0, most).astype(np.uint32)))
        return np.concatenate(found)


def opened_sum(runs: SumRuns, seed: int, values: Mapping[int, npt.NDArray[np.float64]]) -> _Lanes:
    """What the protocol gives: the sum over the survivors, less what the others are known to hold."""
    agreement = runs.agreement(values[VICTIM].size)
    base, rng = agreement.noise.cuts[0], runs.source(seed)
    codes = {client: runs.encoded(held, trials=base, rng=rng) for client, held in values.items()}
    total = Sum(agreement, seed).run(codes, missing=runs.missing).total
    assert total is not None
    return total.lanes.astype(np.int64) - (len(total.survivors) - 1) * runs.plan.levels
