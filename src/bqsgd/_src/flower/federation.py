"""A Flower federation: certificates and node keys, a SuperLink that logs failed handshakes, a whole one on one machine.

Certificates and keys are made with `cryptography`; those of your own authority serve just as well. Flower's web server
closes a connection that fails the TLS handshake without a word, so plain HTTP to the TLS port, or a client that does
not trust the certificate, would leave no trace on the server. `bqsgd flower superlink` takes the options of
`flower-superlink` and is the same program otherwise.
"""

from __future__ import annotations

import ipaddress
import json
import logging
import os
import socket
import ssl
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from cryptography.x509.oid import NameOID

from bqsgd._src.errors import InvalidParameter
from bqsgd._src.flower.processes import Processes
from bqsgd._src.flower.settings import identity_path, write_identities
from bqsgd._src.settings.config import Config
from bqsgd._src.storage import private_folder

logger = logging.getLogger("flwr.bqsgd")
_DAYS = 30
_START_SECONDS = 300.0
_CONNECTION = "one-machine"
_PACKAGE = "private_app"


@dataclass(frozen=True, kw_only=True)
class Certificates:
    """Files: the authority's certificate, the server's certificate and its key."""

    authority: Path
    server: Path
    key: Path


def make_certificates(folder: Path, *, address: str = "127.0.0.1") -> Certificates:
    """An authority whose key is thrown away, and a server certificate for `address` (an IP) and localhost."""
    private_folder(folder)
    authority_key, server_key = ec.generate_private_key(ec.SECP384R1()), ec.generate_private_key(ec.SECP384R1())
    authority_name, server_name = _name("bqsgd one-machine authority"), _name(address)
    authority = (
        _builder(authority_name, authority_name, authority_key)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .sign(authority_key, hashes.SHA384())
    )
    names = [x509.IPAddress(ipaddress.ip_address(address)), x509.DNSName("localhost")]
    server = (
        _builder(server_name, authority_name, server_key)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()), critical=False)
        .sign(authority_key, hashes.SHA384())
    )
    made = Certificates(authority=folder / "ca.crt", server=folder / "server.pem", key=folder / "server.key")
    made.authority.write_bytes(authority.public_bytes(Encoding.PEM))
    made.server.write_bytes(server.public_bytes(Encoding.PEM))
    _write_secret(made.key, server_key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return made


def make_node_key(folder: Path, *, name: str) -> tuple[Path, Path]:
    """A node's private key, which stays on it, and the public one, which the SuperLink is given: (private, public)."""
    private_folder(folder)
    key = ec.generate_private_key(ec.SECP384R1())
    private, public = folder / name, folder / f"{name}.pub"
    _write_secret(private, key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    public.write_bytes(key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) + b"\n")
    return private, public


def _write_secret(path: Path, content: bytes) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as stream:
        stream.write(content)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(minutes=5))
        .not_valid_after(now + timedelta(days=_DAYS))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


class LoggedHandshake(ssl.SSLObject):
    """A TLS connection that says why its handshake failed. Who called is not known at this depth."""

    def do_handshake(self) -> None:
        """As the class above, with a warning before the error is raised again."""
        try:
            super().do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise  # not failed, only not finished
        except ssl.SSLError as error:
            if self.server_side:
                plain, reason = error.reason == "HTTP_REQUEST", error.reason or type(error).__name__
                said = "plain HTTP; nothing of it was read" if plain else f"the handshake failed ({reason})"
                logger.warning("refused at the TLS port: %s", said)
            raise


def superlink(options: Sequence[str]) -> None:
    """Be `flower-superlink` with these options until it is stopped."""
    from flwr.superlink.cli import flower_superlink

    os.umask(0o077)  # its database and its logs
    ssl.SSLContext.sslobject_class = LoggedHandshake  # the standard library's own place for this
    sys.argv = ["flower-superlink", *options]
    flower_superlink()


