"""Flower's quickstart shape for the tests: an app, nodes with ledgers, and a run over real Flower messages."""

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from torch import nn

import bqsgd
from bqsgd.integrations.flower import OpenUpdates
from loop_grid import LoopGrid

GATE = {"study": "trial-7", "rounds": 2, "epsilon": 50.0, "delta": 1e-5, "clip_norm": 1.0}
SECRET = "patient 17 has"


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2))


def app_of(*mods, moved=0.1, fails=None):
    """A ClientApp as in Flower's quickstarts: it loads the state, changes it and returns state and metrics."""
    app = ClientApp(mods=list(mods))

    @app.train()
    def train(message, context):
        if fails is not None:
            raise fails
        net = model()
        net.load_state_dict(message.content["arrays"].to_torch_state_dict())
        with torch.no_grad():
            for parameter in net.parameters():
                parameter += moved
        net[1].num_batches_tracked += 17
        metrics = MetricRecord({"train_loss": 0.123, "num-examples": 512})
        extra = ConfigRecord({"note": SECRET})
        return Message(
            RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics, "extra": extra}), reply_to=message
        )

    @app.evaluate()
    def evaluate(message, context):
        return Message(RecordDict({"metrics": MetricRecord({"eval_acc": 0.5, "num-examples": 512})}), reply_to=message)

    return app


def two_nodes(folder):
    return [
        {"client": n, "ledger-folder": str(folder / f"site-{n}"), "epsilon": 60.0, "units": "client"} for n in (0, 1)
    ]


def run(app, nodes, rounds, *, largest=10.0, evaluated=0.0, tamper=None, strategy=None, accountant=None):
    grid = LoopGrid(app, {}, nodes, tamper)
    inner = FedAvg(fraction_evaluate=evaluated, min_available_nodes=2) if strategy is None else strategy
    start = ArrayRecord(model().state_dict())
    result = OpenUpdates(inner, largest_range=largest, accountant=accountant).start(
        grid, start, num_rounds=rounds, timeout=60
    )
    return grid, result


def spent(nodes):
    counted = []
    for node in nodes:
        with bqsgd.Ledger(f"{node['ledger-folder']}/client-{node['client']:04}.ledger") as ledger:
            counted.append((ledger.spent_rounds, ledger.guarantee()))
    return counted
