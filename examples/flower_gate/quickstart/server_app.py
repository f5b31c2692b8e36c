"""What the server does: FedAvg, and a look at the accuracy after every round."""

from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from quickstart import task

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context):
    """Run all rounds."""
    config = context.run_config
    strategy = FedAvg(fraction_evaluate=config["fraction-evaluate"])
    strategy.start(
        grid,
        ArrayRecord(task.Net().state_dict()),
        num_rounds=config["num-server-rounds"],
        train_config=ConfigRecord({"lr": config["learning-rate"]}),
        evaluate_fn=evaluate,
    )


def evaluate(server_round, arrays):
    """Accuracy on data that no node trains on."""
    net = task.Net()
    net.load_state_dict(arrays.to_torch_state_dict())
    loss, accuracy = task.test(net, task.load_test_data())
    return MetricRecord({"loss": loss, "accuracy": accuracy})
