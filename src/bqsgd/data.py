"""Public data sets to try things on: `load(name)` downloads one, checks its hash and keeps it on disk."""

from bqsgd._src.data.dataset import Dataset, load

__all__ = ["Dataset", "load"]
