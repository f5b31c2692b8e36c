"""Secure sums: masking beside Flower's SecAgg+, a client's and the server's work, and bytes; one core, one run.

masking: one LeNet-5 vector masked with 99 neighbours, by our masks (AES-128-CTR) and by Flower's own mask
code (NumPy's generator on a seed folded to 32 bits), keys given. client: one of each number of clients, step by step,
beside a plain encode; a round's share of keys and shares is that of a later batch of 20 rounds. server: processor time
of a round, from masked vectors to the sum. bytes: of one client and round, measured on real messages. sharing: beside
pycryptodome's. Times are the least of repeats, of a client's steps over all clients that have the same to do.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import numpy as np
from Crypto.Protocol.SecretSharing import Shamir
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from flwr.common.secure_aggregation.ndarrays_arithmetic import parameters_addition, parameters_mod
from flwr.common.secure_aggregation.secaggplus_utils import pseudo_rand_gen

import benchmarks
from bqsgd._src.codec import encode_frame
from bqsgd._src.noise import privacy_rng
from bqsgd._src.params import Mechanism
from bqsgd._src.secure.agreement import Agreement
from bqsgd._src.secure.client import SumClient
from bqsgd._src.secure.graph import FULL_GRAPH, Thresholds, thresholds
from bqsgd._src.secure.masks import add_mask, scratch_for
from bqsgd._src.secure.noise_shares import encode_base
from bqsgd._src.secure.roster import Roster, public_key
from bqsgd._src.secure.server import SumServer
from bqsgd._src.secure.sharing import extend, row_through
from bqsgd._src.wire.model_message import write_model

LENET5 = 61_706
WIDTH = 16
REPEATS = 25
ROUNDS = 20
TRIALS = 1000
CLIENTS = ((4, 1, 0), (10, 2, 2), (100, 10, 10), (250, 12, 12), (500, 25, 25), (1000, 50, 50))


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

    seconds = least_seconds(ours=ours, flower=theirs)
    return {"dimension": LENET5, "masks": 99, "seconds": seconds, "times_faster": seconds["flower"] / seconds["ours"]}


class Federation:
    """A server and clients that all answer, in a batch of `ROUNDS` rounds.

    seconds: by step, the least over all clients that have the same to do, and over the rounds that were run. messages:
    by step, the bytes that a client sent and received, those of a key batch divided by its rounds.
    """

    def __init__(self, rule: Thresholds) -> None:
        keys = {number: Ed25519PrivateKey.generate() for number in range(rule.clients)}
        roster = Roster({number: public_key(key) for number, key in keys.items()}, os.urandom(32))
        self.agreement = Agreement(
            roster=roster, run="bench", rule=rule, dimension=LENET5, width=WIDTH, trials=TRIALS
        )  # fmt: skip
        self.clients = {n: SumClient(self.agreement, identity=key, number=n) for n, key in keys.items()}
        self.server = SumServer(self.agreement)
        self.committee = frozenset(self.agreement.graph.committee)
        self.up = dict.fromkeys(keys, 0.0)
        self.down = dict.fromkeys(keys, 0.0)
        self.seconds: dict[str, float] = {}
        self.messages: dict[str, list[float]] = {}

    def _ask(self, step: str, client: int, message: bytes, work: Callable[[], bytes | bytearray]) -> bytes | bytearray:
        began = time.perf_counter()
        answer = work()
        spent = time.perf_counter() - began
        self.seconds[step] = min(self.seconds.get(step, spent), spent)
        share = 1.0 if step in ("mask", "sign", "sign as committee", "unmask") else 1 / ROUNDS
        self.up[client] += share * len(answer)
        self.down[client] += share * len(message)
        self.messages[step] = [share * len(answer), share * len(message)]
        return answer

    def begin(self, epoch: int) -> None:
        """Keys and shares of a batch. The second one knows the neighbours' keys already."""
        server, first = self.server, "first " if epoch == 1 else ""
        self.up, self.down = dict.fromkeys(self.up, 0.0), dict.fromkeys(self.down, 0.0)
        server.begin(epoch=epoch, first_round=ROUNDS * (epoch - 1), rounds=ROUNDS)
        for n, request in server.requests().items():
            client = self.clients[n]
            server.take_keys(self._ask(f"{first}keys", n, request, lambda c=client, m=request: c.answer(m)))
        for n, bundle in server.key_bundles().items():
            server.take_shares(self._ask(f"{first}shares", n, bundle, lambda c=self.clients[n], m=bundle: c.answer(m)))
        for n, bundle in server.share_bundles().items():
            said = self._ask("take shares", n, bundle, lambda c=self.clients[n], m=bundle: c.answer(m))
            if said:
                server.take_partners(said)
        for n, bundle in server.partner_bundles().items() if server.sparse else ():
            self._ask("take partners", n, bundle, lambda c=self.clients[n], m=bundle: c.answer(m))

    def sum(self, round: int) -> float:
        """One round; returns what the server itself spent on it."""
        server, codes, spent = self.server, np.zeros(self.agreement.dimension, dtype=np.uint8), 0.0

        def timed(work: Callable[[], Any]) -> Any:
            nonlocal spent
            began = time.process_time()
            result = work()
            spent += time.process_time() - began
            return result

        timed(lambda: server.open(round))
        for n, client in self.clients.items():
            masked = self._ask("mask", n, b"", lambda c=client: c.mask(round, codes))
            timed(lambda m=masked: server.take_masked(m))
        for n, listed in timed(server.survivor_lists).items():
            step = "sign as committee" if n in self.committee else "sign"
            signed = self._ask(step, n, listed, lambda c=self.clients[n], m=listed: c.answer(m))
            if signed:
                timed(lambda m=signed: server.take_signature(m))
        for n, certificate in timed(server.certificates).items():
            said = self._ask("unmask", n, certificate, lambda c=self.clients[n], m=certificate: c.answer(m))
            timed(lambda m=said: server.take_unmasking(m))
        total = timed(server.total)
        noise = self.agreement.noise
        assert abs(total.lanes.mean() - (total.trials - len(self.clients) * noise.cuts[0]) / 2) < 1
        return spent

    def base_seconds(self) -> float:
        """The least time of the encoding before the masks: rounding and the noise that is always needed."""
        values, rng = np.zeros(LENET5, dtype=np.float32), privacy_rng()
        base = self.agreement.noise.cuts[0]
        return least_seconds(
            base=lambda: encode_base(values, 17, base, width=WIDTH, range=1.0, rng=rng)
        )["base"]  # fmt: skip


