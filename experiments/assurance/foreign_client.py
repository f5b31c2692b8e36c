"""Secure sums with one client that is another program, written from docs/wire.md: `python -m` this module `-- COMMAND`.

The program gets one line at a time on its standard input and answers each with one line on its standard output:

    agreed JSON         once, first. JSON: run (its name), clients, dropouts, colluders, dimension, widest, trials,
                        seeded (0 or 1), roster (keys: a list of [number, public key], and seed, in hexadecimal),
                        number and identity (its own number and private Ed25519 key, 32 bytes). Answer: an empty line
    message HEX         a message of the server, whole. Answer: the answer in hexadecimal; an empty line for none; or
                        "refused" and the reason
    mask ROUND HEX C..  the digest of the model (32 bytes) and the codes of its vector before any of its noise parts.
                        Answer: the masked message in hexadecimal, or "refused" and the reason

Its standard error goes to the terminal. All other clients and the server are ours. Every sum is compared with the sum
of the survivors' codes and the noise that must be in it. There is one line for each sum, and a summary.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from bqsgd._src.errors import SecureSumError
from bqsgd._src.secure import messages
from bqsgd._src.secure.agreement import Agreement
from bqsgd._src.secure.client import SumClient
from bqsgd._src.secure.graph import thresholds
from bqsgd._src.secure.messages import Kind
from bqsgd._src.secure.roster import Roster, public_key
from bqsgd._src.secure.server import SumServer


class Refused(Exception):
    """The program refused a message, and says why."""


class Program:
    """A client that is another program."""

    def __init__(self, command: Sequence[str], agreement: Agreement, number: int, identity: bytes) -> None:
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        rule, roster = agreement.rule, agreement.roster
        agreed = {
            "run": agreement.run,
            "clients": rule.clients,
            "dropouts": rule.dropouts,
            "colluders": rule.colluders,
            "dimension": agreement.dimension,
            "widest": agreement.widest,
            "trials": agreement.trials,
            "seeded": int(agreement.seeded),
            "roster": {"keys": [[n, key.hex()] for n, key in roster.keys.items()], "seed": roster.seed.hex()},
            "number": number,
            "identity": identity.hex(),
        }
        self._ask(f"agreed {json.dumps(agreed)}")

    def answer(self, message: bytes) -> bytes:
        """The program's answer to a message; empty for none."""
        return self._ask(f"message {bytes(message).hex()}")

    def mask(self, round: int, codes: np.ndarray, model: bytes) -> bytes:
        """The program's masked message."""
        return self._ask(f"mask {round} {model.hex()} {' '.join(map(str, codes.tolist()))}")

    def close(self) -> None:
        """End the program by closing its input."""
        self._pipe(self._process.stdin).close()
        self._process.wait()

    @staticmethod
    def _pipe(pipe: IO[str] | None) -> IO[str]:
        assert pipe is not None
        return pipe

    def _ask(self, line: str) -> bytes:
        to, back = self._pipe(self._process.stdin), self._pipe(self._process.stdout)
        to.write(line + "\n")
        to.flush()
        answer = back.readline()
        if not answer:
            raise SystemExit("the program ended without an answer")
        if answer.startswith("refused"):
            raise Refused(answer.strip())
        return bytes.fromhex(answer.strip())


@dataclass(frozen=True, kw_only=True)
class Leaving:
    """Who leaves where in a sum."""

    before_mask: frozenset[int] = frozenset()
    before_unmasking: frozenset[int] = frozenset()


class Federation:
    """The server, our clients, and the program."""

    def __init__(self, agreement: Agreement, identities: dict[int, bytes], command: Sequence[str], number: int) -> None:
        self.agreement, self.number = agreement, number
        self.server = SumServer(agreement)
        self.program = Program(command, agreement, number, identities[number])
        self.clients: dict[int, SumClient] = {
            n: SumClient(agreement, identity=Ed25519PrivateKey.from_private_bytes(key), number=n)
            for n, key in identities.items()
            if n != number
        }

    def answer(self, number: int, message: bytes) -> bytes:
        """The answer of one client, ours or the program."""
        return self.program.answer(message) if number == self.number else self.clients[number].answer(message)

    def begin(self, *, epoch: int, first_round: int, rounds: int, silent: frozenset[int] = frozenset()) -> None:
        """A key batch. silent: clients that send keys and no shares."""
        server = self.server
        server.begin(epoch=epoch, first_round=first_round, rounds=rounds)
        for number, request in server.requests().items():
            server.take_keys(self.answer(number, request))
        for number, bundle in server.key_bundles().items():
            if number not in silent:
                server.take_shares(self.answer(number, bundle))
        for number, bundle in server.share_bundles().items():
            if statement := self.answer(number, bundle):
                server.take_partners(statement)
        for number, bundle in server.partner_bundles().items() if server.sparse else ():
            self.answer(number, bundle)

    def sum(self, round: int, model: bytes, leaving: Leaving, rng: np.random.Generator) -> tuple[bool, str]:
        """One sum: whether it is right, and a line about it."""
        server, agreed = self.server, self.agreement
        codes = {n: rng.integers(0, 3, agreed.dimension).astype(np.uint32) for n in agreed.roster.clients}
        server.open(round, model=model)
        for number in server.partner_bundles() if server.sparse else server.share_bundles():
            if number not in leaving.before_mask:
                foreign = number == self.number
                vector = (self.program if foreign else self.clients[number]).mask(round, codes[number], model=model)
                server.take_masked(vector)
        for number, listed in server.survivor_lists().items():
            if signature := self.answer(number, listed):
                server.take_signature(signature)
        for number, certificate in server.certificates().items():
            if number not in leaving.before_unmasking:
                server.take_unmasking(self.answer(number, certificate))
        for number, request in server.recoveries().items():
            server.take_recovery(self.answer(number, request))
        total = server.total()
        plain = sum(codes[n].astype(np.int64) for n in total.survivors)
        # What is in the sum but the codes: noise, whose mean and spread are known. The base is not drawn here.
        base = agreed.noise.cuts[0] * len(total.survivors)
        noise = (total.lanes.astype(np.int64) - plain) % (1 << agreed.width)
        spread = noise - (total.trials - base) / 2
        right = bool(np.all(np.abs(spread) <= 12 + 6 * np.sqrt(total.trials / 4)))
        blamed = f", blamed {server.blamed}" if server.blamed else ""
        line = f"round {round}: {len(total.survivors)} survivors, {'right' if right else 'WRONG'}{blamed}"
        return right and not server.blamed, line


