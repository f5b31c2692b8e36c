"""A privacy budget for NVFlare jobs: filters for a site's own policy and for the server. Needs nvflare 2.9."""

from bqsgd._src.integrations.nvflare import OpenUpdatesFilter, PrivateUpdatesFilter, ThinUpdatesFilter

__all__ = ["OpenUpdatesFilter", "PrivateUpdatesFilter", "ThinUpdatesFilter"]
