"""Model, data and training, as in any PyTorch project."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

TEST_SAMPLES = 360


class Net(nn.Linear):
    """Digits of 8 x 8 pixels."""

    def __init__(self):
        super().__init__(64, 10)


def _digits():
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    return torch.tensor(digits.data / 16, dtype=torch.float32)[order], torch.tensor(digits.target)[order]


def load_data(partition_id, num_partitions, batch_size):
    """The training data of one node, and its data for evaluation."""
    x, y = (values[TEST_SAMPLES:][partition_id::num_partitions] for values in _digits())
    split = len(x) * 4 // 5
    train = DataLoader(TensorDataset(x[:split], y[:split]), batch_size=batch_size, shuffle=True)
    return train, DataLoader(TensorDataset(x[split:], y[split:]), batch_size=batch_size)


def load_test_data():
    """What the server evaluates on."""
    return DataLoader(TensorDataset(*(values[:TEST_SAMPLES] for values in _digits())), batch_size=TEST_SAMPLES)


def train(net, loader, epochs, lr):
    """Train, and return the mean loss."""
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    loss_fn, total = nn.CrossEntropyLoss(), 0.0
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            loss = loss_fn(net(x), y)
            loss.backward()
            optimizer.step()
            total += loss.item()
    return total / (epochs * len(loader))


def test(net, loader):
    """Mean loss and accuracy."""
    loss, right = 0.0, 0
    with torch.no_grad():
        for x, y in loader:
            outputs = net(x)
            loss += nn.functional.cross_entropy(outputs, y, reduction="sum").item()
            right += (outputs.argmax(1) == y).sum().item()
    return loss / len(loader.dataset), right / len(loader.dataset)
