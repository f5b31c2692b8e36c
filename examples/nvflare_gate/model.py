"""The model of the job, and its data: scikit-learn's digits, shared out over the sites."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

TEST_SAMPLES = 360


class Net(nn.Linear):
    """Digits of 8 x 8 pixels."""

    def __init__(self):
        super().__init__(64, 10)


def load_data(site=None):
    """The training data of site-1 or site-2, or the test data, on which no site trains."""
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    x, y = torch.tensor(digits.data / 16, dtype=torch.float32)[order], torch.tensor(digits.target)[order]
    part = slice(TEST_SAMPLES) if site is None else slice(TEST_SAMPLES + int(site.split("-")[-1]) - 1, None, 2)
    return TensorDataset(x[part], y[part])


def accuracy(net, data):
    """The fraction that is classified correctly."""
    x, y = data.tensors
    return (net(x).argmax(1) == y).float().mean().item()
