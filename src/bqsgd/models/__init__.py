"""The models of the paper's experiments and two small ones, all without batch normalisation."""

from bqsgd.models.alexnet import AlexNet28, AlexNet227
from bqsgd.models.build import NAMES, build, default_for
from bqsgd.models.small import MLP, LeNet5, TanhCNN

__all__ = ["MLP", "NAMES", "AlexNet28", "AlexNet227", "LeNet5", "TanhCNN", "build", "default_for"]
