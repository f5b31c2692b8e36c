"""A privacy budget for an existing Flower app: mods for its ClientApp, a wrapper for its strategy.

Needs the extra: pip install 'bqsgd[flower]'.
"""

from bqsgd._src.integrations.flower import OpenUpdates, PrivateUpdates, ThinUpdates

__all__ = ["OpenUpdates", "PrivateUpdates", "ThinUpdates"]
