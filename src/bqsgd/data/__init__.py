"""Data sets to train on, checked by hash, and the ways to divide them among clients."""

from bqsgd.data.dataset import DATASETS, Dataset, Split, load
from bqsgd.data.features import FEATURES, compute_features, features_shape
from bqsgd.data.shares import Shares, dirichlet, iid, load_shares, partition

__all__ = [
    "DATASETS",
    "FEATURES",
    "Dataset",
    "Shares",
    "Split",
    "compute_features",
    "dirichlet",
    "features_shape",
    "iid",
    "load",
    "load_shares",
    "partition",
]
