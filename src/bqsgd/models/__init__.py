"""The models of the paper's experiments and three small ones, all without batch normalisation."""

from bqsgd.models.alexnet import AlexNet28, AlexNet227
from bqsgd.models.build import NAMES, build, default_for
from bqsgd.models.small import MLP, LeNet5, Linear, TanhCNN

__all__ = ["MLP", "NAMES", "AlexNet28", "AlexNet227", "LeNet5", "Linear", "TanhCNN", "build", "default_for"]
