"""Flower's SuperLink, with a line in its log for every connection that fails the TLS handshake.

Flower's web server closes such a connection without a word, so plain HTTP to the TLS port, or a client that does not
trust the certificate, would leave no trace on the server. `bqsgd flower superlink` takes the options of
`flower-superlink` and is the same program otherwise.
"""

from __future__ import annotations

import logging
import ssl
import sys
from collections.abc import Sequence

logger = logging.getLogger("flwr.bqsgd")


class LoggedHandshake(ssl.SSLObject):
    """A TLS connection that says why its handshake failed. Who called is not known at this depth."""

    def do_handshake(self) -> None:
        """As the class above, with a warning before the error goes on."""
        try:
            super().do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise  # not failed, only not finished
        except ssl.SSLError as error:
            if self.server_side:
                logger.warning("%s", line_for(error))
            raise


def line_for(error: ssl.SSLError) -> str:
    """What the log says of a failed handshake."""
    if error.reason == "HTTP_REQUEST":
        return "refused at the TLS port: plain HTTP; nothing of it was read"
    return f"refused at the TLS port: the handshake failed ({error.reason or type(error).__name__})"


def superlink(options: Sequence[str]) -> None:
    """Be `flower-superlink` with these options until it is stopped."""
    from flwr.superlink.cli import flower_superlink

    ssl.SSLContext.sslobject_class = LoggedHandshake  # the standard library's own place for this
    sys.argv = ["flower-superlink", *options]
    flower_superlink()
