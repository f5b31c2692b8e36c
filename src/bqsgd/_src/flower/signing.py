"""Signatures of an app, so that nodes run only code that somebody they trust has signed.

A run brings its own code to the nodes, and Flower's `--trusted-entities` makes a node refuse code without a signature
that it can check. Flower distributes such signatures through its Hub only. Here the signature is a file that the
server's operator puts beside the app: `bqsgd flower sign` writes it, `bqsgd flower superlink --signed` hands it out
with the app, and the node checks it as Flower does. Nobody on the way is trusted: the node has the signer's public key.
"""

from __future__ import annotations

import base64
import hashlib
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_private_key

from bqsgd._src.errors import InvalidParameter
from bqsgd._src.storage import read_regular

_MOST_BYTES = 1 << 16
_VALID = "valid_license"
"""Flower's nodes look for this name first. It is a word of the server's and proves nothing."""


def sign_app(app: Path, key: Path) -> tuple[dict[str, Any], str]:
    """(content of the signature's file, line of the nodes' trusted entities) for the app as it is in the folder now.

    key: a private Ed25519 key as `ssh-keygen -t ed25519` writes it, without a passphrase.
    """
    from flwr.cli.build import build_fab_from_disk

    content = read_regular(key, limit=_MOST_BYTES)
    try:
        private = load_ssh_private_key(content or b"", None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:  # TypeError: it has a passphrase
        raise InvalidParameter(f"{key} is not a private key as ssh-keygen writes it, without a passphrase") from error
    if not isinstance(private, Ed25519PrivateKey):
        raise InvalidParameter(f"{key} is not an Ed25519 key: make one with ssh-keygen -t ed25519")
    try:
        digest = hashlib.sha256(build_fab_from_disk(app)).digest()
    except Exception as error:  # whatever is wrong with the folder; Flower says it in several classes
        raise InvalidParameter(f"{app} cannot be read as a Flower app: {error}") from error
    public = private.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()
    name, now = "fpk_" + hashlib.sha256(public.encode()).hexdigest()[:32], int(time.time())
    signature = private.sign(now.to_bytes(8, "big") + digest)
    signed = {"signed_at": now, "signature": base64.urlsafe_b64encode(signature).decode()}
    return {"app": digest.hex(), "signatures": {name: signed}}, f"{name}: {public}"


def read_signatures(paths: Sequence[Path]) -> dict[str, dict[str, str]]:
    """Digest of an app -> what Flower's nodes check. Raises InvalidParameter or UnsafeFile."""
    by_app: dict[str, dict[str, str]] = {}
    for path in paths:
        try:
            fields = json.loads(read_regular(path, limit=_MOST_BYTES) or b"")
            signatures = {str(name): json.dumps(signed) for name, signed in fields["signatures"].items()}
            by_app.setdefault(str(fields["app"]), {_VALID: "Valid"}).update(signatures)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise InvalidParameter(f"{path} is not a signature that `bqsgd flower sign` wrote") from error
    return by_app


def install_signatures(signatures: dict[str, dict[str, str]]) -> None:
    """Make the SuperLink of this process hand out these signatures with the apps that they are for."""
    from flwr.superlink.servicer.fleet import fleet_handlers

    hand_out = fleet_handlers.get_fab

    def hand_out_signed(request: Any, state: Any) -> Any:
        response = hand_out(request, state)
        response.fab.verifications.update(signatures.get(response.fab.hash_str, {}))
        return response

    fleet_handlers.get_fab = hand_out_signed