def free_port() -> int:
    """A port of this machine that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class LocalFederation:
    """A federation in the folder of `processes`: certificates, keys, the nodes' ledgers, logs. Loopback only.

    Args:
        tls: nodes are processes of their own, with certificates and registered keys. Else it is a simulation.
    """

    def __init__(self, processes: Processes, *, tls: bool) -> None:
        self.processes, self.folder, self.port = processes, processes.folder, free_port()
        self.certificates = make_certificates(self.folder / "certificates") if tls else None

    @property
    def address(self) -> str:
        """Where the SuperLink listens."""
        return f"127.0.0.1:{self.port}"

    def start_superlink(self) -> None:
        """Start the SuperLink; with certificates it takes only TLS and only nodes whose keys are registered."""
        program: tuple[str, ...] = ("flower-superlink",)
        options = ["--host", "127.0.0.1", "--port", str(self.port), "--disable-runtime-dependency-installation"]
        if self.certificates is None:
            options += ["--insecure", "--simulation"]
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

    def register(self, names: Sequence[str]) -> list[Path]:
        """Node keys that the SuperLink knows, one per name; returns the private ones."""
        made = {name: make_node_key(self.folder / "keys", name=name) for name in names}
        for name, (_, public) in made.items():
            self.processes.start(f"register-{name}", "flwr", "supernode", "register", str(public), _CONNECTION)
        for name in names:
            self.processes.finish(f"register-{name}", seconds=_START_SECONDS + 10 * len(names))
        return [made[name][0] for name in names]

    def make_identities(self, clients: int, *, seed: int | None = None) -> Path:
        """Identity keys for secure sums, and the roster of them; returns the roster."""
        return write_identities(Config.of(clients=clients, seed=seed), self.folder / "identities")

    def start_node(
        self,
        name: str,
        *,
        client: int,
        key: Path,
        epsilon: float = 10.0,
        roster: Path | None = None,
        **environment: str,
    ) -> None:
        """Start a SuperNode of a federation with TLS; its ledger is in nodes/`name`, with a budget of `epsilon`.

        roster: of `make_identities`, for secure sums.
        """
        ledgers = self.folder / "nodes" / name
        options = ["--superlink", self.address, "--host", "127.0.0.1", "--port", str(free_port())]
        limits = f"epsilon={float(epsilon)} allow-no-privacy=true"
        if roster is not None:
            limits += f' roster="{roster}" identity="{identity_path(roster.parent, client)}"'
        options += ["--node-config", f'client={client} ledger-folder="{ledgers}" {limits}']
        assert self.certificates is not None
        options += ["--root-certificates", str(self.certificates.authority), "--auth-supernode-private-key", str(key)]
        self.processes.start(name, "flower-supernode", *options, **environment)

    def command(self, app: Path, *, settings: Mapping[str, object], clients: int) -> tuple[str, ...]:
        """The `flwr run` command, which prints the run's log to its end."""
        run_config = " ".join(f"{key}={json.dumps(value)}" for key, value in settings.items())
        options = ["--stream", "--run-config", run_config]
        if self.certificates is None:
            options += ["--federation-config", f"num-supernodes={clients}"]
        return ("flwr", "run", str(app), _CONNECTION, *options)


def write_app(folder: Path) -> list[Path]:
    """Write the app; a folder with anything in it is refused. Returns the files."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InvalidParameter(f"{folder} exists and is not empty; name another folder")
    (folder / _PACKAGE).mkdir(parents=True, exist_ok=True)
    written = []
    for source in sorted(Path(__file__).with_name("template").glob("*.in")):
        target = (folder if source.stem == "pyproject.toml" else folder / _PACKAGE) / source.stem
        target.write_text(source.read_text())
        written.append(target)
    return written


def read_overrides(app: Path, run_config: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The configuration in an app's pyproject.toml and what `--run-config` changes of it, as Flower reads both."""
    from flwr.common.config import flatten_dict, get_project_config, parse_config_args

    try:
        project = flatten_dict(get_project_config(app)["tool"]["flwr"]["app"].get("config", {}))
        overrides = parse_config_args([run_config] if run_config else None)
    except (OSError, KeyError, ValueError, SystemExit) as error:
        raise InvalidParameter(
            f"{app} and {run_config!r} cannot be read as a Flower app and settings: {error}"
        ) from error
    return project, overrides
