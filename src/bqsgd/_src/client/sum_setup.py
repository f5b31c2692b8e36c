"""What a process needs to take part in the secure sums of a run: the agreement, and the keys of its clients."""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from bqsgd._src.errors import InvalidParameter
from bqsgd._src.secure import messages
from bqsgd._src.secure.agreement import Agreement
from bqsgd._src.secure.client import SumClient
from bqsgd._src.secure.roster import Roster, public_key, read_identity, read_roster
from bqsgd._src.secure.state import EpochFile, StateFile
from bqsgd._src.settings.client_plan import sum_plan
from bqsgd._src.settings.config import Config
from bqsgd._src.storage import private_folder


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
        if folder is not None:
            private_folder(folder)
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
