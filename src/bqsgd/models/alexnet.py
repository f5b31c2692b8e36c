"""AlexNet for 28 x 28 images, and the original for 227 x 227."""

from __future__ import annotations

from torch import nn

from bqsgd.models.small import activation_of


class AlexNet28(nn.Sequential):
    """AlexNet's five convolutions and three dense layers, narrowed for (1, 28, 28): 1,158,010 parameters, ten classes.

    The widths keep a round of 4 x 32 samples with per-sample clipping within a few tenths of a second on two cores.
    The paper does not say how it fitted AlexNet to 28 x 28 images. No dropout and no response normalisation.
    """

    def __init__(self, *, classes: int = 10, activation: str = "tanh") -> None:
        act = activation_of(activation)
        super().__init__(
            nn.Conv2d(1, 16, 5, padding=2),
            act(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 5, padding=2),
            act(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1),
            act(),
            nn.Conv2d(64, 64, 3, padding=1),
            act(),
            nn.Conv2d(64, 48, 3, padding=1),
            act(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(432, 832),
            act(),
            nn.Linear(832, 832),
            act(),
            nn.Linear(832, classes),
        )


class AlexNet227(nn.Sequential):
    """The original AlexNet (Krizhevsky et al. 2012) for (3, 227, 227): 60,965,224 parameters with a thousand classes.

    Grouped convolutions and local response normalisation as published; dropout is left out, since its randomness
    would not be shared by the clients.
    """

    def __init__(self, *, classes: int = 1000, activation: str = "relu") -> None:
        act = activation_of(activation)
        super().__init__(
            nn.Conv2d(3, 96, 11, stride=4),
            act(),
            nn.LocalResponseNorm(5, alpha=1e-4, beta=0.75, k=2.0),
            nn.MaxPool2d(3, stride=2),
            nn.Conv2d(96, 256, 5, padding=2, groups=2),
            act(),
            nn.LocalResponseNorm(5, alpha=1e-4, beta=0.75, k=2.0),
            nn.MaxPool2d(3, stride=2),
            nn.Conv2d(256, 384, 3, padding=1),
            act(),
            nn.Conv2d(384, 384, 3, padding=1, groups=2),
            act(),
            nn.Conv2d(384, 256, 3, padding=1, groups=2),
            act(),
            nn.MaxPool2d(3, stride=2),
            nn.Flatten(),
            nn.Linear(9216, 4096),
            act(),
            nn.Linear(4096, 4096),
            act(),
            nn.Linear(4096, classes),
        )
