"""A gate that the node sets, in front of any app: `bqsgd flower supernode` with `gate-...` in its configuration.

    --node-config 'client=0 units="client" epsilon=10.0 ledger-folder="/var/lib/bqsgd" gate-study="trial-7"
                   gate-rounds=20 gate-epsilon=8.0 gate-delta=1e-5 gate-clip-norm=1.0'

A mod is a part of the app, and Flower runs the app that a server sends. Here the node's own process puts the mod
around whatever app it loads, so an app that leaves it out, or has others, changes nothing. The app is loaded inside the
gate: an error while it is imported is an update of zeros, like any other error of its training.

Code of the app still runs in this process, and could undo this or use the network: that only trusted apps prevent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flwr.app import Context, Message
from flwr.supercore.superexec.executor.types import ExecutionSpec

from bqsgd._src.errors import InvalidParameter
from bqsgd._src.flower import supernode as program
from bqsgd._src.integrations.flower import PrivateUpdates, declining
from bqsgd._src.params import short_repr

_PREFIX = "gate"
_NEEDED = ("study", "rounds", "epsilon", "delta", "clip-norm")
_KEYS = {f"{_PREFIX}-{name}": name.replace("-", "_") for name in (*_NEEDED, "bits")}
_Load = Callable[[str, str, str], Callable[..., Message]]


def gate_of(node_config: Mapping[str, Any]) -> PrivateUpdates | None:
    """The gate that a node's configuration asks for; None if it has no key that begins with `gate`.

    Raises:
        InvalidParameter: a key is unknown or missing, or a value is invalid. Nothing may leave then.
    """
    asked = {key: value for key, value in node_config.items() if str(key).lower().startswith(_PREFIX)}
    if not asked:
        return None
    for key in asked:
        if key not in _KEYS:
            raise InvalidParameter(f"{short_repr(key)} is not a setting of the gate; known: {', '.join(_KEYS)}")
    missing = [f"{_PREFIX}-{name}" for name in _NEEDED if f"{_PREFIX}-{name}" not in asked]
    if missing:
        raise InvalidParameter(f"the node's gate needs {', '.join(missing)}")
    return PrivateUpdates(**{_KEYS[key]: value for key, value in asked.items()})


def gated(load: _Load) -> _Load:
    """A loader of apps that puts the node's gate around every app it loads."""

    def load_gated(*names: str) -> Callable[..., Message]:
        def app(message: Message, context: Context) -> Message:
            with declining(message) as answer:
                gate = gate_of(context.node_config)
            if answer:
                return answer[0]
            if gate is None:
                return load(*names)(message, context)
            return gate(message, context, lambda asked, held: load(*names)(asked, held))

        return app

    return load_gated


def answer_gated(spec: ExecutionSpec) -> None:
    """Answer one message behind the node's gate, in a process of its own."""
    from flwr.supernode.runtime import run_clientapp

    module: Any = run_clientapp
    chosen = module.get_load_client_app_fn
    module.get_load_client_app_fn = lambda *given, **named: gated(chosen(*given, **named))
    program.answer(spec)


def gated_superexec(options: Sequence[str]) -> None:
    """Run `flower-superexec` with these options; its client apps answer behind the node's gate."""
    program.superexec(options, answer=answer_gated)


def gated_supernode(options: Sequence[str]) -> None:
    """Run `flower-supernode` with these options, in this process, until it is stopped.

    Raises:
        InvalidParameter: the node's gate was asked for, and its apps would be started by another program.
    """
    if any(f"{_PREFIX}-" in option for option in options) and any("process" in option for option in options):
        raise InvalidParameter(
            "with --isolation process another program starts the apps, without this node's gate: leave it out"
        )
    program.supernode(options, start=gated_superexec)
