"""A model by name, initialised from a seed."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from bqsgd.errors import InvalidParameter
from bqsgd.models.alexnet import AlexNet28, AlexNet227
from bqsgd.models.small import MLP, LeNet5, Linear, TanhCNN
from bqsgd.params import check_int

_FIXED: dict[str, tuple[Callable[..., nn.Module], tuple[int, ...]]] = {
    "lenet5": (LeNet5, (1, 28, 28)),
    "cnn": (TanhCNN, (1, 28, 28)),
    "alexnet28": (AlexNet28, (1, 28, 28)),
    "alexnet227": (AlexNet227, (3, 227, 227)),
}
NAMES = (*_FIXED, "mlp", "linear")


def build(name: str, *, input_shape: tuple[int, ...], classes: int, seed: int, activation: str = "tanh") -> nn.Module:
    """The model `name` for these inputs, with PyTorch's default initialisation drawn from `seed`.

    The initial model is public (every client receives it), so its seed has no part in a privacy claim. The global
    generator is left as it was.
    """
    check_int("classes", classes, 2, 2**20)
    check_int("seed", seed, 0, 2**63 - 1)
    if name not in NAMES:
        raise InvalidParameter(f"model must be one of {', '.join(NAMES)}, got {name!r}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if name == "mlp":
            return MLP(input_shape=input_shape, classes=classes, activation=activation)
        if name == "linear":
            return Linear(input_shape=input_shape, classes=classes)
        make, shape = _FIXED[name]
        if input_shape != shape:
            raise InvalidParameter(
                f"model {name} takes inputs of shape {shape}, the data has {input_shape}; try mlp or linear"
            )
        return make(classes=classes, activation=activation)


def default_for(input_shape: tuple[int, ...], *, front_end: str = "none") -> str:
    """The model a run takes when none is named: the small CNN for 28 x 28 images, the linear one behind a front end,
    the MLP for anything else."""
    if front_end != "none":
        return "linear"
    return "cnn" if input_shape == (1, 28, 28) else "mlp"
