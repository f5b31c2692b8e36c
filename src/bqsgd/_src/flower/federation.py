"""A Flower federation: a certificate and node keys, a SuperLink that logs failed handshakes, one on this machine.

Certificates and keys are made with `cryptography`; those of your own authority serve just as well. Flower's web server
closes a connection that fails the TLS handshake without a word, so plain HTTP to the TLS port, or a client that does
not trust the certificate, would leave no trace on the server. `bqsgd flower superlink` takes the options of
`flower-superlink`, and is the same program behind a gate (`gate.py`).
"""

from __future__ import annotations

import argparse
import errno
import ipaddress
import json
import logging
import os
import socket
import ssl
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import tomli_w
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from cryptography.x509.oid import NameOID

from bqsgd._src.errors import InvalidParameter
from bqsgd._src.flower.gate import install_gate, networks_of
from bqsgd._src.flower.processes import Processes
from bqsgd._src.flower.settings import identity_path, write_identities
from bqsgd._src.flower.signing import install_signatures, read_signatures
from bqsgd._src.settings.config import Config
from bqsgd._src.storage import private_folder

logger = logging.getLogger("flwr.bqsgd")
SUPERNODE = (sys.executable, "-m", "bqsgd", "flower", "supernode")
_DAYS = 30
_START_SECONDS = 300.0
_CONNECTION = "one-machine"
_PACKAGE = "private_app"
_LOOPBACK = "127.0.0.1"
_SUPERLINK_PORT = 8000
"""Where flower-superlink listens unless it is told otherwise."""


