"""The two configurations that Flower carries: a node's own, which no server can change, and the run's.

A node's configuration comes from `flower-supernode --node-config`:

    --node-config 'client=3 ledger-folder="/var/lib/bqsgd" epsilon=3.0 delta=1e-5'

In a simulation Flower sets `partition-id` instead. Simulated clients belong to the user who runs the simulation: they
agree to any settings, and every run has new ledgers. The server makes their identity keys for secure sums, beside those
ledgers; a real client has its own (`roster="..." identity="..."`).

A run's configuration is flat, with "" for an option that is not set: Flower lets `--run-config` change only keys that
exist.
"""

from __future__ import annotations

import logging
import os
import re
import tomllib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from bqsgd._src.client.files import client_ledger, made_register
from bqsgd._src.client.sums import made_identities
from bqsgd._src.engines.engine import FEW
from bqsgd._src.errors import InvalidParameter
from bqsgd._src.ledger import Ledger
from bqsgd._src.ledger.register import ledger_path, register_path
from bqsgd._src.params import check_int, short_repr
from bqsgd._src.secure.roster import public_key, read_identity, read_roster, write_identity
from bqsgd._src.server.aggregation import client_weights
from bqsgd._src.settings.client_plan import check_one_plan
from bqsgd._src.settings.config import Config
from bqsgd._src.settings.group import Group, setting
from bqsgd._src.settings.node_limits import NodeLimits
from bqsgd._src.storage import one_at_a_time, private_folder, write_atomic
from bqsgd._src.tasks.task import Task
from bqsgd._src.text import one_line

logger = logging.getLogger("flwr.bqsgd")
LEDGER_FOLDER_VARIABLE = "BQSGD_LEDGER_FOLDER"
_DEFAULT_FOLDER = "~/.bqsgd/ledgers"
MakeTask = Callable[[Config, "Node | None", Mapping[str, Any]], Task]
"""(settings, node, options) -> the task: a node's, with its share of the data, or, if node is None, the server's, with
test data and no share. options: the keys of the app's configuration that are not settings of the run."""
_MAX_BUDGETS = 1 << 16
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_ROSTER = "roster.toml"


