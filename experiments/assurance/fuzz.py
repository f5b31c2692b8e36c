"""Fuzzing every reader of a stranger's bytes: valid files and messages, mutated, and nothing but documented errors.

python -m experiments.assurance.fuzz  # 100,000 cases per reader (minutes each); writes results/fuzz.json
python -m experiments.assurance.fuzz rosters  # the same for some; the others' results stay
python -m experiments.assurance.fuzz --cases 2000 ledgers  # fewer; writes nothing

Frames have a battery of their own (tests/wire/test_wire_fuzz.py). Mutations know the structure (JSON and TOML trees,
the header of a safetensors file, a ledger's chain, checksums) and are sealed again where a checksum would end the case
early; on top of that, or instead, come flipped bits, cuts, splices, runs and random bytes.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import copy
import hashlib
import json
import random
import resource
import sqlite3
import struct
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from bqsgd._src.errors import BqsgdError
from experiments import lab

RESULTS = lab.RESULTS / "fuzz.json"
CASES, SEED = 100_000, 20241116


class Raw(str):
    """Text that stands in a document as it is."""


DEEP = 3000
HOSTILE: list[Any] = [
    None, True, False, 0, 1, -1, 2, 7, 1 << 20, 2**31, 2**53, 2**63 - 1, 2**63, 2**64, 10**400, -(10**400), 0.5, -0.0,
    1e-320, 1e308, -1e308, "", "x", "inf", "-inf", "nan", "\0", "\x1b[2J", "ü\u202e", "a" * 5000, "<script>", "../..",
    [], {}, [0], {"a": 1}, [[1], [2]], {"": None}, Raw("1e999"), Raw("NaN"), Raw("Infinity"), Raw("-Infinity"),
    Raw("9" * 5000), Raw("-" + "9" * 400), Raw("[" * DEEP + "]" * DEEP), Raw("[" * DEEP), Raw('"\\ud800"'), Raw('"'),
    Raw("{"), Raw("0x7f"), Raw("1979-05-27T07:32:00Z"), Raw("inf"), Raw("nan"), Raw('"""x"""'), Raw('{"a":' * DEEP),
]  # fmt: skip


def json_text(value: Any) -> str:
    """JSON of a tree with raw text in it."""
    if isinstance(value, Raw):
        return str(value)
    if isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(str(key))}:{json_text(entry)}" for key, entry in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(json_text, value)) + "]"
    return json.dumps(value)


def toml_text(value: Any) -> str:
    """TOML of a tree: tables at the top, inline below."""
    lines = []
    for name, table in sorted(value.items(), key=lambda item: isinstance(item[1], dict)):
        if isinstance(table, dict):
            lines.append(f"[{json.dumps(str(name))}]")
            lines += [f"{json.dumps(str(key))} = {_toml_inline(entry)}" for key, entry in table.items()]
        else:
            lines.append(f"{json.dumps(str(name))} = {_toml_inline(table)}")
    return "\n".join(lines) + "\n"


def _toml_inline(value: Any) -> str:
    if isinstance(value, dict) and not isinstance(value, Raw):
        inner = ", ".join(f"{json.dumps(str(key))} = {_toml_inline(entry)}" for key, entry in value.items())
        return "{" + inner + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml_inline, value)) + "]"
    return '""' if value is None else json_text(value)


def mutate_tree(tree: Any, rng: random.Random) -> Any:
    """The same document with one to three of its values or names changed."""
    tree = copy.deepcopy(tree)
    for _ in range(rng.randint(1, 3)):
        places = [(tree, key) for key in _keys(tree)]
        for holder, key in places:
            places += [(holder[key], below) for below in _keys(holder[key])]
        if not places:
            return rng.choice(HOSTILE)
        holder, key = rng.choice(places)
        action = rng.randrange(8)
        if action < 4:
            holder[key] = copy.deepcopy(rng.choice(HOSTILE))
        elif action == 4:
            del holder[key]
        elif action == 5 and isinstance(holder, dict):
            holder[rng.choice(["", "x", "round", "__class__", str(key).upper(), "a" * 300])] = holder.pop(key)
        elif action == 6:
            other, name = rng.choice(places)
            holder[key] = copy.deepcopy(other[name])
        elif isinstance(holder[key], (int, float)) and not isinstance(holder[key], bool):
            holder[key] = rng.choice([-holder[key], holder[key] * 2, holder[key] + 1, str(holder[key]), [holder[key]]])
    return tree if rng.random() < 0.98 else rng.choice(HOSTILE)


def _keys(tree: Any) -> list[Any]:
    return list(tree) if isinstance(tree, dict) else list(range(len(tree))) if isinstance(tree, list) else []


def mutate_bytes(content: bytes, rng: random.Random) -> bytes:
    """Bits, cuts, insertions, runs, splices, or something else altogether."""
    data, kind = bytearray(content), rng.randrange(8)
    if not data or kind == 0:
        return rng.randbytes(rng.randint(0, 300))
    at = rng.randrange(len(data))
    if kind <= 2:
        for _ in range(rng.randint(1, 6)):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif kind == 3:
        del data[at:]
    elif kind == 4:
        data[at:at] = rng.choice([b"\0", b"\xff\xfe", b"\xed\xa0\x80", b"[" * DEEP, b"9" * 500, rng.randbytes(16)])
    elif kind == 5:
        data[at : at + rng.randint(1, 32)] = bytes([rng.choice([0, 1, 127, 128, 255])]) * rng.randint(1, 32)
    elif kind == 6:
        data[at:] = content[rng.randrange(len(content)) :]
    else:
        data += rng.choice([b"\n", b"\0" * 64, content[:200], rng.randbytes(40)])
    return bytes(data)


@dataclass(frozen=True)
class Reader:
    """corpus: valid documents. case: one mutated. read: what must accept it or raise a documented error."""

    corpus: list[Any]
    case: Callable[[Any, random.Random], Any]
    read: Callable[[Any], object]


def _document(write: Callable[[Any], str]) -> Callable[[Any, random.Random], bytes]:
    """Mutations of a document that is a tree; a lone surrogate becomes bytes that are not UTF-8."""

    def case(tree: Any, rng: random.Random) -> bytes:
        try:
            content = write(mutate_tree(tree, rng) if rng.random() < 0.8 else tree).encode(errors="surrogatepass")
        except (AttributeError, TypeError):  # no tree any more
            content = json_text(rng.choice(HOSTILE)).encode()
        return mutate_bytes(content, rng) if rng.random() < 0.3 else content

    return case


def _in_file(path: Path, read: Callable[[Path], object]) -> Callable[[bytes], object]:
    def write_and_read(content: bytes) -> object:
        path.write_bytes(content)
        return read(path)

    return write_and_read


def release_tree() -> dict[str, Any]:
    """A release as a ledger stores it."""
    from bqsgd._src.params import Mechanism
    from bqsgd._src.release import Release, Sampling, Scheme, Sensitivity, Terms

    release = Release(
        mechanism=Mechanism(levels=2, trials=251),
        terms=Terms(
            dimension=100,
            sensitivity=Sensitivity(linf=1 / 64, l2=1 / 32),
            sampling=Sampling(scheme=Scheme.POISSON, rate=0.1),
        ),
    )
    return json.loads(json.dumps(release.to_dict()))


def guarantee_tree() -> dict[str, Any]:
    """A guarantee as a client states it."""
    return {
        "epsilon": 2.5, "delta": 1e-5, "relation": "add/remove one", "unit": "sample",
        "trust": "server sees each client's messages", "sampling": "poisson rate 0.1, 10 rounds",
        "method": "proven upper bound (loss distribution, L-infinity)", "delta_floor": 1e-12, "seeded": False,
        "assumption": "x",
    }  # fmt: skip


def guarantees(folder: Path) -> Reader:
    """What a client states of itself, as both engines read it."""
    from bqsgd._src.engines.engine import read_guarantee
    from bqsgd._src.privacy.guarantee import Guarantee

    def read(content: bytes) -> object:
        guarantee = read_guarantee(content)
        if guarantee is None:
            try:
                fields = json.loads(content)
            except (ValueError, RecursionError):
                return None
            Guarantee.from_dict(fields)
        else:
            str(guarantee)
        return guarantee

    return Reader([guarantee_tree()], _document(json_text), read)


def first_messages(folder: Path) -> Reader:
    """The first message of a torch.distributed client."""
    from bqsgd._src.engines.torch_distributed.client import read_reply, reply_to_greeting

    corpus = [json.loads(reply_to_greeting(samples=600))]
    return Reader(corpus, _document(json_text), lambda content: read_reply(memoryview(content)))


def rosters(folder: Path) -> Reader:
    """Roster files."""
    from bqsgd._src.secure.roster import read_roster

    corpus = [
        {"clients": {str(number): hashlib.sha256(bytes([number])).hexdigest() for number in range(n)}} for n in (2, 9)
    ]
    return Reader(corpus, _document(toml_text), _in_file(folder / "roster.toml", read_roster))


def configs(folder: Path) -> Reader:
    """Settings files."""
    from bqsgd._src.settings.config import Config
    from bqsgd._src.tasks.named import NamedTask
    from bqsgd._src.tasks.resolve import read_settings_file

    changed = Config.of(clients=10, epsilon=2.0, clip="l2", bits=8, schedule="cosine", seed=3, momentum=0.9)
    corpus = [
        {**config.to_dict(), "data": NamedTask.of(dataset="digits").to_table()}
        for config in (Config(), changed)
    ]  # fmt: skip
    return Reader(corpus, _document(toml_text), _in_file(folder / "config.toml", read_settings_file))


def ledgers(folder: Path) -> Reader:
    """Ledger files: entries changed and chained again, heads and tables changed, and pages damaged."""
    from bqsgd._src.ledger import Ledger
    from bqsgd._src.ledger._store import LEDGER

    def read(path: Path) -> object:
        with Ledger(path) as ledger:
            return ledger.entries, ledger.spent_rounds, ledger.budget, ledger.released

    return _ledger_files(folder, LEDGER, read)


def registers(folder: Path) -> Reader:
    """Registers, the same way."""
    from bqsgd._src.ledger import Register
    from bqsgd._src.ledger._store import REGISTER

    def read(path: Path) -> object:
        with Register(path) as register:
            ledgers = [register.ledger(client) for client in register.clients]
            return [(ledger.entries, ledger.spent_rounds, ledger.budget, ledger.released) for ledger in ledgers]

    return _ledger_files(folder, REGISTER, read)


def _ledger_files(folder: Path, form: Any, read: Callable[[Path], object]) -> Reader:
    from bqsgd._src.ledger._store import APPLICATION_ID, REGISTER

    many = form is REGISTER

    budget = {
        "kind": "budget",
        "time": "2024-01-01",
        "budget": {"epsilon": 3.0, "delta": 1e-5},
        "reason": "ledger made",
    }
    spend = {
        "kind": "spend", "time": "2024-01-01", "run": "one", "first_round": 0, "rounds": 3, "seeded": False,
        "again": False, "release": release_tree(),
    }  # fmt: skip
    back = {**spend, "kind": "return", "first_round": 2, "rounds": 1}
    corpus = [[budget], [budget, spend, back], [budget, spend, {**spend, "first_round": 3, "seeded": True}, budget]]

    def case(entries: list[Any], rng: random.Random) -> bytes:
        entries, kind = copy.deepcopy(entries), rng.randrange(10)
        bodies: list[Any] = [json_text(entry) for entry in entries]
        schema, head, client = list(form.schema), {}, 0
        if kind < 5:
            number = rng.randrange(len(entries))
            bodies[number] = json_text(mutate_tree(entries[number], rng))
        elif kind == 5:
            number = rng.randrange(len(entries))
            bodies[number] = rng.choice([b"\xff\xfe", b"", 7, 2.5, "", "[" * DEEP, '{"budget":' * 9, "9" * 5000])
        elif kind == 6:
            head = {rng.choice(["count", "chain", "client"]): rng.choice([-1, 2**62, "x", b"\0", 1e300, b"\xff"])}
        elif kind == 7:
            schema.append(
                rng.choice(["CREATE TABLE more (x)", "CREATE VIEW v AS SELECT 1", "CREATE INDEX i ON entries (body)"])
            )
        connection = sqlite3.connect(":memory:", isolation_level=None)
        for statement in (
            f"PRAGMA application_id = {APPLICATION_ID}",
            f"PRAGMA user_version = {form.format}",
            *schema,
        ):
            connection.execute(statement)
        chain = hashlib.sha256(f"bqsgd.ledger.v1 client {client}".encode()).digest()
        own = f"{client}, " if many else ""
        for number, body in enumerate(bodies, start=1):
            stored = body if isinstance(body, bytes) else str(body).encode(errors="surrogatepass")
            chain = hashlib.sha256(chain + stored).digest()
            # Text that is no UTF-8 gets into a file by way of a cast.
            value = "CAST(? AS TEXT)" if not isinstance(body, (int, float)) and rng.random() < 0.9 else "?"
            connection.execute(f"INSERT INTO entries VALUES ({own}?, {value}, ?)", (number, stored, chain))
        fields = {"client": client, "count": len(bodies), "chain": chain} | head
        if many:
            clients = rng.choice([1] * 9 + [0, 2, "x", 2**62])
            connection.execute("INSERT INTO register VALUES (1, ?)", (clients,))
        table = "heads VALUES (" if many else "head VALUES (1, "
        with contextlib.suppress(sqlite3.IntegrityError):  # a register's client is a number: SQLite sees to that
            connection.execute(f"INSERT INTO {table}:client, :count, :chain)", fields)
        content = connection.serialize()
        connection.close()
        if kind >= 8 or rng.random() < 0.1:
            content = mutate_bytes(content, rng)
        return content

    return Reader(corpus, case, _in_file(folder / "client.ledger", read))


def checkpoints(folder: Path) -> Reader:
    """Checkpoints: the JSON header of a safetensors file, its state, its offsets and its length."""
    from safetensors.numpy import save

    from bqsgd._src.records.checkpoint import FILE_NAME, load_checkpoint, round_of, seconds_of, take

    model = np.linspace(-1, 1, 6, dtype=np.float32)
    state = {"round": 3, "run": "one", "elapsed_seconds": 1.5}
    corpus = [
        save({"model": model, **more}, metadata={"format": "bqsgd.checkpoint.v1", "state": json.dumps(state)})
        for more in ({}, {"averaged": model, "momentum": model.astype(np.float64)})
    ]

    def case(content: bytes, rng: random.Random) -> bytes:
        if rng.random() < 0.7:
            size = struct.unpack_from("<Q", content)[0]
            header = json.loads(content[8 : 8 + size])
            if rng.random() < 0.4:
                header["__metadata__"]["state"] = json_text(mutate_tree(state, rng))
            else:
                header = mutate_tree(header, rng)
            text = json_text(header).encode(errors="surrogatepass")
            stated = rng.choice([0, 1, 2**40, 2**63, 2**64 - 1]) if rng.random() < 0.05 else len(text)
            content = struct.pack("<Q", stated) + text + content[8 + size :]
        return mutate_bytes(content, rng) if rng.random() < 0.4 else content

    def read(path: Path) -> object:
        loaded = load_checkpoint(path.parent)
        assert loaded is not None
        arrays, state = loaded
        return round_of(state), seconds_of(state), take(arrays, "model", model)

    return Reader(corpus, case, _in_file(folder / FILE_NAME, read))


def run_folders(folder: Path) -> Reader:
    """Run folders: one of the three files changed; now and then the page is made too."""
    from bqsgd._src.records.folder import CONFIG, ROUNDS, SUMMARY, read_history
    from bqsgd._src.reports.page import run_page
    from bqsgd._src.settings.config import Config

    client = {"client": 0, "status": "ok", "reason": None, "frame_bytes": 500, "levels": 2, "trials": 251, "points": 0}
    line = {
        "round": 0, "time": 1.5, "test_accuracy": 0.5, "test_loss": 1.0, "epsilon_max": 0.4, "nominal_epsilon": "inf",
        "bytes_up": 1000, "bytes_down": 2000, "bytes_up_float32": 4000, "stepped": True, "seeded": False,
        "clients": [client, {**client, "client": 1, "status": "declined", "reason": "x", "width": 3}],
        "seconds": {"encode": 0.1, "frame": 0.2},
    }  # fmt: skip
    summary = {
        "accuracy": 0.9, "loss": 0.3, "rounds": 2, "guarantee": guarantee_tree(), "guarantee_client": 0,
        "nominal_epsilon": None, "bytes_up": 10, "bytes_down": 20, "bytes_up_float32": 40, "seeded": False,
        "seconds": 3.5, "versions": {"python": "3.11"}, "config": {"privacy": {"epsilon": 3.0}},
    }  # fmt: skip
    valid = {
        CONFIG: toml_text(Config().to_dict()).encode(),
        ROUNDS: b"".join(json_text({**line, "round": number}).encode() + b"\n" for number in range(3)),
        SUMMARY: json_text(summary).encode(),
    }
    documents = [(CONFIG, Config().to_dict(), toml_text), (ROUNDS, line, json_text), (SUMMARY, summary, json_text)]

    def case(document: tuple[str, Any, Callable[[Any], str]], rng: random.Random) -> tuple[str, bytes, bool]:
        name, tree, write = document
        content = _document(write)(tree, rng)
        if name == ROUNDS:
            content = rng.choice([valid[ROUNDS], b""]) + content.replace(b"\n", b" ") + rng.choice([b"\n", b"\n", b""])
        return name, content, rng.random() < 0.01

    def read(changed: tuple[str, bytes, bool]) -> object:
        name, content, shown = changed
        for each, usual in valid.items():
            (folder / each).write_bytes(content if each == name else usual)
        history = read_history(folder)
        if shown:
            run_page(history)
        return history.figures, history.bits_per_coordinate, history.mechanism

    return Reader(documents, case, read)


def model_messages(folder: Path) -> Reader:
    """Model messages, sealed again."""
    from bqsgd._src.wire.model_message import read_model, write_model

    corpus = [write_model(np.linspace(-1, 1, 20, dtype=np.float32), round=number) for number in (0, 7)]
    fields = [(0, "<I"), (4, "<H"), (6, "<H"), (8, "<Q"), (16, "<Q")]

    def case(message: bytes, rng: random.Random) -> bytes:
        data = bytearray(message)
        if rng.random() < 0.5:
            at, form = rng.choice(fields)
            struct.pack_into(form, data, at, rng.choice([0, 1, 2, 21, 2**15, rng.getrandbits(15)]))
        if rng.random() < 0.3:
            value = rng.choice([np.nan, np.inf, -np.inf, 1e-40, 3e38])
            struct.pack_into("<f", data, 32 + 4 * rng.randrange(20), value)
        if rng.random() < 0.4:
            data = bytearray(mutate_bytes(bytes(data), rng))
        if len(data) >= 32 and rng.random() < 0.8:
            struct.pack_into("<Q", data, 24, xxhash.xxh3_64_intdigest(bytes(data[:24] + data[32:])))
        return bytes(data)

    return Reader(corpus, case, lambda content: read_model(content, dimension=20))


def model_changes(folder: Path) -> Reader:
    """Changes of a model that the reader holds, sealed again, with a digest that may be right."""
    from bqsgd._src.wire.model_change import CHANGE_HEADER_BYTES, make_change, receive_model, write_changes
    from bqsgd._src.wire.model_message import ModelMessage

    held = ModelMessage(round=6, model=np.linspace(-1, 1, 20, dtype=np.float32))
    corpus = []
    for bits in (2, 3, 7):
        change, model = make_change(held.model, held.model * 1.01, bits=bits)
        corpus.append(write_changes([change], model=model, round=7))
    fields = [(0, "<I"), (4, "<H"), (6, "<H"), (8, "<Q"), (16, "<Q"), (24, "<I"), (28, "<I"), (32, "<Q")]

    def case(message: bytes, rng: random.Random) -> bytes:
        data = bytearray(message)
        if rng.random() < 0.5:
            at, form = rng.choice(fields)
            struct.pack_into(form, data, at, rng.choice([0, 1, 2, 7, 21, 2**15, rng.getrandbits(15)]))
        if rng.random() < 0.3:
            value = rng.choice([np.nan, np.inf, -np.inf, -1.0, 1e-45, 3e38])
            struct.pack_into("<f", data, CHANGE_HEADER_BYTES, value)
        if rng.random() < 0.4:
            data = bytearray(mutate_bytes(bytes(data), rng))
        if len(data) >= CHANGE_HEADER_BYTES and rng.random() < 0.8:
            sealed = bytes(data[:40] + data[CHANGE_HEADER_BYTES:])
            struct.pack_into("<Q", data, 40, xxhash.xxh3_64_intdigest(sealed))
        return bytes(data)

    return Reader(corpus, case, lambda content: receive_model(content, dimension=20, held=held))


def model_steps(folder: Path) -> Reader:
    """Steps from a model that the reader holds, and whole models with the optimizer's memory, sealed again."""
    from bqsgd._src.descent.descent import Descent, moved
    from bqsgd._src.settings.client_plan import sum_plan
    from bqsgd._src.settings.config import Config
    from bqsgd._src.wire.model_message import ModelMessage, write_model
    from bqsgd._src.wire.model_steps import STEPS_HEADER_BYTES, Aggregate, state_digest, write_steps

    config = Config.of(clients=4, secure=True, dropouts=1, levels=5, trials=60, range=1.0, rounds=20, optimizer="adam")
    plan = sum_plan(config, dimension=20)
    descent = Descent(config=config, dimension=20, subsets=None, sums=plan)
    model, memory = np.linspace(-1, 1, 20, dtype=np.float32), np.linspace(0, 1, 41)
    held = ModelMessage(round=6, model=model, memory=memory)
    corpus = [write_model(model, round=7, memory=memory)]
    for widths in ((9,), (2, 8, 21), (0, 5)):
        after, state, parts = model, dict(zip(("mean", "square", "steps"), np.split(memory, [20, 40]), strict=True)), []
        for round, width in enumerate(widths, start=held.round):
            aggregate = Aggregate(messages=0)
            if width:
                numbers = np.arange(20, dtype=np.uint32) % (1 << width)
                aggregate = Aggregate(messages=4, width=width, numbers=numbers)
                gradient, variance = descent.gradient(aggregate, round=round)
                state, step = descent.step(state, gradient, model=after, variance=variance, round=round)
                after = moved(after, step)
            parts.append(aggregate.part())
        remembered, last = descent.memory(state), held.round + len(parts)
        corpus.append(write_steps(parts, kind=descent.kind, one_in=1, model=after, memory=remembered, round=last))
    places = [(0, "<I"), (4, "<H"), (6, "<H"), (8, "<Q"), (16, "<Q"), (24, "<I"), (28, "<I"), (48, "<I"), (52, "<I")]

    def case(message: bytes, rng: random.Random) -> bytes:
        data = bytearray(message)
        if rng.random() < 0.5:
            at, form = rng.choice(places)
            struct.pack_into(form, data, at, rng.choice([0, 1, 2, 3, 4, 9, 21, 32, 2**15, rng.getrandbits(15)]))
        if rng.random() < 0.3:
            struct.pack_into("<d", data, rng.randrange(len(data) - 8), rng.choice([np.nan, -np.inf, 1e308, -1.0]))
        if rng.random() < 0.4:
            data = bytearray(mutate_bytes(bytes(data), rng))
        # Whole models have their checksum at 24.
        at = 24 if data[:4] == b"BQSM" else STEPS_HEADER_BYTES - 8
        if len(data) >= at + 8 and rng.random() < 0.8:
            struct.pack_into("<Q", data, at, xxhash.xxh3_64_intdigest(bytes(data[:at] + data[at + 8 :])))
        return bytes(data)

    def read(content: bytes) -> int:
        received = descent.receive(content, held=held)
        assert np.isfinite(received.model).all()
        return 0 if received.memory is None else state_digest(received.model, received.memory)

    return Reader(corpus, case, read)


