"""A client's side of secure sums in a run: keys and agreement of its process, its messages, and its masked vector."""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from bqsgd._src.client.values import Values
from bqsgd._src.errors import InvalidParameter, SecureSumError
from bqsgd._src.noise import NoiseSource
from bqsgd._src.params import Mechanism
from bqsgd._src.release import Release
from bqsgd._src.secure import messages
from bqsgd._src.secure.agreement import Agreement
from bqsgd._src.secure.client import SumClient
from bqsgd._src.secure.graph import Thresholds
from bqsgd._src.secure.messages import Bytes
from bqsgd._src.secure.noise_shares import encode_base
from bqsgd._src.secure.roster import Roster, public_key, read_identity, read_roster
from bqsgd._src.secure.state import EpochFile, StateFile
from bqsgd._src.settings.client_plan import sum_plans
from bqsgd._src.settings.config import Config
from bqsgd._src.storage import private_folder
from bqsgd._src.wire.reply import Reply


@dataclass(frozen=True, kw_only=True)
class SumSetup:
    """What a process needs to take part in the secure sums of a run.

    agreements: of each group of clients, one for all clients if there are no groups. roster: of all clients. rounds:
    how many the run has. made: client -> its private key, if all clients are in this process and their keys
    were made here. identity: otherwise the file of a client's own key; `{client}` in it stands for the client's number.
    """

    agreements: tuple[Agreement, ...]
    roster: Roster
    rounds: int
    made: Mapping[int, Ed25519PrivateKey] | None = None
    identity: str | None = None

    @classmethod
    def of(cls, config: Config, *, run: str, dimension: int) -> SumSetup | None:
        """From the settings of a run; None if the run has no secure sums.

        Raises:
            InvalidParameter: roster or identity do not fit the run, or the roster is not the one it began with.
            Infeasible: no plan meets the budget.
        """
        secure, count = config.secure, config.clients.count
        if not secure.on:
            return None
        plans = sum_plans(config, dimension=dimension)
        made: Mapping[int, Ed25519PrivateKey] | None = None
        if secure.roster is None:
            if secure.identity is not None:
                raise InvalidParameter("identity was given without roster, the file that names its key: give both")
            made, roster = made_identities(config)
        else:
            roster = roster_of(secure.roster, count)
            if secure.roster_digest not in (None, roster.digest.hex()):
                raise InvalidParameter(
                    f"{secure.roster} is not the roster that the run began with: a run keeps its roster; start a new "
                    "run with the new one"
                )
        if len(plans) > 1 and plans[0].rule.sparse is not None and not roster.seed:
            raise InvalidParameter("groups of so many clients need a roster with a seed: see `bqsgd secure roster`")
        seeded = config.privacy.seed is not None
        agreements = tuple(
            plan.agreement(roster.group(group, groups=len(plans)), run=run, dimension=dimension, seeded=seeded)
            for group, plan in enumerate(plans)
        )
        return cls(agreements=agreements, roster=roster, rounds=config.run.rounds, made=made, identity=secure.identity)

    def agreement_of(self, number: int) -> Agreement:
        """What client `number` and the others of its group agree on."""
        return self.agreements[number % len(self.agreements)]

    @property
    def simulated(self) -> bool:
        """Whether all keys were made in this process."""
        return self.made is not None

    def client(self, number: int, *, folder: Path | None, seed: int | None, lasting: bool = True) -> SumClient:
        """The sum's side of client `number`.

        folder: on its own disk, where it remembers its last epoch. lasting: its process lives as long as the run;
        otherwise it keeps all of its state in the folder, and only one process of it may be at work at a time.
        """
        agreement, epochs, state = self.agreement_of(number), None, None
        if folder is not None:
            private_folder(folder)
            # A digest, because the name of a run may contain characters that no file name can.
            digest = hashlib.sha256(agreement.run.encode()).hexdigest()[:16]
            path = folder / f"client-{number:04}-{digest}"
            epochs = EpochFile(path.with_suffix(".epoch")) if lasting else None
            state = None if lasting else StateFile(path.with_suffix(".sums"))
            if state is not None:
                state.forget_oldest(f"client-{number:04}-*.sums")
        if self.made is not None:
            key = self.made[number]
        elif self.identity is not None:
            key = identity_of(self.identity, number)
        else:
            raise InvalidParameter(
                f"client {number} needs its identity key for secure sums: make one with `bqsgd secure keygen`, put its "
                "public half into the roster, and give the file as identity"
            )
        return SumClient(
            agreement, identity=key, number=number, last_epoch=epochs, keep=state, seed=seed, rounds=self.rounds
        )


