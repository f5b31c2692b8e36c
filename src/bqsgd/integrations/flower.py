"""A privacy budget for an existing Flower app: mods for its ClientApp, a wrapper for its strategy.

Needs the extra: pip install 'bqsgd[flower]'.
"""

from bqsgd._src.integrations.flower import OpenUpdates, PrivateUpdates, ThinUpdates
from bqsgd._src.integrations.flower_accountant import SiteAccountant
from bqsgd._src.integrations.flower_sums import OpenSums, SummedUpdates

__all__ = ["OpenSums", "OpenUpdates", "PrivateUpdates", "SiteAccountant", "SummedUpdates", "ThinUpdates"]