def data_files(folder: Path) -> Reader:
    """IDX files of images and labels."""
    from bqsgd._src.data.dataset import parse_idx

    corpus = [struct.pack(">4B3I", 0, 0, 8, 3, 4, 5, 6) + bytes(120), struct.pack(">4BI", 0, 0, 8, 1, 9) + bytes(9)]

    def case(content: bytes, rng: random.Random) -> bytes:
        data = bytearray(content)
        if rng.random() < 0.6:
            struct.pack_into(">I", data, 4, rng.choice([0, 1, 4, 9, 2**16, 2**31, 2**32 - 1]))
        return mutate_bytes(bytes(data), rng) if rng.random() < 0.7 else bytes(data)

    return Reader(corpus, case, lambda content: parse_idx(content, dimensions=1 if content[3:4] == b"\1" else 3))


def sum_messages(kind: str) -> Callable[[Path], Reader]:
    """One kind of message of a secure sum, on both graphs."""

    def reader(folder: Path) -> Reader:
        from experiments.assurance.fuzz_sums import message_case, sum_corpus

        from bqsgd._src.secure.messages import Kind

        corpus, read = sum_corpus(Kind[kind.upper().replace(" ", "_")])

        def case(content: tuple[bool, bytes], rng: random.Random) -> bytes:
            return bytes([content[0]]) + message_case(content[1], rng, mutate_bytes)

        return Reader(corpus, case, lambda content: read(bool(content[0]), content[1:]))

    return reader


