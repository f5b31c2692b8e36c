"""Who may ask a SuperLink for what: Flower serves all its interfaces on one port, and two of them ask nobody's name.

`/v1/fleet/` is for SuperNodes, and every request there is signed with a registered key. `/v1/control/` starts runs and
registers keys, and `/v1/runtime/` gives out tasks with their tokens, to whoever can connect. Behind the gate these two,
and every path that Flower may add, answer only callers on the same machine.

It decides by the two addresses of the connection, before any code of Flower sees the request. A request with a header
that proxies add counts as a stranger's, because a proxy on this machine connects from loopback for everybody.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network
from typing import Any

from bqsgd._src.errors import InvalidParameter
from bqsgd._src.text import one_line

logger = logging.getLogger("flwr.bqsgd")
_PUBLIC = re.compile(r"/v1/fleet/[a-z-]+|/health")
_OF_PROXIES = frozenset({b"forwarded", b"x-forwarded-for", b"x-forwarded-host", b"x-real-ip", b"via"})
_OLDER_SERVERS = ("FLWR_INTERNAL_GRPC_CONTROL_API", "FLWR_INTERNAL_GRPC_FLEET_API")
"""Variables that make flower-superlink serve the same interfaces over gRPC too, where no gate would be."""
_REFUSED = b"served to this machine only\n"

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Network = IPv4Network | IPv6Network


def networks_of(texts: Sequence[str]) -> tuple[Network, ...]:
    """Networks such as 10.8.0.0/24, or single addresses; raises InvalidParameter."""
    try:
        return tuple(ip_network(text) for text in texts)
    except ValueError as error:
        raise InvalidParameter(f"--control-from takes an address or a network such as 10.8.0.0/24: {error}") from error


class Gate:
    """An ASGI app that passes on what its caller may ask, and answers everything else with 403.

    Args:
        control_from: networks whose callers are treated like those of this machine.
    """

    def __init__(self, app: App, *, control_from: Sequence[Network] = ()) -> None:
        self._app, self._networks = app, tuple(control_from)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "lifespan" or self._is_public(scope) or self._is_trusted(scope):
            return await self._app(scope, receive, send)
        caller = scope["client"][0] if scope.get("client") else "an unknown address"
        logger.warning("refused %s from %s: served to this machine only", one_line(scope["path"]), one_line(caller))
        if scope["type"] == "http":
            await send({"type": "http.response.start", "status": 403, "headers": [(b"content-type", b"text/plain")]})
            await send({"type": "http.response.body", "body": _REFUSED})
        else:
            await send({"type": "websocket.close", "code": 1008})

    @staticmethod
    def _is_public(scope: Scope) -> bool:
        # The path as Flower's router sees it, decoded; whole, so that no ".." can lead on from it.
        return scope["type"] == "http" and _PUBLIC.fullmatch(scope["path"]) is not None

    def _is_trusted(self, scope: Scope) -> bool:
        if not scope.get("client") or any(name.lower() in _OF_PROXIES for name, _ in scope["headers"]):
            return False
        address = ip_address(scope["client"][0])
        address = getattr(address, "ipv4_mapped", None) or address
        # A caller of this machine may also dial its public address, as Flower's own children do with `--host ADDRESS`.
        # Nobody else can hold a connection from the address that it goes to.
        here = address.is_loopback or bool(scope.get("server") and scope["client"][0] == scope["server"][0])
        return here or any(address in network for network in self._networks)


def install_gate(control_from: Sequence[Network]) -> None:
    """Put a gate before every app that uvicorn serves in this process from now on; there is no way to remove it."""
    import uvicorn

    for name in _OLDER_SERVERS:
        os.environ.pop(name, None)
    load = uvicorn.Config.load

    def load_behind_gate(config: uvicorn.Config) -> None:
        load(config)
        # Outermost: uvicorn's own middleware would replace the caller's address by one that a header states.
        config.loaded_app = Gate(config.loaded_app, control_from=control_from)

    uvicorn.Config.load = load_behind_gate  # type: ignore[method-assign, assignment]
