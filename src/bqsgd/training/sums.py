"""Secure sums in a run: what its parties agree on, and the server's side of their steps over any engine.

The client's side is `training.client.Client`, which answers the messages of a sum as it answers a model. Engines carry
both and know neither.

Keys and shares are exchanged for a batch of rounds at once, or, with cohorts, for each round anew; then a round has
three exchanges: model and masked vector, survivors and signature, certificate and unmasking. Whoever does not answer
one is missing from there on. A round that ends without a sum is lost and has still been counted by the clients that
masked a vector; the next one begins with new keys.
"""

from __future__ import annotations

import hashlib
import os
import struct
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from bqsgd.errors import InvalidParameter, SecureSumError
from bqsgd.secure import messages
from bqsgd.secure.agreement import Agreement
from bqsgd.secure.client import EpochFile, StateFile, SumClient
from bqsgd.secure.messages import Bytes
from bqsgd.secure.roster import Roster, public_key, read_identity, read_roster
from bqsgd.secure.server import SumServer, Total
from bqsgd.training.client_plan import sum_plan
from bqsgd.training.settings import Config
from bqsgd.wire.frame import Buffer


@dataclass(frozen=True, kw_only=True)
class SumSetup:
    """What a process needs to take part in the secure sums of a run.

    made: client -> its private key, where all clients are in this process and their keys were made here. identity:
    else, the file of a client's own key; `{client}` in it stands for the client's number.
    """

    agreement: Agreement
    made: Mapping[int, Ed25519PrivateKey] | None = None
    identity: str | None = None

    @classmethod
    def of(cls, config: Config, *, run: str, dimension: int) -> SumSetup | None:
        """From the settings of a run; None where it has no secure sums.

        Raises:
            InvalidParameter: roster or identity do not fit the run, or the roster is not the one it began with.
            Infeasible: no plan meets the budget.
        """
        secure, count = config.secure, config.clients.count
        if not secure.on:
            return None
        plan = sum_plan(config, dimension=dimension)
        made: Mapping[int, Ed25519PrivateKey] | None = None
        if secure.roster is None:
            if secure.identity is not None:
                raise InvalidParameter("an identity is worth nothing without the roster that names it: give both")
            made, roster = made_identities(config)
        else:
            roster = read_roster(secure.roster)
            if roster.clients != tuple(range(count)):
                raise InvalidParameter(f"{secure.roster} must name clients 0 to {count - 1}, one each")
            if secure.roster_digest not in (None, roster.digest.hex()):
                raise InvalidParameter(
                    f"{secure.roster} is not the roster that the run began with: a run keeps its roster; start a new "
                    "run with the new one"
                )
        agreement = Agreement(
            roster=roster, run=run, rule=plan.rule, dimension=dimension, width=plan.width, trials=plan.trials
        )
        return cls(agreement=agreement, made=made, identity=secure.identity)

    @property
    def simulated(self) -> bool:
        """Whether all keys were made in this process."""
        return self.made is not None

    def client(self, number: int, *, folder: Path | None, seed: int | None, lasting: bool = True) -> SumClient:
        """The sum's side of client `number`.

        folder: on its own disk, where it remembers its last epoch. lasting: its process lives as long as the run; else
        it keeps all of its state in the folder, and only one process of it may be at work at a time.
        """
        place = None if folder is None else folder / f"client-{number:04}-{self._run_digest}"
        epochs = None if place is None or not lasting else EpochFile(place.with_suffix(".epoch"))
        state = None if place is None or lasting else StateFile(place.with_suffix(".sums"))
        own = self._identity_of(number)
        return SumClient(self.agreement, identity=own, number=number, last_epoch=epochs, keep=state, seed=seed)

    def _identity_of(self, number: int) -> Ed25519PrivateKey:
        if self.made is not None:
            return self.made[number]
        if self.identity is None:
            raise InvalidParameter(
                f"client {number} needs its identity key for secure sums: make one with `bqsgd secure keygen`, put its "
                "public half into the roster, and give the file as identity"
            )
        return read_identity(self.identity.replace("{client}", str(number)))

    @property
    def _run_digest(self) -> str:
        """A run's name may hold letters that no file name can."""
        return hashlib.sha256(self.agreement.run.encode()).hexdigest()[:16]


def most_sum_bytes(config: Config) -> int:
    """No message of a run's secure sums is longer, masked vectors left out; 0 where it has none."""
    if not config.secure.on:
        return 0
    return messages.most_bytes(config.secure.rule(config.clients.count), rounds=config.secure.key_rounds)


def with_roster(config: Config) -> Config:
    """The same settings with the digest of the roster, where there is one and the digest is not known yet."""
    secure = config.secure
    if not secure.on or secure.roster is None or secure.roster_digest is not None:
        return config
    return config.but(roster_digest=read_roster(secure.roster).digest.hex())


def made_identities(config: Config) -> tuple[dict[int, Ed25519PrivateKey], Roster]:
    """Keys for all clients of a run that belong to one user, and their roster; from the seed where there is one."""
    identities = {client: _made(config.privacy.seed, client) for client in range(config.clients.count)}
    public = {client: public_key(key) for client, key in identities.items()}
    return identities, Roster(public, _seed(config.privacy.seed))


def _made(seed: int | None, client: int) -> Ed25519PrivateKey:
    if seed is None:
        return Ed25519PrivateKey.generate()
    key = hashlib.sha256(b"bqsgd.secure.identity.v1\x00" + struct.pack("<QQ", seed, client)).digest()
    return Ed25519PrivateKey.from_private_bytes(key)


