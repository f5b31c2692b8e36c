"""One rank of a DDP script with the hook: what each part found is printed as one line of JSON. argv: see the tests."""

import contextlib
import json
import os
import sys
import warnings
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from bqsgd._src.codec import decode_frame, encode_frame
from bqsgd._src.engines.torch_distributed.hook import NoGuaranteeWarning
from bqsgd._src.ledger import Ledger
from bqsgd._src.noise import privacy_rng, seeded_rng
from bqsgd._src.params import Mechanism
from bqsgd._src.persample import Clamp, clipped_gradients
from bqsgd.distributed import BQHookState, PrivateSteps, bq_hook, join
from tiny_task import points

LOSS = torch.nn.CrossEntropyLoss(reduction="none")
NOISY = Mechanism(levels=20, trials=200)


def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(2, 300), torch.nn.Tanh(), torch.nn.Linear(300, 2))


def flat(model):
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()]).numpy().copy()


def batch(rank):
    return tuple(torch.as_tensor(part) for part in points(32, rank))


def wrapped(model, state):
    """DDP in small buckets, so that a step is several frames."""
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.001)
    ddp.register_comm_hook(state, bq_hook)
    return ddp


def gradient(ddp, own):
    ddp.zero_grad()
    LOSS(ddp(own[0]), own[1]).mean().backward()
    return flat(ddp)


def compresses(rank, size):
    """Fine levels and no noise: the plain mean gradient up to one step of the grid; one warning in three steps."""
    state = BQHookState(Mechanism(levels=1 << 15, trials=0), range=1.0, rng=seeded_rng(seed=1))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ddp = wrapped(network(), state)
        found = [gradient(ddp, batch(rank)) for _ in range(3)]
    plain = []
    for other in range(size):
        model = network()
        LOSS(model(batch(other)[0]), batch(other)[1]).mean().backward()
        plain.append(flat(model))
    error = max(float(np.abs(each - np.mean(plain, axis=0)).max()) for each in found)
    told = sum(issubclass(warning.category, NoGuaranteeWarning) for warning in caught)
    return {"error": error, "steps": state.step, "warnings": told, "size": float(np.abs(plain[0]).max())}


def is_private(rank, size, folder):
    """The hook's mean is that of the clipped gradients, the ledger counts each step before it is sent."""
    model, clip = network(), Clamp(0.01)
    with Ledger.open(folder / f"{rank}.ledger", client=rank, budget_epsilon=1e4, budget_delta=1e-5) as ledger:
        private = PrivateSteps(
            model=model, loss_fn=LOSS, clip=clip, batch_size=32, dataset_size=640, ledger=ledger, run="hook"
        )
        state = BQHookState(NOISY, range=0.01, rng=privacy_rng(), private=private)
        ddp = wrapped(model, state)
        try:
            gradient(ddp, batch(rank))
            refused = "nothing"
        except Exception as error:
            refused = f"{type(error).__name__}: {error}"
        before = ledger.spent_rounds
        ddp = wrapped(model, state)
        total = np.zeros(sum(parameter.numel() for parameter in model.parameters()))
        steps = 20
        for _ in range(steps):
            state.supply(batch(rank), indices=np.arange(32))
            total += gradient(ddp, batch(rank))
        spent, guarantee = ledger.spent_rounds, private.guarantee(delta=1e-5)
    means = [clipped_gradients(network(), LOSS, batch(r), clip=clip, batch_size=32).mean.numpy() for r in range(size)]
    deviation = 0.01 / NOISY.levels * np.sqrt((NOISY.trials / 4 + 0.25) / size / steps)
    z = (total / steps - np.mean(means, axis=0)) / deviation
    return {
        "refused": refused,
        "before": before,
        "spent": spent,
        "guarantee": str(guarantee),
        "chi2": float((z**2).mean()),
        "largest": float(np.abs(z).max()),
    }


class Trap(torch.autograd.Function):
    """Passes values on; its backward fails when told to."""

    armed = False

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if Trap.armed:
            raise RuntimeError("the trap")
        return gradient


