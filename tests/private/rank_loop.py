"""One rank of a private loop: torchrun's variables are in the environment. Prints what it came to as JSON."""

import json
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bqsgd

folder, rank = sys.argv[1], int(sys.argv[2])
torch.set_num_threads(1)
samples, batch_size = ((96, 32), (64, 16))[rank]
x = torch.randn(samples, 4, generator=torch.Generator().manual_seed(rank))
y = (x[:, 0] > 0).long()
loss = nn.CrossEntropyLoss(reduction="none")
torch.manual_seed(rank)  # another model on every rank: training begins with that of rank 0


def make(name, batch_size, **given):
    model = nn.Linear(4, 2)
    loader = DataLoader(TensorDataset(x, y), batch_size=batch_size, shuffle=True)
    asked = {"loss_fn": loss, "epsilon": 8.0, "delta": 1e-5, "epochs": 2, "range": 0.5}
    ledger = None if "seed" in given else f"{folder}/{name}.ledger"
    return bqsgd.make_private(
        model, torch.optim.SGD(model.parameters(), lr=0.5), loader, ledger=ledger, **asked | given
    )


told = {}
private = make("loop", batch_size, mechanism=bqsgd.Mechanism(levels=1, trials=2000 + rank))
begun = private.model.weight.tolist()
for _ in range(2):
    for batch in private.loader:
        private.step(batch)
told["steps"], told["begun"] = private.steps, begun
told["weights"] = private.model.weight.tolist()
told["guarantee"] = str(private.guarantee())
private.close()

# Without noise and with every sample drawn, the step is the mean of the two ranks' means.
exact = make("exact", samples, mechanism=bqsgd.Mechanism(levels=1000, trials=0), seed=rank)
exact.backward(next(iter(exact.loader)))
told["gradient"] = torch.cat([p.grad.flatten() for p in exact.model.parameters()]).tolist()
told["own"] = [p.tolist() for p in exact.model.parameters()]

# The same with a subset of the coordinates, which is not the same on both ranks.
part = make("part", samples, mechanism=bqsgd.Mechanism(levels=1000, trials=0), seed=rank, one_in=2)
part.backward(next(iter(part.loader)))
told["part"] = torch.cat([p.grad.flatten() for p in part.model.parameters()]).tolist()

# Rank 1 has a smaller budget: both stop, in the same step.
short = make("short", batch_size, mechanism=bqsgd.Mechanism(levels=1, trials=20), epsilon=(8.0, 0.5)[rank], epochs=400)
try:
    while True:
        for batch in short.loader:
            short.step(batch)
except bqsgd.BudgetExhausted as reason:
    told["ended"] = str(reason)
told["taken"] = short.model.weight.tolist()
told["spent"] = short.guarantee().epsilon
print("TOLD " + json.dumps(told))
