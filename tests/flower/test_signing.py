"""A node with --trusted-entities runs an app that was signed as the page says, and no other."""

import hashlib
import inspect
import json
import os
import types

import pytest

pytest.importorskip("flwr", reason="needs the extra `flower`")

import yaml
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from flwr.cli.build import build_fab_from_disk
from flwr.proto.fab_pb2 import Fab as FabProto
from flwr.proto.fab_pb2 import GetFabResponse
from flwr.supercore.fab import Fab
from flwr.superlink.servicer.fleet import fleet_handlers
from flwr.supernode.cli.flower_supernode import _try_obtain_trusted_entities, _validate_public_keys_ed25519
from flwr.supernode.start_client_internal import _verify_fab

from bqsgd._src.cli.app import main
from bqsgd._src.errors import InvalidParameter
from bqsgd._src.flower.federation import make_node_key, write_app
from bqsgd._src.flower.signing import install_signatures, read_signatures


def made_key(path):
    private = Ed25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    path.write_bytes(private)
    return path


@pytest.fixture
def signed(tmp_path, capsys):
    """(app, its signature's file, a node's file of trusted entities)."""
    app, signature, trusted = tmp_path / "app", tmp_path / "app.signature", tmp_path / "trusted.yaml"
    write_app(app)
    assert main(["flower", "sign", str(app), "--key", str(made_key(tmp_path / "signer")), "--out", str(signature)]) == 0
    trusted.write_text(capsys.readouterr().out)
    return app, signature, trusted


def runs(app, signatures, trusted, monkeypatch):
    """Whether a node of Flower's that has this file of trusted entities runs the app, as the SuperLink hands it out."""
    content = build_fab_from_disk(app)
    response = GetFabResponse(fab=FabProto(hash_str=hashlib.sha256(content).hexdigest(), content=content))
    monkeypatch.setattr(fleet_handlers, "get_fab", lambda request, state: response)
    install_signatures(signatures)
    fab = fleet_handlers.get_fab(None, None).fab
    entities = _try_obtain_trusted_entities(trusted)
    _validate_public_keys_ed25519(entities)
    received = Fab(fab.hash_str, fab.content, dict(fab.verifications))
    # The two conditions of `flwr.supernode.start_client_internal`.
    return bool(received.verifications.get("valid_license")) and _verify_fab(received, entities)


def test_a_node_runs_what_was_signed_and_nothing_else(signed, tmp_path, monkeypatch, capsys):
    app, signature, trusted = signed
    signatures = read_signatures([signature])
    assert runs(app, signatures, trusted, monkeypatch)
    assert not runs(app, {}, trusted, monkeypatch), "the server hands out no signature"
    os.utime(app / "private_app" / "task.py", (1e9, 1e9))
    assert runs(app, signatures, trusted, monkeypatch), "the time of a file is not signed"
    with (app / "private_app" / "task.py").open("a") as code:
        code.write("# one more line\n")
    assert not runs(app, signatures, trusted, monkeypatch), "the code is another"
    other = dict.fromkeys([hashlib.sha256(build_fab_from_disk(app)).hexdigest()], *signatures.values())
    assert not runs(app, other, trusted, monkeypatch), "the server claims the signature for other code"
    assert (
        main(["flower", "sign", str(app), "--key", str(made_key(tmp_path / "b")), "--out", str(tmp_path / "b.s")]) == 0
    )
    assert not runs(app, read_signatures([tmp_path / "b.s"]), trusted, monkeypatch), "the signer is a stranger"
    stranger = yaml.safe_load(capsys.readouterr().out)
    assert not stranger.keys() & yaml.safe_load(trusted.read_text()).keys()


def test_what_is_no_key_no_app_and_no_signature_is_refused(signed, tmp_path, capsys):
    app, signature, _ = signed
    out = ["--out", str(tmp_path / "new")]
    for folder, key, says in (
        (app, make_node_key(tmp_path, name="node")[0], "is not an Ed25519 key"),
        (app, signature, "is not a private key"),
        (app, tmp_path / "absent", "is not a private key"),
        (tmp_path / "absent", tmp_path / "signer", "cannot be read as a Flower app"),
    ):
        assert main(["flower", "sign", str(folder), "--key", str(key), *out]) == 2
        assert says in capsys.readouterr().err
    assert main(["flower", "sign", str(app), "--key", str(tmp_path / "signer"), "--out", str(signature)]) == 2
    assert "exists" in capsys.readouterr().err
    fields = json.loads(signature.read_text())
    for wrong in (b"", b"[]", b"[" * 60_000, b'{"app": 1}', json.dumps({**fields, "signatures": [1]}).encode()):
        (tmp_path / "wrong").write_bytes(wrong)
        with pytest.raises(InvalidParameter, match="is not a signature"):
            read_signatures([tmp_path / "wrong"])
    assert main(["flower", "superlink", "--insecure", "--signed", str(tmp_path / "wrong")]) == 2
    assert "is not a signature" in capsys.readouterr().err


def test_flower_still_asks_what_the_hook_answers():
    from flwr.superlink.routers.fleet import router

    assert "fleet_handlers.get_fab(request=request, state=state)" in inspect.getsource(router.fleet_get_fab)
    assert isinstance(fleet_handlers, types.ModuleType)