class Trapped(torch.nn.Module):
    """Two layers; the backward can be made to fail between their buckets."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.through = torch.nn.Linear(2, 300), torch.nn.Linear(300, 2), torch.nn.Identity()

    def forward(self, x):
        return self.second(self.through(self.first(x)))


class ThroughTrap(torch.nn.Module):
    def forward(self, x):
        return Trap.apply(x)


@contextlib.contextmanager
def recorded():
    """The bytes that this rank gives to all_gather."""
    sent, real = [], dist.all_gather

    def record(frames, own, **options):
        sent.append(bytes(own.numpy()))
        return real(frames, own, **options)

    dist.all_gather = record
    try:
        yield sent
    finally:
        dist.all_gather = real


def repeated(rank, folder, times=8):
    """A backward that fails after its first buckets, again and again, then one that succeeds."""
    model = Trapped()
    with (
        Ledger.open(folder / f"{rank}.repeated.ledger", client=rank, budget_epsilon=1e4, budget_delta=1e-5) as ledger,
        recorded() as sent,
    ):
        private = PrivateSteps(
            model=model, loss_fn=LOSS, clip=Clamp(0.01), batch_size=32, dataset_size=640, ledger=ledger, run="hook"
        )
        state = BQHookState(NOISY, range=0.01, rng=privacy_rng(), private=private)

        def backward(**buckets):
            ddp = DistributedDataParallel(model, **buckets)
            ddp.register_comm_hook(state, bq_hook)
            return gradient(ddp, batch(rank))

        small = {"bucket_cap_mb": 0.001, "find_unused_parameters": True}  # so that buckets are small from the start
        state.supply(batch(rank), indices=np.arange(32))
        model.through, Trap.armed = ThroughTrap(), True
        failed = 0
        for _ in range(times):
            try:
                backward(**small)
            except RuntimeError as error:
                failed += "the trap" in str(error)
        partly = {"messages": len(sent), "distinct": len(set(sent)), "ledger": ledger.spent_rounds}
        Trap.armed = False
        try:
            backward()  # all parameters in one bucket
            other_buckets = "sent"
        except Exception as error:
            other_buckets = f"{type(error).__name__}: {error}"
        between = len(sent)
        first = backward(**small)
        whole = {"messages": len(sent) - between, "distinct": len(set(sent)), "ledger": ledger.spent_rounds}
        state.supply(batch(rank), indices=np.arange(32))
        second = backward(**small)
        after = {"distinct": len(set(sent)), "ledger": ledger.spent_rounds, "fresh": bool((first != second).any())}
    return {
        "failed": failed,
        "partly": partly,
        "other_buckets": other_buckets,
        "sent_in_other_buckets": between - partly["messages"],
        "whole": whole,
        "after": after,
    }


def same_everywhere(rank, size):
    """Every rank ends with the same gradient, which is that of the frames that seeded noise makes."""
    model = torch.nn.Linear(2, 2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.25)
    private = PrivateSteps(
        model=model, loss_fn=LOSS, clip=Clamp(0.1), batch_size=32, dataset_size=640, ledger=None, run="seeded"
    )
    state = BQHookState(NOISY, range=0.1, rng=seeded_rng(seed=rank), private=private)
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(state, bq_hook)
    mean = {r: clipped_gradients(model, LOSS, batch(r), clip=Clamp(0.1), batch_size=32).mean for r in range(size)}
    state.supply(batch(rank), indices=np.arange(32))
    found = gradient(ddp, batch(rank))
    # DDP's bucket holds the parameters in the order in which their gradients come: here bias before weight or after.
    orders = [slice(None), np.r_[4:6, 0:4]]
    matches = False
    for order in orders:
        frames = [
            encode_frame(
                mean[r].numpy()[order], NOISY, range=0.1, rng=seeded_rng(seed=r), client=r, round=0, clamp=True
            )
            for r in range(size)
        ]
        expected = np.empty(6)
        expected[order] = np.mean([decode_frame(frame, range=0.1) for frame in frames], axis=0)
        matches |= bool(np.allclose(found, expected, atol=1e-7))
    return {"gradient": found.tobytes().hex(), "matches": matches}


def foreign(rank):
    """A rank with another clip is found out on every rank."""
    ddp = wrapped(network(), BQHookState(NOISY, range=1.0 + rank, rng=seeded_rng(seed=1)))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            gradient(ddp, batch(rank))
    except Exception as error:
        return {"class": type(error).__name__, "text": str(error).splitlines()[0]}
    return {"class": None, "text": "nothing was refused"}


def main():
    folder = Path(json.loads(sys.argv[1])["folder"])
    torch.set_num_threads(1)
    with join(timeout_seconds=500) as group:
        found = {
            "compresses": compresses(group.rank, group.size),
            "private": is_private(group.rank, group.size, folder),
            "same": same_everywhere(group.rank, group.size),
            "repeated": repeated(group.rank, folder),
            "foreign": foreign(group.rank),
        }
        dist.barrier()
        (folder / f"found-{group.rank}.json").write_text(json.dumps(found))
        sys.stdout.flush()
        os._exit(0)  # the refused steps left collectives behind that a clean end would wait for


if __name__ == "__main__":
    main()
