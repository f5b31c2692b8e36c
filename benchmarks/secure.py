"""Secure sums: masking beside Flower's SecAgg+, a client's and the server's work, and bytes; one core, one run.

python -m benchmarks.secure [--output benchmarks/results/secure.json]

masking: one LeNet-5 vector masked with 99 neighbours, by `bqsgd.secure.masks` (AES-256-CTR) and by Flower's own mask
code (NumPy's generator on a seed folded to 32 bits), keys given. client: one of each number of clients, step by step,
beside a plain encode. server: from masked vectors to the sum. bytes: of one client, measured on real messages. sharing:
beside pycryptodome's. Times are the least of interleaved repeats.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from Crypto.Protocol.SecretSharing import Shamir
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from flwr.common.secure_aggregation.ndarrays_arithmetic import parameters_addition, parameters_mod
from flwr.common.secure_aggregation.secaggplus_utils import pseudo_rand_gen

from bqsgd.codec import encode_frame
from bqsgd.noise import privacy_rng
from bqsgd.params import Mechanism
from bqsgd.secure.agreement import Agreement
from bqsgd.secure.client import SumClient
from bqsgd.secure.graph import Thresholds, thresholds
from bqsgd.secure.masks import add_mask, scratch_for
from bqsgd.secure.roster import Roster, public_key
from bqsgd.secure.server import SumServer
from bqsgd.secure.sharing import combine, split
from bqsgd.wire.model_message import write_model

LENET5 = 61_706
WIDTH = 16
REPEATS = 7
CLIENTS = ((4, 1, 0), (10, 2, 2), (100, 10, 10), (1000, 50, 100))


def least_seconds(**works: Callable[[], Any]) -> dict[str, float]:
    """The least time of each over interleaved repeats."""
    best = dict.fromkeys(works, float("inf"))
    for _ in range(REPEATS):
        for name, work in works.items():
            began = time.perf_counter()
            work()
            best[name] = min(best[name], time.perf_counter() - began)
    return best


def masking() -> dict[str, Any]:
    """One vector with 99 masks, keys given."""
    keys = [os.urandom(16) for _ in range(99)]
    codes = np.zeros(LENET5, dtype="<u2")
    scratch = scratch_for(codes)

    def ours() -> None:
        lanes = codes.copy()
        for key in keys:
            add_mask(lanes, key, scratch=scratch)

    def theirs() -> None:
        vector = [codes.astype(np.int64)]
        for key in keys:
            vector = parameters_addition(vector, pseudo_rand_gen(key + key, 1 << WIDTH, [(LENET5,)]))
        parameters_mod(vector, 1 << WIDTH)

    found = least_seconds(ours=ours, flower=theirs)
    return {"dimension": LENET5, "masks": 99, "seconds": found, "times_faster": found["flower"] / found["ours"]}


class Federation:
    """A server and clients that all answer."""

    def __init__(self, rule: Thresholds, *, dimension: int = LENET5) -> None:
        keys = {number: Ed25519PrivateKey.generate() for number in range(rule.clients)}
        roster = Roster({number: public_key(key) for number, key in keys.items()})
        self.agreement = Agreement(roster=roster, run="bench", rule=rule, dimension=dimension, width=WIDTH)
        self.clients = {n: SumClient(self.agreement, identity=key, number=n) for n, key in keys.items()}
        self.server = SumServer(self.agreement)
        self.up = dict.fromkeys(keys, 0)
        self.down = dict.fromkeys(keys, 0)
        self.seconds: dict[str, float] = {}

    def _ask(self, step: str, client: int, message: bytes, work: Callable[[], bytes | bytearray]) -> bytes | bytearray:
        began = time.perf_counter()
        answer = work()
        if client == 0:
            self.seconds[step] = time.perf_counter() - began
        self.up[client] += len(answer)
        self.down[client] += len(message)
        return answer

    def begin(self) -> None:
        """Keys and shares of one round."""
        server = self.server
        server.begin(epoch=1, first_round=0, rounds=1)
        for n, client in self.clients.items():
            request = server.request(n)
            server.take_keys(self._ask("keys", n, request, lambda c=client, m=request: c.answer(m)))
        for n in server.keyed:
            bundle = server.key_bundle(n)
            server.take_shares(self._ask("shares", n, bundle, lambda c=self.clients[n], m=bundle: c.answer(m)))
        for n in server.shared:
            bundle = server.share_bundle(n)
            self._ask("take shares", n, bundle, lambda c=self.clients[n], m=bundle: c.answer(m))

    def sum(self) -> float:
        """One round; returns what the server itself spent on it."""
        server, codes, spent = self.server, np.zeros(self.agreement.dimension, dtype=np.uint8), 0.0

        def timed(work: Callable[[], Any]) -> Any:
            nonlocal spent
            began = time.perf_counter()
            result = work()
            spent += time.perf_counter() - began
            return result

        server.open(0)
        for n, client in self.clients.items():
            masked = self._ask("mask", n, b"", lambda c=client: c.mask(0, codes))
            timed(lambda m=masked: server.take_masked(m))
        for n in timed(server.close):
            listed = timed(lambda n=n: server.survivors(n))
            signed = self._ask("sign", n, listed, lambda c=self.clients[n], m=listed: c.answer(m))
            timed(lambda m=signed: server.take_signature(m))
        for n in timed(lambda: server.signed):
            certificate = timed(lambda n=n: server.certificate(n))
            said = self._ask("unmask", n, certificate, lambda c=self.clients[n], m=certificate: c.answer(m))
            timed(lambda m=said: server.take_unmasking(m))
        total = timed(server.total)
        assert not total.lanes.any()
        return spent


def plain_encode() -> tuple[float, int, int]:
    """Seconds and bytes of a plain frame of 16 bits, and the bytes of the model that every client gets."""
    values, mechanism = np.zeros(LENET5, dtype=np.float32), Mechanism(levels=100, trials=65_335)
    rng = privacy_rng()

    def work() -> bytearray:
        return encode_frame(values, mechanism, range=1.0, rng=rng, client=0, round=0)

    return least_seconds(encode=work)["encode"], len(work()), len(write_model(values, round=0))


def sharing() -> dict[str, Any]:
    """A secret among 30, of which 20 open it."""
    secret, points, rng = os.urandom(16), list(range(1, 31)), privacy_rng()
    ours = dict(zip(points, split(secret, points, threshold=20, rng=rng), strict=True))
    theirs = Shamir.split(20, 30, secret)
    return least_seconds(
        split=lambda: split(secret, points, threshold=20, rng=rng),
        combine=lambda: combine(ours, threshold=20),
        split_pycryptodome=lambda: Shamir.split(20, 30, secret),
        combine_pycryptodome=lambda: Shamir.combine(theirs[:20]),
    )


def main() -> None:
    """Run everything and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/secure.json"))
    arguments = parser.parse_args()
    encode, frame_bytes, model_bytes = plain_encode()
    by_clients = []
    for n, f, t in CLIENTS:
        rule = thresholds(clients=n, dropouts=f, colluders=t)
        federation = Federation(rule)
        federation.begin()
        server_seconds = federation.sum()
        by_clients.append(
            {
                "clients": n,
                "dropouts": f,
                "colluders": t,
                "client_seconds": federation.seconds,
                "mask_times_plain_encode": federation.seconds["mask"] / encode,
                "server_seconds": server_seconds,
                "bytes_up": federation.up[0],
                "bytes_down": federation.down[0],
                "plain_bytes_up": frame_bytes,
                "plain_bytes_down": model_bytes,
            }
        )
    results = {
        "versions": {name: version(name) for name in ("cryptography", "flwr", "numpy", "pycryptodome")},
        "masking": masking(),
        "plain_encode_seconds": encode,
        "by_clients": by_clients,
        "sharing_30_of_which_20": sharing(),
    }
    arguments.output.write_text(json.dumps(results, indent=2) + "\n")
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
