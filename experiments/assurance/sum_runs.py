"""Secure sums as a source of observations: values in, what a server learns from a whole protocol out.

Real clients exchange the real messages. The attacking server knows the values of all other clients and looks for one
record of one client. Coordinates are independent, so one sum over a long vector is as good as many runs with a short
one: the vector is divided into `blocks`, one for each run.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from bqsgd._src.audit.bound import Scores
from bqsgd._src.audit.encoder import Inputs, LikelihoodRatio, worst_case_inputs
from bqsgd._src.errors import InvalidParameter
from bqsgd._src.noise import NoiseSource, privacy_rng, seeded_rng
from bqsgd._src.params import Codes, Mechanism
from bqsgd._src.planner.sums import SumPlan, width_of
from bqsgd._src.release import Release, Trust
from bqsgd._src.secure.agreement import Agreement
from bqsgd._src.secure.client import SumClient
from bqsgd._src.secure.graph import Thresholds
from bqsgd._src.secure.messages import is_sum_message
from bqsgd._src.secure.noise_shares import encode_base
from bqsgd._src.secure.roster import Roster, public_key
from bqsgd._src.server.sums import SumOutcome, SumRounds
from bqsgd._src.wire.reply import Reply

VICTIM = 0
_BLOCKS = 500
_Lanes = npt.NDArray[np.int64]


@dataclass
class Sum:
    """One secure sum from end to end.

    seed: of all clients' secrets; two sums with the same seed have the same masks.
    said: client -> all its answers in order, because a server can keep everything that it is sent.
    """

    agreement: Agreement
    seed: int
    said: dict[int, list[bytes]] = field(default_factory=dict)

    def run(self, codes: Mapping[int, Codes], *, missing: frozenset[int] = frozenset()) -> SumOutcome:
        """The sum of these codes. Missing clients exchange keys but send no masked vector."""
        clients = {
            number: SumClient(self.agreement, identity=_identity(number), number=number, seed=self.seed)
            for number in self.agreement.roster.clients
        }

        def carry(messages: Mapping[int, bytes]) -> Iterator[Reply]:
            for number, message in sorted(messages.items()):
                if is_sum_message(message):
                    answer: bytes | bytearray | None = clients[number].answer(message)
                else:
                    answer = None if number in missing else clients[number].mask(0, codes[number])
                if answer is not None:
                    self.said.setdefault(number, []).append(bytes(answer))
                yield Reply(client=number, frame=answer)

        rounds = SumRounds(self.agreement, rounds=1, key_rounds=1)
        outcome = rounds.round(dict.fromkeys(clients, b"values"), round=0, carry=carry)
        if outcome.total is None:
            raise InvalidParameter(f"the audited sum failed: {outcome.lost}")
        return outcome


def _identity(client: int) -> Ed25519PrivateKey:
    """A fixed identity for each client: an audit runs in one process, so nobody can impersonate anybody."""
    return Ed25519PrivateKey.from_private_bytes(client.to_bytes(32, "little"))


Observe = Callable[["SumRuns", int, Mapping[int, npt.NDArray[np.float64]]], _Lanes]
"""(runs, seed, values by client) -> the victim's codes, as far as the server can tell."""


class SumRuns:
    """Runs secure sums over `rule.clients` clients; one client, the victim, has the record or not.

    Args:
        release: the claim about the sum; the clients run its levels and trials.
        rule: how many clients there are, how many may be missing, and how many may collude.
        missing: clients that send no masked vector; at most as many as the rule allows.
        observe: what the server looks at, by default the opened sum.
        trials: noise in what the server looks at, for the score; by default all of the sum's.
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
        if release.terms.trust is not Trust.SUMS_ONLY:
            raise InvalidParameter("the claim must be about sums over clients (trust: server sees only sums)")
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
        """The agreement of the clients for vectors of this length."""
        keys = {client: public_key(_identity(client)) for client in range(self.rule.clients)}
        total = self.plan.trials if trials is None else trials
        return Agreement(
            roster=Roster(keys),
            run="audit",
            rule=self.rule,
            dimension=dimension,
            width=self.plan.width,
            trials=total,
            seeded=True,
        )

    def encoded(self, values: npt.NDArray[np.float64], *, trials: int, rng: NoiseSource) -> Codes:
        """A client's codes with the first part of its noise, `trials` trials; the other parts are added later."""
        return encode_base(values, self.plan.levels, trials, width=self.plan.width, range=1.0, rng=rng)

    def source(self, number: int) -> NoiseSource:
        """The noise source of one sum."""
        return privacy_rng() if self.seed is None else seeded_rng(seed=number)

    def scores(self, runs: int, *, present: bool) -> Scores:
        """The score of each run in the world where the record is `present` or not."""
        row = self.inputs.with_record if present else self.inputs.without
        scores = []
        for start in range(0, runs, _BLOCKS):
            blocks = min(_BLOCKS, runs - start)
            victim = np.tile(row, blocks)
            values = {client: np.zeros(victim.size) for client in range(self.rule.clients)} | {VICTIM: victim}
            self._made += 1
            # Even and odd seeds: the two worlds never share masks or noise.
            seed = secrets.randbits(62) if self.seed is None else (self.seed << 32) + 2 * self._made + present
            codes = self._observe(self, seed, values)
            # A faulty protocol may give codes outside the law's range; the table has no column for them.
            largest = self.score.tables.shape[1] - 1
            scores.append(self.score(codes.reshape(blocks, -1).clip(0, largest).astype(np.uint32)))
        return np.concatenate(scores)


def opened_sum(runs: SumRuns, seed: int, values: Mapping[int, npt.NDArray[np.float64]]) -> _Lanes:
    """The result of the protocol: the sum over the survivors, minus the known values of the other clients."""
    agreement = runs.agreement(values[VICTIM].size)
    base, rng = agreement.noise.cuts[0], runs.source(seed)
    codes = {client: runs.encoded(held, trials=base, rng=rng) for client, held in values.items()}
    total = Sum(agreement, seed).run(codes, missing=runs.missing).total
    assert total is not None
    return total.lanes.astype(np.int64) - (len(total.survivors) - 1) * runs.plan.levels
