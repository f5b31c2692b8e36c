"""Flower's simulation runs on Ray, which listens on all interfaces and runs whatever it is sent. Not here.

Ray reads both from its environment: that the machine is not part of a cluster, so that every one of its processes
listens on 127.0.0.1, and a token without which nobody is heard.
"""

from __future__ import annotations

import os
import secrets

RAY_FOLDER_VARIABLE = "RAY_TMPDIR"
_CLUSTER, _MODE, _TOKEN = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN"


def ray_on_loopback() -> dict[str, str]:
    """Environment variables for a Ray of one's own: loopback only, and a token that was drawn just now."""
    return {_CLUSTER: "0", _MODE: "token", _TOKEN: secrets.token_hex(32)}


def keep_ray_on_loopback() -> None:
    """Set them for this process, unless its user has decided about Ray: named a cluster or a mode of authentication.

    Ray reads its environment when it is imported, which Flower does after it has loaded the app.
    """
    if not os.environ.keys() & {"RAY_ADDRESS", _CLUSTER, _MODE, _TOKEN}:
        os.environ.update(ray_on_loopback())