@dataclass(frozen=True, kw_only=True)
class Node:
    """One client as its operator set it up.

    limits: what it agrees to. options: the whole node configuration, for keys of your own.
    """

    client: int
    ledger_folder: Path
    simulated: bool
    limits: NodeLimits
    options: Mapping[str, Any]

    @classmethod
    def of(cls, node_config: Mapping[str, Any]) -> Node:
        """Read the node configuration."""
        # Only the operator of the node can write this configuration. A server cannot turn a real client, which has
        # limits, into a simulated one, which has none.
        simulated = "client" not in node_config
        number = node_config.get("partition-id" if simulated else "client")
        if number is None:
            raise InvalidParameter(
                "the node configuration has no client number: start the SuperNode with --node-config 'client=N ...'"
            )
        limits = NodeLimits.unlimited() if simulated else NodeLimits.of(node_config)
        folder = limits.ledger_folder
        return cls(
            client=check_int("client", number, 0, 2**63 - 1),
            ledger_folder=_usual_folder() if folder is None else folder.resolve(),
            simulated=simulated,
            limits=limits,
            options=dict(node_config),
        )

    def refusal(self, config: Config, *, run: str, roster: str | None) -> str | None:
        """Why this client does not take part in the run, or None; `roster` is the digest of the server's roster."""
        refusal = self.limits.refusal(config, client=self.client)
        if refusal is not None or not config.secure.on:
            return refusal
        # `SumSetup` and `SumClient` check the keys again. Here the server is told the reason, and no data are loaded.
        roster_file, identity_file = self._key_files(run=run)
        if roster_file is None or identity_file is None:
            return "the run has secure sums, and this node has no roster or no identity key (roster, identity)"
        try:
            trusted, key = read_roster(roster_file), public_key(read_identity(identity_file))
        except InvalidParameter as error:
            logger.error("%s", one_line(error))
            return "this node cannot read its roster or its identity key; its own log says why"
        if trusted.digest.hex() != roster:
            return (
                f"this node's roster has the digest {trusted.digest.hex()}, the server's {short_repr(roster)}: all "
                "clients and the server need the same roster, and a run keeps the one it began with"
            )
        if trusted.clients != tuple(range(config.clients.count)):
            return f"the roster names {len(trusted.clients)} clients, the run has 0 to {config.clients.count - 1}"
        if trusted.keys[self.client] != key:
            return f"the roster has another key for client {self.client} than this node's identity"
        return None

    def _key_files(self, *, run: str) -> tuple[str | None, str | None]:
        """(roster, identity) of this client; None for what its operator has not set."""
        if self.simulated:
            folder = self.folder(run=run)
            return str(folder / _ROSTER), str(identity_path(folder, self.client))
        paths = (self.options.get("roster"), self.options.get("identity"))
        roster, identity = (None if path is None else str(Path(str(path)).expanduser()) for path in paths)
        return roster, identity

    def own_settings(self, config: Config, *, run: str) -> Config:
        """The run's settings with those that each client decides for itself."""
        # The server must not decide which key belongs to which client, so roster and identity are the node's own files.
        roster, identity = self._key_files(run=run) if config.secure.on else (None, None)
        # A reservation would not outlive this process, which answers one message.
        return config.but(reserve_rounds=1, roster=roster, identity=identity, roster_digest=None)

    def folder(self, *, run: str) -> Path:
        """Where its ledger is. A real client's ledger continues from run to run; a simulated one's holds one run."""
        return self.ledger_folder / _simulated(run) if self.simulated else self.ledger_folder

    def turn(self, *, run: str) -> AbstractContextManager[None]:
        """A lock: no two processes of this client answer at once. Flower starts one for every message that arrives."""
        folder = self.folder(run=run)
        private_folder(folder)
        return one_at_a_time(folder / f"client-{self.client:04}.turn")

    def private_path(self, *, run: str) -> Path:
        """Where its private metrics go, beside its ledger."""
        return self.folder(run=run) / f"client-{self.client:04}.private.jsonl"

    def ledger(self, config: Config, *, run: str) -> Ledger | None:
        """This client's ledger, made on first use; None if the messages have no noise, so that there is no claim."""
        folder = self.folder(run=run)
        if self.simulated and config.clients.count > FEW and not config.privacy.noiseless:
            path = register_path(folder)
            made_register(config, path).close()  # the first of the clients that get here makes it
            return Ledger(path, client=self.client)
        exists = ledger_path(folder, self.client).exists()
        limits = replace(self.limits, ledger_folder=folder)
        return client_ledger(config, None, number=self.client, resuming=exists, limits=limits)


def with_simulated_keys(config: Config) -> Config:
    """The server's settings of a named run; with secure sums and no roster, they get a roster of keys made here.

    The clients of a simulation look for their keys in the same place. A real client does not trust such a key.
    """
    if not config.secure.on or config.secure.roster is not None:
        return config
    folder = _usual_folder() / _simulated(check_name(config.run.name))
    roster = folder / _ROSTER
    return config.but(roster=str(roster if roster.exists() else write_identities(config, folder)))


def write_identities(config: Config, folder: Path) -> Path:
    """Make identity keys for all clients of a run, and their roster; returns the roster's path."""
    private_folder(folder)
    identities, roster = made_identities(config)
    for client, identity in identities.items():
        identity_path(folder, client).unlink(missing_ok=True)  # left by a server that was stopped here
        write_identity(identity_path(folder, client), identity)
    # Last: whoever finds the roster finds all of its keys.
    write_atomic(folder / _ROSTER, roster.to_toml().encode())
    return folder / _ROSTER


def identity_path(folder: Path, client: int) -> Path:
    """The file in which `write_identities` puts a client's key."""
    return folder / f"client-{client:04}.key"


def _simulated(run: str) -> str:
    return f"simulated-{run}"


def _usual_folder() -> Path:
    """The folder of ledgers, unless a node's configuration names one."""
    return Path(os.environ.get(LEDGER_FOLDER_VARIABLE, _DEFAULT_FOLDER)).expanduser().resolve()


@dataclass(frozen=True, kw_only=True)
class Service(Group):
    """What the server needs besides the run's settings."""

    folder: Path | None = setting(  # noqa: RUF009 (it makes a field)
        None, "On the server's disk, for the checkpoint and the records. Default: keep nothing."
    )
    join_seconds: float = setting(300.0, "Wait this long for all clients, then begin with some.", positive=True)
    round_seconds: float = setting(3600.0, "A round waits this long for replies if it has no deadline.", positive=True)
    force: bool = setting(False, "Begin even if the plans say that nothing can be learnt.")


