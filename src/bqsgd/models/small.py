"""LeNet-5, a small tanh CNN, an MLP and a linear model. Batch normalisation is left out everywhere: it mixes the
samples of a batch, so no per-sample clip could bound what one sample changes."""

from __future__ import annotations

import math
from itertools import pairwise

from torch import nn

from bqsgd.errors import InvalidParameter
from bqsgd.params import check_int

ACTIVATIONS: dict[str, type[nn.Module]] = {"tanh": nn.Tanh, "relu": nn.ReLU}


def activation_of(name: str) -> type[nn.Module]:
    """The activation layer called `name`; tanh is bounded and learns under noise, ReLU is there to compare."""
    if name not in ACTIVATIONS:
        raise InvalidParameter(f"activation must be one of {', '.join(ACTIVATIONS)}, got {name!r}")
    return ACTIVATIONS[name]


class LeNet5(nn.Sequential):
    """LeNet-5 for (1, 28, 28) inputs: two convolutions, three dense layers, 61,706 parameters with ten classes."""

    def __init__(self, *, classes: int = 10, activation: str = "tanh") -> None:
        act = activation_of(activation)
        super().__init__(
            nn.Conv2d(1, 6, 5, padding=2),
            act(),
            nn.AvgPool2d(2),
            nn.Conv2d(6, 16, 5),
            act(),
            nn.AvgPool2d(2),
            nn.Flatten(),
            nn.Linear(400, 120),
            act(),
            nn.Linear(120, 84),
            act(),
            nn.Linear(84, classes),
        )


class TanhCNN(nn.Sequential):
    """The small CNN of DP-SGD tutorials, tanh: two strided convolutions with overlapping max-pooling, one hidden layer
    of 32; 26,010 parameters for (1, 28, 28) inputs and ten classes."""

    def __init__(self, *, classes: int = 10, activation: str = "tanh") -> None:
        act = activation_of(activation)
        super().__init__(
            nn.Conv2d(1, 16, 8, stride=2, padding=3),
            act(),
            nn.MaxPool2d(2, stride=1),
            nn.Conv2d(16, 32, 4, stride=2),
            act(),
            nn.MaxPool2d(2, stride=1),
            nn.Flatten(),
            nn.Linear(512, 32),
            act(),
            nn.Linear(32, classes),
        )


class MLP(nn.Sequential):
    """Dense layers of the given widths over the flattened input."""

    def __init__(
        self,
        *,
        input_shape: tuple[int, ...],
        classes: int = 10,
        hidden: tuple[int, ...] = (64,),
        activation: str = "tanh",
    ) -> None:
        act = activation_of(activation)
        widths = [math.prod(input_shape), *hidden]
        for width in widths:
            check_int("width", width, 1, 2**31)
        layers: list[nn.Module] = [nn.Flatten()]
        for before, after in pairwise(widths):
            layers += [nn.Linear(before, after), act()]
        super().__init__(*layers, nn.Linear(widths[-1], classes))


class Linear(nn.Sequential):
    """One dense layer over the flattened input, begun at zero: the loss is convex, so there is no symmetry to break,
    and a random start would only be noise to unlearn. 39,700 parameters for scattering features of 28 x 28 images."""

    def __init__(self, *, input_shape: tuple[int, ...], classes: int = 10) -> None:
        super().__init__(nn.Flatten(), nn.Linear(check_int("width", math.prod(input_shape), 1, 2**31), classes))
        for parameter in self.parameters():
            nn.init.zeros_(parameter)