def plain_encode() -> tuple[float, int, int]:
    """Seconds and bytes of a plain frame of 16 bits, and the bytes of the model that every client gets."""
    values, mechanism = np.zeros(LENET5, dtype=np.float32), Mechanism(levels=100, trials=65_335)
    rng = privacy_rng()

    def work() -> bytearray:
        return encode_frame(values, mechanism, range=1.0, rng=rng, client=0, round=0)

    return least_seconds(encode=work)["encode"], len(work()), len(write_model(values, round=0))


def sharing() -> dict[str, Any]:
    """A secret among 30, of which 20 open it."""
    secret, derived = os.urandom(16), {point: os.urandom(16) for point in range(1, 31)}
    shares = {point: derived[point] for point in range(1, 21)}
    theirs = Shamir.split(20, 30, secret)
    return least_seconds(
        split=lambda: row_through(derived, threshold=20, secret=secret),
        combine=lambda: extend(shares, [0]),
        split_pycryptodome=lambda: Shamir.split(20, 30, secret),
        combine_pycryptodome=lambda: Shamir.combine(theirs[:20]),
    )


def by_clients(n: int, f: int, t: int, *, encode: float, frame_bytes: int, model_bytes: int) -> dict[str, Any]:
    """Client, server and bytes of a sum over n clients, a round of a batch of `ROUNDS`."""
    federation = Federation(thresholds(clients=n, dropouts=f, colluders=t))
    federation.begin(1)
    federation.begin(2)
    seconds, server = federation.seconds, float("inf")
    before = dict(federation.up), dict(federation.down)
    for round in range(ROUNDS, ROUNDS + 2):
        federation.up, federation.down = dict(before[0]), dict(before[1])
        server = min(server, federation.sum(round))
    seconds["encode"] = federation.base_seconds()
    setup = sum(seconds.get(step, 0.0) for step in ("keys", "shares", "take shares", "take partners")) / ROUNDS
    sign = seconds.get("sign", seconds["sign as committee"])
    masked = seconds["encode"] + seconds["mask"]
    whole = masked + sign + seconds["unmask"] + setup
    others = [client for client in federation.clients if n <= FULL_GRAPH or client not in federation.committee]
    return {
        "clients": n,
        "dropouts": f,
        "colluders": t,
        "masks": len(federation.agreement.graph.masks(0)),
        "client_seconds": seconds,
        "client_bytes": {step: sizes for step, sizes in federation.messages.items() if not step.startswith("first")},
        "masked_times_plain_encode": masked / encode,
        "round_times_plain_encode": whole / encode,
        "server_seconds_per_client": server / n,
        "bytes_up": max(federation.up[client] for client in others),
        "bytes_down": max(federation.down[client] for client in others) + model_bytes,
        "plain_bytes_up": frame_bytes,
        "plain_bytes_down": model_bytes,
    }


def main() -> None:
    """Run everything and write the JSON."""
    output = benchmarks.parser("secure", __doc__).parse_args().output
    encode, frame_bytes, model_bytes = plain_encode()
    results = {
        "versions": {name: version(name) for name in ("cryptography", "flwr", "numpy", "pycryptodome")},
        "load": os.getloadavg(),
        "rounds_in_a_batch": ROUNDS,
        "trials": TRIALS,
        "masking": masking(),
        "plain_encode_seconds": encode,
        "by_clients": [
            by_clients(n, f, t, encode=encode, frame_bytes=frame_bytes, model_bytes=model_bytes) for n, f, t in CLIENTS
        ],
        "sharing_30_of_which_20": sharing(),
    }
    benchmarks.write(output, results)
    print(json.dumps(results, indent=2))
