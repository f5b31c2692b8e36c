"""A whole Flower federation on one machine: SuperLink and SuperNodes as processes, or a simulation."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bqsgd.engines.flower.credentials import Certificates, make_certificates, make_node_key
from bqsgd.engines.flower.processes import Processes, free_port

_START_SECONDS = 90.0
_CONNECTION = "one-machine"


@dataclass(kw_only=True)
class OneMachine:
    """A federation in `folder`: certificates, keys, the nodes' ledgers, logs. Loopback only."""

    folder: Path
    processes: Processes
    certificates: Certificates | None = None
    simulation: bool = False
    port: int = field(default_factory=free_port)

    @property
    def address(self) -> str:
        """Where the SuperLink listens."""
        return f"127.0.0.1:{self.port}"

    def start_superlink(self) -> None:
        """Start the SuperLink; with certificates it takes only TLS and only nodes whose keys are registered."""
        program: tuple[str, ...] = ("flower-superlink",)
        options = ["--host", "127.0.0.1", "--port", str(self.port), "--disable-runtime-dependency-installation"]
        if self.simulation:
            options += ["--insecure", "--simulation"]
        elif self.certificates is None:
            options += ["--insecure", "--database", str(self.folder / "superlink.db")]
        else:
            made = self.certificates
            program = (sys.executable, "-m", "bqsgd", "flower", "superlink")
            options += ["--ssl-ca-certfile", str(made.authority), "--ssl-certfile", str(made.server)]
            options += ["--ssl-keyfile", str(made.key), "--enable-supernode-auth"]
            options += ["--database", str(self.folder / "superlink.db")]
        self.processes.start("superlink", *program, *options)
        self.processes.wait_for("superlink", "running on http", seconds=_START_SECONDS)
        self._write_connection()

    def _write_connection(self) -> None:
        lines = ["[superlink]", f'default = "{_CONNECTION}"', f"[superlink.{_CONNECTION}]"]
        lines.append(f'address = "{self.address}"')
        if self.certificates is None:
            lines.append("insecure = true")
        else:
            lines.append(f"root-certificates = {json.dumps(str(self.certificates.authority))}")
        (self.folder / "flwr-home" / "config.toml").write_text("\n".join(lines) + "\n")

    def make_key(self, name: str) -> Path:
        """A node key that is not registered."""
        return make_node_key(self.folder / "keys", name=name)[0]

    def register(self, names: Sequence[str]) -> list[Path]:
        """Node keys that the SuperLink knows, one a name; returns the private ones."""
        made = {name: make_node_key(self.folder / "keys", name=name) for name in names}
        for name, (_, public) in made.items():
            self.processes.start(f"register-{name}", "flwr", "supernode", "register", str(public), _CONNECTION)
        for name in names:
            self.processes.finish(f"register-{name}", seconds=_START_SECONDS + 10 * len(names))
        return [made[name][0] for name in names]

    def start_node(self, name: str, *, client: int, key: Path | None, **environment: str) -> None:
        """Start a SuperNode; its ledger lies in nodes/`name`."""
        ledgers = self.folder / "nodes" / name
        options = ["--superlink", self.address, "--port", str(free_port())]
        options += ["--node-config", f'client={client} ledger-folder="{ledgers}" allow-no-privacy=true']
        if self.certificates is None:
            options.append("--insecure")
        else:
            options += ["--root-certificates", str(self.certificates.authority)]
        if key is not None:
            options += ["--auth-supernode-private-key", str(key)]
        self.processes.start(name, "flower-supernode", *options, **environment)

    def submit(
        self,
        app: Path,
        *,
        settings: Mapping[str, object],
        clients: int,
        seconds: float,
        heard: Callable[[str], None] | None = None,
    ) -> str:
        """`flwr run` to the end of the run; returns its log, which `heard` is given line by line."""
        command = self.command(app, settings=settings, clients=clients)
        return self.processes.run("run", *command, seconds=seconds, heard=heard)

    def command(self, app: Path, *, settings: Mapping[str, object], clients: int) -> tuple[str, ...]:
        """The `flwr run` command itself."""
        options = [
            "--stream",
            "--run-config",
            " ".join(f"{key}={json.dumps(value)}" for key, value in settings.items()),
        ]
        if self.simulation:
            options += ["--federation-config", f"num-supernodes={clients}"]
        return ("flwr", "run", str(app), _CONNECTION, *options)


def make_federation(folder: Path, processes: Processes, *, tls: bool, simulation: bool) -> OneMachine:
    """A federation that has not begun."""
    certificates = make_certificates(folder / "certificates") if tls else None
    return OneMachine(folder=folder, processes=processes, certificates=certificates, simulation=simulation)
