"""Data sets to train on, checked by hash, and the ways to share them among clients."""

from bqsgd.data.dataset import Dataset, Split
from bqsgd.data.front_end import FRONT_ENDS, output_shape, through
from bqsgd.data.loading import NAMES, load
from bqsgd.data.partition import dirichlet, iid, partition
from bqsgd.data.shared import Shared, shared

__all__ = [
    "FRONT_ENDS",
    "NAMES",
    "Dataset",
    "Shared",
    "Split",
    "dirichlet",
    "iid",
    "load",
    "output_shape",
    "partition",
    "shared",
    "through",
]
