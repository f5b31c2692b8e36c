"""The Flower engine, its messages, and the apps of client and server; users import them from `bqsgd.flower`."""

from bqsgd._src.errors import BqsgdError


class MissingExtra(BqsgdError, ImportError):
    """Flower is not installed."""


try:
    import flwr.app  # noqa: F401
except ImportError as error:
    raise MissingExtra(
        f"the Flower engine needs the extra `flower`: pip install 'bqsgd[flower]' ({error}); "
        "every other engine works without it"
    ) from error

from bqsgd._src.flower.client_app import client_app  # noqa: E402  (after the check above)
from bqsgd._src.flower.server_app import server_app  # noqa: E402
from bqsgd._src.flower.settings import Node  # noqa: E402

__all__ = ["MissingExtra", "Node", "client_app", "server_app"]