def make_certificate(folder: Path, *, hosts: Sequence[str] = ()) -> tuple[Path, Path]:
    """A TLS server's certificate for loopback, and for the IPs in `hosts`, signed with its own key: (certificate, key).

    Nodes trust this one certificate. There is no authority that could sign another.
    """
    private_folder(folder)
    key, now = ec.generate_private_key(ec.SECP384R1()), datetime.now(UTC)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, _LOOPBACK)])
    addresses = [x509.IPAddress(ipaddress.ip_address(host)) for host in (_LOOPBACK, *hosts)]
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(minutes=5))
        .not_valid_after(now + timedelta(days=_DAYS))
        .add_extension(x509.SubjectAlternativeName([*addresses, x509.DNSName("localhost")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(key, hashes.SHA384())
    )
    paths = folder / "server.pem", folder / "server.key"
    paths[0].write_bytes(certificate.public_bytes(Encoding.PEM))
    _write_secret(paths[1], key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return paths


def make_node_key(folder: Path, *, name: str) -> tuple[Path, Path]:
    """A node's private key, which stays on the node, and its public key, for the SuperLink: (private, public)."""
    private_folder(folder)
    key = ec.generate_private_key(ec.SECP384R1())
    private, public = folder / name, folder / f"{name}.pub"
    _write_secret(private, key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    public.write_bytes(key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) + b"\n")
    return private, public


def _write_secret(path: Path, content: bytes) -> None:
    # O_EXCL: an existing key is never overwritten, and a file that somebody else has prepared is not used.
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as stream:
        stream.write(content)


class LoggedHandshake(ssl.SSLObject):
    """A TLS connection that logs why its handshake failed. The caller's address is not known at this level."""

    def do_handshake(self) -> None:
        """The handshake, with a warning if it fails."""
        try:
            super().do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise  # not a failure: more bytes are needed
        except ssl.SSLError as error:
            if self.server_side:
                cause = f"the handshake failed ({error.reason or type(error).__name__})"
                if error.reason == "HTTP_REQUEST":
                    cause = "plain HTTP; nothing of it was read"
                logger.warning("refused at the TLS port: %s", cause)
            raise


def check_port(options: Sequence[str]) -> None:
    """Raise if another program listens where a SuperLink with these options would: Flower would print a traceback."""
    known = argparse.ArgumentParser(add_help=False, exit_on_error=False, allow_abbrev=False)
    known.add_argument("--host", default=_LOOPBACK)
    known.add_argument("--port", default=_SUPERLINK_PORT, type=int)
    try:
        given, _ = known.parse_known_args(options)
        with socket.create_server((given.host, given.port)):
            return
    except argparse.ArgumentError:
        return  # flower-superlink says what is wrong with its options
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise InvalidParameter(
                f"port {given.port} of {given.host} is in use: stop the program that listens there, or choose another "
                "port with --port"
            ) from error


def superlink(options: Sequence[str], *, control_from: Sequence[str] = (), signed: Sequence[Path] = ()) -> None:
    """Run `flower-superlink` with these options, in this process, until it is stopped.

    Args:
        control_from: networks that may start runs and register keys, besides this machine.
        signed: files of signatures to hand out with the apps that they are for.

    Raises:
        InvalidParameter: another program listens at its port, or a network or a file of signatures is invalid.
    """
    networks, signatures = networks_of(control_from), read_signatures(signed)
    check_port(options)
    install_gate(networks)
    install_signatures(signatures)
    from flwr.superlink.cli import flower_superlink

    os.umask(0o077)  # for its database and its logs, which it would leave readable to all users
    ssl.SSLContext.sslobject_class = LoggedHandshake  # the standard library provides this hook
    sys.argv = ["flower-superlink", *options]
    flower_superlink()


def free_port() -> int:
    """A port of this machine that is free now."""
    with socket.socket() as probe:
        probe.bind((_LOOPBACK, 0))
        return int(probe.getsockname()[1])


class LocalFederation:
    """A federation in the folder of `processes`: certificate, keys, the nodes' ledgers, logs. Loopback only.

    Args:
        tls: nodes are processes of their own, and the SuperLink accepts only TLS and registered node keys. Otherwise it
            is a simulation.
    """

    def __init__(self, processes: Processes, *, tls: bool) -> None:
        self.processes, self.folder, self.port = processes, processes.folder, free_port()
        self.certificate: Path | None = None
        self.key: Path | None = None
        if tls:
            self.certificate, self.key = make_certificate(self.folder / "certificates")

    @property
    def address(self) -> str:
        """Where the SuperLink listens."""
        return f"{_LOOPBACK}:{self.port}"

    def start_superlink(self) -> None:
        """Start the SuperLink, and tell `flwr` how to reach it."""
        program: tuple[str, ...] = ("flower-superlink",)
        options = ["--host", _LOOPBACK, "--port", str(self.port), "--disable-runtime-dependency-installation"]
        connection: dict[str, object] = {"address": self.address}
        if self.certificate is None:
            options += ["--insecure", "--simulation"]
            connection["insecure"] = True
        else:
            program = (sys.executable, "-m", "bqsgd", "flower", "superlink")
            options += ["--ssl-ca-certfile", str(self.certificate), "--ssl-certfile", str(self.certificate)]
            options += ["--ssl-keyfile", str(self.key), "--enable-supernode-auth"]
            options += ["--database", str(self.folder / "superlink.db")]
            connection["root-certificates"] = str(self.certificate)
        self.processes.start("superlink", *program, *options)
        self.processes.wait_for("superlink", "running on http", seconds=_START_SECONDS)
        connections = {"superlink": {"default": _CONNECTION, _CONNECTION: connection}}
        (self.folder / "flwr-home" / "config.toml").write_text(tomli_w.dumps(connections))

    def register(self, names: Sequence[str]) -> list[Path]:
        """Make a node key per name and register it with the SuperLink; returns the private keys."""
        made = {name: make_node_key(self.folder / "keys", name=name) for name in names}
        # All at once: each takes seconds to start.
        for name, (_, public) in made.items():
            self.processes.start(f"register-{name}", "flwr", "supernode", "register", str(public), _CONNECTION)
        for name in names:
            self.processes.finish(f"register-{name}", seconds=_START_SECONDS + 10 * len(names))
        return [made[name][0] for name in names]

    def make_identities(self, clients: int, *, seed: int | None = None) -> Path:
        """Make identity keys for secure sums, and their roster; returns the roster."""
        return write_identities(Config.of(clients=clients, seed=seed), self.folder / "identities")

    def start_node(
        self,
        name: str,
        *,
        client: int,
        key: Path,
        epsilon: float = 10.0,
        roster: Path | None = None,
        program: tuple[str, ...] = SUPERNODE,
    ) -> None:
        """Start a SuperNode of a federation with TLS; its ledger is in nodes/`name`, with a budget of `epsilon`.

        roster: from `make_identities`, for secure sums. program: `flower-supernode`, or what takes its options.
        """
        ledgers = self.folder / "nodes" / name
        options = ["--superlink", self.address, "--host", _LOOPBACK, "--port", str(free_port())]
        limits = f"epsilon={float(epsilon)} allow-no-privacy=true"
        if roster is not None:
            limits += f' roster="{roster}" identity="{identity_path(roster.parent, client)}"'
        options += ["--node-config", f'client={client} ledger-folder="{ledgers}" {limits}']
        options += ["--root-certificates", str(self.certificate), "--auth-supernode-private-key", str(key)]
        self.processes.start(name, *program, *options)

    def command(self, app: Path, *, settings: Mapping[str, object], clients: int) -> tuple[str, ...]:
        """The `flwr run` command; it prints the run's log until the run ends."""
        run_config = " ".join(f"{key}={json.dumps(value)}" for key, value in settings.items())
        options = ["--stream", "--run-config", run_config]
        if self.certificate is None:
            options += ["--federation-config", f"num-supernodes={clients}"]
        return ("flwr", "run", str(app), _CONNECTION, *options)


def write_app(folder: Path) -> list[Path]:
    """Write the app into a folder, which must be new or empty; returns the files."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InvalidParameter(f"{folder} exists and is not empty; name another folder")
    (folder / _PACKAGE).mkdir(parents=True, exist_ok=True)
    written = []
    for source in sorted(Path(__file__).with_name("template").glob("*.in")):
        target = (folder if source.stem == "pyproject.toml" else folder / _PACKAGE) / source.stem
        target.write_text(source.read_text())
        written.append(target)
    return written
