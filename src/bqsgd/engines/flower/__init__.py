"""Flower as an engine: a ClientApp, a ServerApp and a Strategy that carry frames and hold no algorithm.

    app = client_app(make_model=make_model, load_share=load_share)      # client_app.py of a Flower app
    app = server_app(make_model=make_model, load_test=load_test)        # server_app.py

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

from bqsgd.engines.flower.answering import client_app  # noqa: E402  (after the check above)
from bqsgd.engines.flower.place import Place  # noqa: E402
from bqsgd.engines.flower.serving import server_app  # noqa: E402
from bqsgd.engines.flower.strategy import FrameStrategy  # noqa: E402

__all__ = ["FrameStrategy", "MissingExtra", "Place", "client_app", "server_app"]
