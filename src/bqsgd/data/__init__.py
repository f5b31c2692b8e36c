"""Data sets to train on, checked by hash, and the ways to share them among clients."""

from bqsgd.data.dataset import Dataset, Split
from bqsgd.data.loading import NAMES, load
from bqsgd.data.partition import dirichlet, iid, partition

__all__ = ["NAMES", "Dataset", "Split", "dirichlet", "iid", "load", "partition"]
