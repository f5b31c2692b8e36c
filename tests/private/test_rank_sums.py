"""The sums of a private loop among threads, and a rank 0 that tells every rank another mean."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from queue import Queue

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from bqsgd._src.client.sums import masked_vector
from bqsgd._src.engines.torch_distributed.ranks import MessageKind
from bqsgd._src.noise import seeded_rng
from bqsgd._src.params import Mechanism
from bqsgd._src.planner.sums import SumPlan
from bqsgd._src.private import SecureRanks
from bqsgd._src.private._sums import RankSums
from bqsgd._src.secure.graph import thresholds
from bqsgd._src.secure.roster import Roster, public_key, write_identity

RANKS, DIMENSION = 3, 50


@dataclass
class Channel:
    peer: int
    out: Queue
    back: Queue
    lies: bool = False

    def send(self, kind, content=b""):
        if self.lies and kind is MessageKind.SUM:
            content = (np.frombuffer(content, "<f4") + np.float32(1e-3)).astype("<f4").tobytes()
        self.out.put((kind, bytes(content)))

    def receive(self, *, most_bytes):
        return self.back.get(timeout=60)


class Peers:
    size = RANKS

    def __init__(self, rank, queues, lied_to):
        self.rank, self.queues, self.lied_to = rank, queues, lied_to

    def tell(self, note):
        return [{"token": f"{rank}"} for rank in range(RANKS)]

    def channel(self, peer):
        return Channel(peer, self.queues[self.rank, peer], self.queues[peer, self.rank], peer == self.lied_to)


@pytest.mark.parametrize(("lied_to", "models"), [(None, "aaa"), (2, "aaa"), (None, "aba")])
def test_ranks_that_were_told_different_models_or_means_give_no_further_sum(tmp_path, lied_to, models):
    keys = {rank: Ed25519PrivateKey.generate() for rank in range(RANKS)}
    for rank, key in keys.items():
        write_identity(tmp_path / f"{rank}.key", key)
    (tmp_path / "roster.toml").write_text(Roster({rank: public_key(key) for rank, key in keys.items()}).to_toml())
    secure = SecureRanks(roster=tmp_path / "roster.toml", identity=tmp_path / "{client}.key")
    plan = SumPlan(rule=thresholds(clients=RANKS, dropouts=0, colluders=0), levels=100, trials=0, width=10)
    queues = {(one, other): Queue() for one in range(RANKS) for other in range(RANKS)}
    together = threading.Barrier(RANKS)

    def rank_of(rank):
        told = models[rank].encode() * 32
        sums = RankSums(
            Peers(rank, queues, lied_to), plan=plan, dimension=DIMENSION, secure=secure, seed=rank, told=told
        )
        values = np.linspace(-0.5, 0.5, DIMENSION, dtype=np.float32)
        means = []
        for step in range(2):
            vector = partial(masked_vector, sums.client, values, Mechanism(levels=100, trials=0), range=1.0, round=step)
            masked = partial(vector, rng=seeded_rng(seed=step), clamp=False, model=sums.told)
            means.append(sums.mean(masked, round=step))
            together.wait(60)
        return means, values

    with ThreadPoolExecutor(RANKS) as pool:
        told = list(pool.map(rank_of, range(RANKS)))
    (first, second), values = told[0]
    assert (np.abs(first - values).max() < 0.02) == (models == "aaa")
    assert (np.abs(second - values).max() < 0.02) == (models == "aaa" and lied_to is None)
