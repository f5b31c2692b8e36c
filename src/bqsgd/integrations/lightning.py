"""Private training inside Lightning's Trainer: a callback. Needs the extra: pip install 'bqsgd[lightning]'."""

from bqsgd._src.integrations.lightning import PrivateTraining

__all__ = ["PrivateTraining"]
