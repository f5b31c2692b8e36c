"""What a deployment needs: certificates, node keys, and a SuperLink that logs connections that fail the handshake.

Certificates and keys are made with `cryptography`; those of your own authority serve just as well. Flower's web server
closes a connection that fails the TLS handshake without a word, so plain HTTP to the TLS port, or a client that does
not trust the certificate, would leave no trace on the server. `bqsgd flower superlink` takes the options of
`flower-superlink` and is the same program otherwise.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import ssl
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from cryptography.x509.oid import NameOID

from bqsgd.storage import private_folder

logger = logging.getLogger("flwr.bqsgd")
_DAYS = 30


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

    os.umask(0o077)  # its database and its logs
    ssl.SSLContext.sslobject_class = LoggedHandshake  # the standard library's own place for this
    sys.argv = ["flower-superlink", *options]
    flower_superlink()
