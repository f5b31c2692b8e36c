"""Data sets to train on, checked by hash, and the ways to divide them among clients."""

from bqsgd.data.dataset import DATASETS, Dataset, Split, load
from bqsgd.data.features import FEATURES, PUBLIC_DATA, compute_features, features_shape, whole_features
from bqsgd.data.shares import Shares, dirichlet, iid, load_shares, partition

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
