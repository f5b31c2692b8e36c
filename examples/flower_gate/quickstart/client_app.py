"""What a node does in a round."""

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from quickstart import task

app = ClientApp()


@app.train()
def train(message: Message, context: Context):
    """Train the server's model on this node's data."""
    net = task.Net()
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    loader, _ = load(context)
    config = context.run_config
    loss = task.train(net, loader, config["local-epochs"], message.content["config"]["lr"])
    metrics = MetricRecord({"train_loss": loss, "num-examples": len(loader.dataset)})
    return Message(RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics}), reply_to=message)


@app.evaluate()
def evaluate(message: Message, context: Context):
    """Evaluate the server's model on this node's data."""
    net = task.Net()
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    _, loader = load(context)
    loss, accuracy = task.test(net, loader)
    metrics = {"eval_loss": loss, "eval_acc": accuracy, "num-examples": len(loader.dataset)}
    return Message(RecordDict({"metrics": MetricRecord(metrics)}), reply_to=message)


def load(context):
    """The data of this node."""
    node = context.node_config
    return task.load_data(node["partition-id"], node["num-partitions"], context.run_config["batch-size"])
