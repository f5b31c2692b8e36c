"""The tiny task for the tests of this folder."""

from tiny_task import make_client, settings

__all__ = ["make_client", "settings"]