def kept_states(folder: Path) -> Reader:
    """What a client of a secure sum keeps between messages."""
    from experiments.assurance import fuzz_sums

    corpus, read = fuzz_sums.kept_states()
    return Reader(corpus, _document(json_text), read)


SUM_MESSAGES = (
    "batch", "keys", "key bundle", "shares", "share bundle", "partners", "partner bundle", "masked", "survivors",
    "signature", "certificate", "unmasking", "silent", "recovery",
)  # fmt: skip
READERS: dict[str, Callable[[Path], Reader]] = {
    "guarantees": guarantees,
    "first messages": first_messages,
    "rosters": rosters,
    "configs": configs,
    "ledgers": ledgers,
    "registers": registers,
    "checkpoints": checkpoints,
    "run folders": run_folders,
    "model messages": model_messages,
    "model changes": model_changes,
    "model steps": model_steps,
    "data files": data_files,
    "kept states of secure sums": kept_states,
    **{f"secure sums: {kind}": sum_messages(kind) for kind in SUM_MESSAGES},
}


class Undocumented(AssertionError):
    """A reader raised something it does not document; the message holds the case."""


def fuzz(name: str, *, cases: int, seed: int = SEED) -> dict[str, Any]:
    """Read `cases` mutated documents; every outcome counted by its name."""
    rng, seen, slowest = random.Random(f"{name} {seed}"), collections.Counter[str](), 0.0
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        reader = READERS[name](Path(folder))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for number in range(cases):
            case = reader.case(rng.choice(reader.corpus), rng)
            began = time.process_time()
            try:
                outcome = "dropped" if reader.read(case) is None else "accepted"
            except BqsgdError as error:
                outcome = type(error).__name__
                if len(str(error)) > 10_000:
                    raise Undocumented(f"{name}, case {number}: a message of {len(str(error))} characters") from error
            except Exception as error:
                raise Undocumented(f"{name}, case {number}: {type(error).__name__}: {str(case)[:2000]}") from error
            slowest = max(slowest, time.process_time() - began)
            seen[outcome] += 1
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    return {
        "cases": seen.total(),
        "undocumented": 0,
        "outcomes": dict(seen.most_common()),
        "slowest_cpu_seconds": round(slowest, 3),
        "memory_grown_mib": round(grown, 1),
    }


def main() -> None:
    """Run the batteries that were named, or all, and write their counts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("readers", nargs="*", help=f"of {', '.join(READERS)}; all by default")
    parser.add_argument("--cases", type=int, default=CASES)
    asked = parser.parse_args()
    outcomes = {}
    for name in asked.readers or READERS:
        outcomes[name] = fuzz(name, cases=asked.cases)
        print(name, json.dumps(outcomes[name]), flush=True)
    if asked.cases >= CASES:
        before = json.loads(RESULTS.read_text())["readers"] if asked.readers else {}
        RESULTS.write_text(json.dumps({"seed": SEED, "readers": before | outcomes}, indent=2) + "\n")


if __name__ == "__main__":
    main()