def _seed(seed: int | None) -> bytes:
    """Of the roster of clients in one process."""
    if seed is None:
        return os.urandom(32)
    return hashlib.sha256(b"bqsgd.secure.roster.v1\x00" + struct.pack("<Q", seed)).digest()


class Carried(Protocol):
    """An answer as an engine gives it (`engines.engine.Answer`)."""

    @property
    def client(self) -> int:
        """Who answered."""

    @property
    def frame(self) -> Buffer | None:
        """What it said, None for nothing."""

    @property
    def reason(self) -> str | None:
        """Why it said nothing."""

    @property
    def declined(self) -> bool:
        """Whether it said so itself."""


Carry = Callable[[Mapping[int, bytes]], Iterable[Carried]]
"""An engine's exchange, within one round."""
_Take = Callable[[Bytes], int]


@dataclass(kw_only=True)
class SumOutcome:
    """What a round with a secure sum came to.

    total: the sum, None when the round is lost, and then `lost` says why. trouble: client -> (whether it declined,
    why), of those that are not in the sum. masked: client -> bytes of its masked vector.
    """

    total: Total | None = None
    lost: str | None = None
    trouble: dict[int, tuple[bool, str]] = field(default_factory=dict)
    masked: dict[int, int] = field(default_factory=dict)
    bytes_up: int = 0
    bytes_down: int = 0
    seconds: float = 0.0
    """Spent on everything but the exchange of model and masked vector."""


class SumRounds:
    """The server's side of a run's secure sums.

    Args:
        agreement: what all parties agree on.
        rounds: of the run.
        key_rounds: rounds whose keys travel together.
        last_epoch: remembers the last epoch across restarts, as of `SumClient`.
    """

    def __init__(
        self,
        agreement: Agreement,
        *,
        rounds: int,
        key_rounds: int,
        last_epoch: Callable[..., int] | None = None,
    ) -> None:
        self.agreement, self.rounds, self.key_rounds = agreement, rounds, key_rounds
        self._server = SumServer(agreement)
        self._last_epoch = last_epoch
        self._epoch = -1 if last_epoch is None else last_epoch()
        self._ready: tuple[int, ...] = ()
        """Clients that can mask in this batch; empty where new keys are due."""

    def round(self, messages: Mapping[int, bytes], *, round: int, carry: Carry) -> SumOutcome:
        """One round: its message to every client that has keys, and the sum of what they answer."""
        found, started = SumOutcome(), time.perf_counter()
        waited = 0.0
        try:
            named = self.agreement.rule.clients < len(self.agreement.roster.keys)
            if named or not self._ready or round > self._server.last_round:
                self._begin(found, round, carry, cohort=messages if named else None)
            server = self._server
            server.open(round)
            before = time.perf_counter()
            models = {client: messages[client] for client in self._ready}
            self._step(found, models, carry, self._take_masked(found))
            waited = time.perf_counter() - before
            survivors = server.close()
            lists = {client: server.survivors(client) for client in survivors}
            self._step(found, lists, carry, server.take_signature, [] if server.sparse else None)
            certificates = {client: server.certificate(client) for client in server.signed}
            self._step(found, certificates, carry, server.take_unmasking)
            found.total = server.total()
            found.trouble = {client: why for client, why in found.trouble.items() if client not in survivors}
        except SecureSumError as error:
            found.lost = str(error)
            self._ready = ()
        found.seconds = time.perf_counter() - started - waited
        return found

    def _begin(self, found: SumOutcome, round: int, carry: Carry, *, cohort: Iterable[int] | None) -> None:
        """New keys and shares for the rounds from this one on, under an epoch that was never used.

        cohort: who takes part, and then in this round alone; None for everybody.
        """
        self._ready = ()
        self._epoch += 1
        if self._last_epoch is not None:
            self._last_epoch(self._epoch)
        server = self._server
        most = min(self.key_rounds, messages.most_rounds(self.agreement))
        rounds = min(most, self.rounds - round) if cohort is None else 1
        server.begin(epoch=self._epoch, first_round=round, rounds=rounds, cohort=cohort)
        self._step(found, {client: server.request(client) for client in server.asked}, carry, server.take_keys)
        self._step(found, {client: server.key_bundle(client) for client in server.keyed}, carry, server.take_shares)
        ready: list[int] = []
        bundles = {client: server.share_bundle(client) for client in server.shared}
        if server.sparse:
            self._step(found, bundles, carry, server.take_partners)
            bundles = {client: server.partner_bundle(client) for client in server.stated}
        self._step(found, bundles, carry, None, ready)
        self._ready = tuple(ready)

    def _take_masked(self, found: SumOutcome) -> _Take:
        def take(message: Bytes) -> int:
            client = self._server.take_masked(message)
            found.masked[client] = len(message)
            return client

        return take

    def _step(
        self,
        found: SumOutcome,
        messages: Mapping[int, bytes],
        carry: Carry,
        take: _Take | None,
        acknowledged: list[int] | None = None,
    ) -> None:
        """Carry one step's messages and take what comes back; what is refused leaves its client missing.

        Where an empty answer will do, those who gave it are `acknowledged`; without `take` nothing else will.
        """
        found.bytes_down += sum(map(len, messages.values()))
        for answer in carry(messages):
            client = answer.client
            if answer.frame is None:
                found.trouble.setdefault(client, (answer.declined, answer.reason or "no answer"))
                continue
            content = memoryview(answer.frame)  # type: ignore[arg-type]
            found.bytes_up += len(content)
            if acknowledged is not None and len(content) == 0 and client in messages:
                acknowledged.append(client)
                continue
            if take is None:
                continue
            try:
                self._server.check_sender(content, client)
                take(content)
            except SecureSumError as error:
                found.trouble.setdefault(client, (False, f"{type(error).__name__}: {error}"))
