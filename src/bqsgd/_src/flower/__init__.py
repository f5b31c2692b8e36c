"""The Flower engine, its messages, and the apps of client and server; users import them from `bqsgd.flower`.

Importing any module of this package checks first that Flower is installed.
"""

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