def hostile(federation: Federation, epoch: int) -> list[str]:
    """Messages that a client must refuse, sent to the program in a key batch that has begun; what it did not refuse."""
    program, agreed, number = federation.program, federation.agreement, federation.number
    accepted = []
    header = messages.SumHeader(kind=Kind.BATCH, epoch=epoch, round=0, rounds=2, client=number)
    request = messages.write_batch(header, agreed.of())
    cases = {
        "an epoch that was used": request,
        "flags": request[:7] + b"\x01" + request[8:],
        "another session": request[:8] + bytes(16) + request[24:],
        "a byte too many": request + b"\x00",
        "another client": request[:44] + (number + 1).to_bytes(4, "little") + request[48:],
        "epoch 2^63": request[:24] + (1 << 63).to_bytes(8, "little") + request[32:],
        "a list before a vector was masked": messages.write_listed(
            messages.SumHeader(kind=Kind.SURVIVORS, epoch=epoch, round=1, client=number), agreed, agreed.roster.clients
        ),
        "silent clients before unmasking": messages.write_listed(
            messages.SumHeader(kind=Kind.SILENT, epoch=epoch, round=1, client=number), agreed, [0]
        ),
    }
    for name, message in cases.items():
        try:
            if program.answer(message):
                accepted.append(name)
        except Refused:
            continue
    return accepted


def main() -> int:
    """Run the sums that the options ask for; 0 if all are right and no hostile message was answered."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=250)
    parser.add_argument("--dropouts", type=int, default=12)
    parser.add_argument("--colluders", type=int, default=12)
    parser.add_argument("--dimension", type=int, default=20)
    parser.add_argument("--width", type=int, default=14)
    parser.add_argument("--trials", type=int, default=5000)
    parser.add_argument("--batches", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3, help="rounds in a key batch")
    parser.add_argument("--number", type=int, help="the program's number; without it a member of the committee")
    parser.add_argument("--seed", type=int, default=0, help="chooses who leaves; the secrets are always fresh")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    asked = parser.parse_args()
    rng, chance = np.random.default_rng(asked.seed), random.Random(asked.seed)
    identities = {number: random.SystemRandom().randbytes(32) for number in range(asked.clients)}
    keys = {number: public_key(Ed25519PrivateKey.from_private_bytes(key)) for number, key in identities.items()}
    agreement = Agreement(
        roster=Roster(keys, random.SystemRandom().randbytes(32)),
        run="foreign",
        rule=thresholds(clients=asked.clients, dropouts=asked.dropouts, colluders=asked.colluders),
        dimension=asked.dimension,
        width=asked.width,
        trials=asked.trials,
    )
    number = agreement.graph.committee[0] if asked.number is None else asked.number
    federation = Federation(agreement, identities, [part for part in asked.command if part != "--"], number)
    others, right, sums = [n for n in identities if n != number], 0, 0
    accepted: list[str] = []
    for batch in range(asked.batches):
        # Few leave, because those before the shares, before the mask and on a sparse graph add up.
        most = asked.dropouts // 4
        federation.begin(
            epoch=batch + 1,
            first_round=batch * asked.rounds,
            rounds=asked.rounds,
            silent=frozenset(chance.sample(others, most)),
        )
        if batch == 0:
            accepted = hostile(federation, 1)
        for round in range(batch * asked.rounds, (batch + 1) * asked.rounds):
            leaving = Leaving(
                before_mask=frozenset(chance.sample(others, chance.randint(0, most))),
                before_unmasking=frozenset(chance.sample(others, chance.randint(0, most // 2))),
            )
            try:
                fits, line = federation.sum(round, random.SystemRandom().randbytes(32), leaving, rng)
            except (SecureSumError, Refused) as error:
                fits, line = False, f"round {round}: {type(error).__name__}: {error}"
            print(line, flush=True)
            sums, right = sums + 1, right + fits
    federation.program.close()
    print(f"{right} of {sums} sums right, {len(accepted)} hostile messages answered {accepted or ''}".rstrip())
    return 0 if right == sums and not accepted else 1


if __name__ == "__main__":
    sys.exit(main())
