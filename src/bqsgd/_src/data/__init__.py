"""Data sets by name, checked by hash; features of them; and shares of them for clients."""

from bqsgd._src.data.dataset import DATASETS, Dataset, Split, load
from bqsgd._src.data.features import FEATURES, PUBLIC_DATA, compute_features, features_shape, whole_features
from bqsgd._src.data.shares import Shares, dirichlet, iid, load_shares, partition

__all__ = [
    "DATASETS",
    "FEATURES",
    "PUBLIC_DATA",
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
    "whole_features",
]