def read_settings(run_config: Mapping[str, Any]) -> tuple[Config, Service, dict[str, Any]]:
    """The run's settings, the server's own, and the options that are left for the app's task.

    Raises:
        InvalidParameter: a setting has an invalid value; the message names the setting, the value and the valid ones.
    """
    options = {name: value for name, value in run_config.items() if value != ""}
    if "optimiser" in options:  # the spelling of apps that earlier versions made
        options["optimizer"] = options.pop("optimiser")
    if "budgets" in options:
        options["budgets"] = _read_budgets(options["budgets"])
    if "folder" in options:
        options["folder"] = Path(str(options["folder"])).expanduser()
    service = Service(**{name: options.pop(name) for name in Service.settings() if name in options})
    config = Config.of(**{name: options.pop(name) for name in Config().flat() if name in options})
    if config.run.name is not None:
        check_name(config.run.name)
    return config, service, options


def _read_budgets(text: object) -> list[Any]:
    """Budgets that differ by client or round, as Flower's flat configuration carries them: a TOML list of tables.

    >>> _read_budgets('[{client = 2, epsilon = 1.0}]')
    [{'client': 2, 'epsilon': 1.0}]
    """
    try:
        # One line: a second line could set other keys.
        if not isinstance(text, str) or len(text) > _MAX_BUDGETS or "\n" in text:
            raise ValueError
        budgets = tomllib.loads(f"budgets = {text}")["budgets"]
    except (ValueError, RecursionError):  # tomllib's own error is a ValueError; deep nesting raises RecursionError
        budgets = None
    if not isinstance(budgets, list) or not all(isinstance(change, dict) for change in budgets):
        raise InvalidParameter(
            "budgets must be a list of tables on one line, such as '[{client = 2, epsilon = 1.0}, "
            f"{{client = 2, from_round = 300, epsilon = 1.5}}]', got {short_repr(text)}"
        )
    return budgets


def check_overrides(app: Path, run_config: str) -> None:
    """Check what `--run-config` changes in the configuration of an app's pyproject.toml, as Flower reads both.

    Raises:
        InvalidParameter: Flower or the run would refuse it. The message names the key, the value and the valid ones.
    """
    from flwr.common.config import flatten_dict, get_project_config, parse_config_args

    try:
        configuration = flatten_dict(get_project_config(app)["tool"]["flwr"]["app"].get("config", {}))
        overrides = parse_config_args([run_config] if run_config else None)
    except (OSError, KeyError, ValueError, SystemExit) as error:  # Flower's readers may call sys.exit
        raise InvalidParameter(
            f"{app} and {run_config!r} cannot be read as a Flower app and settings: {error}"
        ) from error
    # Flower ignores words that are not key=value, and the run would keep the app's own epsilon.
    passed_over = " ".join(re.sub(r"""\S+?=('[^']*'|"[^"]*"|\S+)""", " ", run_config).split())
    if passed_over and not run_config.endswith(".toml"):
        raise InvalidParameter(
            f"--run-config must be key=value pairs without blanks around '=', such as 'rounds=20 epsilon=2.0'; "
            f"Flower would ignore {short_repr(passed_over)}"
        )
    for key in overrides:
        if key not in configuration:
            near = get_close_matches(key, configuration, n=1)
            raise InvalidParameter(
                f"{short_repr(key)} is not in the app's configuration"
                + (f"; did you mean {near[0]!r}? " if near else "; ")
                + f"Known: {', '.join(configuration)}"
            )
    config, _, _ = read_settings({**configuration, **overrides})
    # What the server would refuse only after all clients have joined.
    check_one_plan(config)
    sizes: dict[int, int] | None = None if config.server.sizes is None else {}
    client_weights(config.server.weights, {}, claimed=True, sizes=sizes)


def check_name(run: object) -> str:
    """The name of a run, if it is safe: it is part of file names on the clients, so no path may hide in it."""
    if not isinstance(run, str) or not _NAME.fullmatch(run):
        raise InvalidParameter(
            f"run must be 1 to 100 of A-Z a-z 0-9 . _ - and begin with a letter or digit, got {run!r}"
        )
    return run
