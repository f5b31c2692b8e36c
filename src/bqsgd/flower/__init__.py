"""Private clients on Flower: a ClientApp and a ServerApp that carry frames.

    app = client_app(task)      # client_app.py of a Flower app
    app = server_app(task)      # server_app.py

`bqsgd flower init DIR` writes such an app. Needs the extra: pip install 'bqsgd[flower]'.
"""

from bqsgd.errors import BqsgdError


class MissingExtra(BqsgdError, ImportError):
    """Flower is not installed."""


try:
    import flwr.app  # noqa: F401
except ImportError as error:
    raise MissingExtra(
        f"the Flower engine needs the extra `flower`: pip install 'bqsgd[flower]' ({error}); "
        "every other engine works without it"
    ) from error

from bqsgd.flower.client_app import client_app  # noqa: E402  (after the check above)
from bqsgd.flower.server_app import server_app  # noqa: E402
from bqsgd.flower.settings import Node  # noqa: E402

__all__ = ["MissingExtra", "Node", "client_app", "server_app"]