def roster_of(path: str | Path, count: int) -> Roster:
    """The roster in a file; InvalidParameter unless it names the clients 0 to `count` - 1."""
    roster = read_roster(path)
    if roster.clients != tuple(range(count)):
        raise InvalidParameter(f"{path} must name clients 0 to {count - 1}, each once")
    return roster


def identity_of(path: str | Path, number: int) -> Ed25519PrivateKey:
    """The private key of client `number`; `{client}` in the path stands for the number."""
    return read_identity(str(path).replace("{client}", str(number)))


def answer_step(sums: SumClient, message: Bytes) -> Reply:
    """Answer a step of a secure sum. If the step is refused the client declines, and nothing was revealed."""
    try:
        return Reply(client=sums.number, frame=sums.answer(message))
    except SecureSumError as error:
        return Reply.decline(sums.number, f"{type(error).__name__}: {error}")


def check_noise(sums: SumClient, release: Release, *, rule: Thresholds, seeded: bool) -> None:
    """Check that the sum has the clients and the noise that the ledger would count; call it before the spend.

    rule: the thresholds of the sum, or of the client's group, that follow from the settings. seeded: whether the ledger
    would count the noise as seeded.

    Raises:
        InvalidParameter: the clients agreed on another group, other noise or colluders, or this client's part is
            seeded.
    """
    agreed, terms = sums.agreement, release.terms
    counted = (release.mechanism.trials, terms.colluders, terms.dimension)
    if release.mechanism.noise is not None:
        raise InvalidParameter(f"secure sums share binomial noise between the clients, got {release.mechanism.noise}")
    if counted != (agreed.trials, agreed.rule.colluders, agreed.dimension) or terms.failure < agreed.rule.failure:
        raise InvalidParameter(
            f"the clients agreed on {agreed.trials} trials and {agreed.rule.colluders} colluders, client "
            f"{sums.number} would count {release.mechanism.trials} and {terms.colluders}: nothing is sent"
        )
    if rule != agreed.rule or terms.group > rule.clients:
        raise InvalidParameter(
            f"the clients agreed on a sum over {agreed.rule.fewest} to {agreed.rule.clients} clients, client "
            f"{sums.number} would count one over {rule.fewest} to {rule.clients}: nothing is sent"
        )
    if sums.seeded and not seeded:
        raise InvalidParameter(
            f"the secure sums of client {sums.number} are seeded, so its noise can be removed, and its ledger would "
            "count it as private: nothing is sent; leave out the seed"
        )


def masked_vector(
    sums: SumClient,
    values: Values,
    mechanism: Mechanism,
    *,
    range: float,
    round: int,
    rng: NoiseSource,
    clamp: bool,
    model: bytes,
) -> bytearray:
    """The values with this client's part of the noise, under masks that cancel in the sum over the clients.

    The keys of a round mask one vector only; `SumClient.mask` refuses a second. model: digest of the server's model.
    """
    agreed = sums.agreement
    base = agreed.noise.cuts[0]
    codes = encode_base(values, mechanism.levels, base, width=agreed.width, range=range, rng=rng, clamp=clamp)
    return sums.mask(round, codes, model=model)


def most_sum_bytes(config: Config) -> int:
    """The longest message of a run's secure sums, apart from masked vectors; 0 if the run has none."""
    if not config.secure.on:
        return 0
    return messages.most_bytes(config.secure.rule(config.clients.count), rounds=config.secure.key_rounds)


def with_roster(config: Config) -> Config:
    """The same settings with the digest of the roster, if there is a roster and the digest is not known yet."""
    secure = config.secure
    if not secure.on or secure.roster is None or secure.roster_digest is not None:
        return config
    return config.but(roster_digest=read_roster(secure.roster).digest.hex())


def made_identities(config: Config) -> tuple[dict[int, Ed25519PrivateKey], Roster]:
    """Keys for all clients of a run that belong to one user, and their roster; from the seed if there is one."""
    seed, clients = config.privacy.seed, range(config.clients.count)
    if seed is None:
        identities = {client: Ed25519PrivateKey.generate() for client in clients}
        shared = os.urandom(32)
    else:
        identities = {
            client: Ed25519PrivateKey.from_private_bytes(_seeded(b"identity", struct.pack("<QQ", seed, client)))
            for client in clients
        }
        shared = _seeded(b"roster", struct.pack("<Q", seed))
    return identities, Roster({client: public_key(key) for client, key in identities.items()}, shared)


def _seeded(purpose: bytes, key: bytes) -> bytes:
    return hashlib.sha256(b"bqsgd.secure." + purpose + b".v1\x00" + key).digest()
