"""One rank of a private loop with secure sums: torchrun's variables are in the environment. Prints JSON."""

import json
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bqsgd
from bqsgd._src.errors import SecureSumError
from bqsgd._src.private import SecureRanks

folder, rank = sys.argv[1], int(sys.argv[2])
torch.set_num_threads(1)
x = torch.randn(64, 4, generator=torch.Generator().manual_seed(rank))
y = (x[:, 0] > 0).long()
loss = nn.CrossEntropyLoss(reduction="none")
secure = SecureRanks(roster=f"{folder}/roster.toml", identity=f"{folder}/{{client}}.key", colluders=0)


def make(name, batch_size, **given):
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    loader = DataLoader(TensorDataset(x, y), batch_size=batch_size, shuffle=True)
    asked = {"loss_fn": loss, "epsilon": 8.0, "delta": 1e-5, "epochs": 2, "range": 0.5, "secure": secure}
    ledger = None if "seed" in given else f"{folder}/{name}.ledger"
    return bqsgd.make_private(
        model, torch.optim.SGD(model.parameters(), lr=0.5), loader, ledger=ledger, **asked | given
    )


told = {}
private = make("loop", 16, mechanism=bqsgd.Mechanism(levels=4, trials=3000))
for _ in range(2):
    for batch in private.loader:
        private.step(batch)
told["steps"], told["weights"] = private.steps, private.model.weight.tolist()
told["guarantee"] = str(private.guarantee())
state = private.state_dict()
private.close()
quieter = make("loop", 16, mechanism=bqsgd.Mechanism(levels=4, trials=30))
try:
    quieter.load_state_dict(state)
    quieter.step(next(iter(quieter.loader)))
    told["resumed"] = f"counted {quieter.plan.mechanism.trials} trials, and the sum had {quieter.sum_plan.trials}"
except bqsgd.InvalidParameter as refusal:
    told["resumed"] = f"refused: {refusal}"
quieter.close()

exact = make("exact", 64, mechanism=bqsgd.Mechanism(levels=1000, trials=0), seed=rank)
exact.backward(next(iter(exact.loader)))
told["gradient"] = torch.cat([p.grad.flatten() for p in exact.model.parameters()]).tolist()
part = make("part", 64, mechanism=bqsgd.Mechanism(levels=1000, trials=0), seed=rank, one_in=2)
part.backward(next(iter(part.loader)))
told["part"] = torch.cat([p.grad.flatten() for p in part.model.parameters()]).tolist()
alone = make("alone", 64, mechanism=bqsgd.Mechanism(levels=1000, trials=0), seed=rank)
outputs = loss(alone.model(x), y)
parts = [torch.autograd.grad(each, list(alone.model.parameters()), retain_graph=True) for each in outputs]
rows = torch.stack([torch.cat([part.flatten() for part in own]) for own in parts])
scale = torch.clamp(1 / rows.norm(dim=1), max=1)
told["own"] = ((rows * scale[:, None]).sum(0) / 64).tolist()

short = make("short", 16, mechanism=bqsgd.Mechanism(levels=4, trials=60), epsilon=(8.0, 0.5, 8.0)[rank], epochs=400)
try:
    while True:
        for batch in short.loader:
            short.step(batch)
except (bqsgd.BudgetExhausted, SecureSumError) as reason:
    told["ended"] = f"{type(reason).__name__}: {reason}"
told["taken"] = short.model.weight.tolist()
print("TOLD " + json.dumps(told))
