"""`examples/client.mjs` under Node and in Chromium: what it reads and refuses, its frames, and the law of its noise.

Both engines run the same file and the same checks. Statistical tests state their false-alarm rate: about 1e-9 each.
"""

from __future__ import annotations

import base64
import json
import shutil
import struct
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from scipy import stats

from bqsgd._src.codec import decode_frame
from bqsgd._src.errors import FrameError
from bqsgd._src.mechanism.coarsening import coarse_law
from bqsgd._src.mechanism.encoder import decode
from bqsgd._src.noise import ROUND_BITS
from bqsgd._src.params import MAX_LEVELS, MAX_TRIALS, Coarsening, Mechanism, code_dtype, parameters_digest
from bqsgd._src.server.server import Server
from bqsgd._src.settings.config import Config
from bqsgd._src.subset import Subsets
from bqsgd._src.wire.fixed import MAX_CODE_COUNT, FixedWidth
from bqsgd._src.wire.frame import Coding, FrameWriter, Header, read_frame
from bqsgd._src.wire.model_message import write_model

CLIENT = Path(__file__).resolve().parents[2] / "examples" / "client.mjs"
NODE = shutil.which("node")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
QUIET = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--no-first-run",
]
FALSE_ALARM = 1e-9
MECHANISMS = [
    Mechanism(levels=1, trials=0),
    Mechanism(levels=1, trials=1),
    Mechanism(levels=2, trials=251),
    Mechanism(levels=10, trials=189),
    Mechanism(levels=30, trials=60),  # K = 121: words of 124 bits
    Mechanism(levels=52, trials=4079),
    Mechanism(levels=1 << 20, trials=33),
    Mechanism(levels=2, trials=251, coarsening=Coarsening(points=16, width=45)),
    Mechanism(levels=26, trials=189, coarsening=Coarsening(points=7, width=63)),
]
PRELUDE = """
const bytes = (text) => Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
const text = (bytes) => btoa(Array.from(bytes, (byte) => String.fromCharCode(byte)).join(""));
const floats = (text) => new Float32Array(bytes(text).buffer);
const doubles = (text) => new Float64Array(bytes(text).buffer);
const outcome = async (action) => {
  try { await action(); return "taken"; } catch (error) { return error.reason ?? `${error}`; }
};
"""
Run = Callable[[str, Any], Any]


def base64_of(data: Any) -> str:
    return base64.b64encode(bytes(data)).decode()


def fields_of(mechanism: Mechanism) -> dict[str, Any]:
    """The mechanism as the JavaScript client takes it."""
    return mechanism.to_dict()


class Site(ThreadingHTTPServer):
    """A carrier on the loopback interface: the client's file, a round's model message, and the way back for frames."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server_port}"
        self.server: Server | None = None
        self.message = b""


class Handler(BaseHTTPRequestHandler):
    server: Site

    def do_GET(self) -> None:
        answers = {
            "/": ("text/html", b"<!doctype html><title>client</title><link rel=icon href='data:,'>"),
            "/client.mjs": ("text/javascript", CLIENT.read_bytes()),
            "/model": ("application/octet-stream", self.server.message),
        }
        self.answer(*answers[self.path])

    def do_POST(self) -> None:
        frame = self.rfile.read(int(self.headers["Content-Length"]))
        assert self.server.server is not None
        receipt = self.server.server.receive(frame)
        self.answer("application/json", json.dumps([receipt.status, receipt.reason]).encode())

    def answer(self, kind: str, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with Site() as site:
        thread = threading.Thread(target=site.serve_forever, daemon=True)
        thread.start()
        yield site
        site.shutdown()
        thread.join()


NODE_LOOP = f"""
{PRELUDE}
import {{ createInterface }} from "node:readline";
const client = await import({json.dumps(CLIENT.as_uri())});
for await (const line of createInterface({{ input: process.stdin }})) {{
  const {{ body, argument }} = JSON.parse(line);
  let answer;
  try {{ answer = {{ result: await eval(body)(client, argument) }}; }}
  catch (error) {{ answer = {{ error: error.stack }}; }}
  process.stdout.write(`${{JSON.stringify(answer)}}\\n`);
}}
"""


@contextmanager
def node() -> Iterator[Run]:
    """One process of Node that calls functions as they come, a line each."""
    command = [str(NODE), "--input-type=module", "--eval", NODE_LOOP]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def call(body: str, argument: Any) -> Any:
            process.stdin.write(json.dumps({"body": f"({body})", "argument": argument}) + "\n")
            process.stdin.flush()
            answer = json.loads(process.stdout.readline())
            assert "error" not in answer, answer["error"]
            return answer.get("result")

        yield call
        process.stdin.close()
        assert process.wait() == 0


@contextmanager
def chromium(address: str) -> Iterator[Run]:
    """A page of the loopback site that calls functions; it may log nothing."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, headless=True, args=QUIET)
        page = browser.new_page()
        troubles: list[str] = []
        page.on("console", lambda message: troubles.append(message.text))
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.goto(address)

        def call(body: str, argument: Any) -> Any:
            return page.evaluate(
                f"""async (argument) => {{
                    {PRELUDE}
                    return ({body})(await import("/client.mjs"), argument);
                }}""",
                argument,
            )

        yield call
        browser.close()
        assert troubles == []


@pytest.fixture(scope="module", params=["node", "chromium"])
def run(request: pytest.FixtureRequest, site: Site) -> Iterator[Run]:
    """Call an async JavaScript function (client module, argument) in one of the two engines."""
    if request.param == "node" and NODE is None:
        pytest.skip("no node on this machine: install Node 20 to test the JavaScript client")
    if request.param == "chromium" and CHROMIUM is None:
        pytest.skip("no chromium on this machine: install Debian's `chromium` to test the client in a browser")
    with node() if request.param == "node" else chromium(site.address) as call:
        yield call


ANSWER = """async (client, { message, values, settings, bounds }) => {
    const range = bounds === undefined ? settings.range : doubles(bounds);
    return text(await client.answer(bytes(message), () => floats(values), { ...settings, range }));
}"""


def frame_of(
    run: Run,
    values: np.ndarray,
    mechanism: Mechanism,
    *,
    range: float | np.ndarray = 1.0,
) -> bytes:
    """The answer of client 3 to a model message of round 7."""
    values = np.asarray(values, np.float32)
    argument: dict[str, Any] = {
        "message": base64_of(write_model(np.zeros(values.size, np.float32), round=7)),
        "values": base64_of(values.tobytes()),
        "settings": {"client": 3, "dimension": values.size, "mechanism": fields_of(mechanism)},
    }
    if isinstance(range, np.ndarray):
        argument["bounds"] = base64_of(range.tobytes())
    else:
        argument["settings"]["range"] = range
    return base64.b64decode(run(ANSWER, argument))


def codes_of(frame: bytes) -> np.ndarray:
    read = read_frame(frame)
    return FixedWidth(read.header.mechanism.code_count).unpack(read.payload, read.header.dimension)


# ---- The parts, against Python's -------------------------------------------------------------------------------------


def test_checksum_is_xxh3(run):
    """Every branch of the algorithm: all lengths to 300, then block ends, then a model of LeNet-5's size."""
    rng = np.random.default_rng(1)
    lengths = [*range(17, 301), 511, 512, 513, 1023, 1024, 1025, 1088, 1089, 2048, 2049, 5000, 246_848]
    inputs = [rng.bytes(length) for length in lengths]
    found = run(
        "async (client, inputs) => inputs.map((input) => client.xxh3(bytes(input)).toString(16))",
        [base64_of(data) for data in inputs],
    )
    assert [int(digest, 16) for digest in found] == [xxhash.xxh3_64_intdigest(data) for data in inputs]


def test_payloads_are_python_s_byte_for_byte(run):
    rng = np.random.default_rng(2)
    counts = [*range(2, 132), 241, 242, 481, 482, 16384, 16385, 65536, 65537, MAX_CODE_COUNT]
    counts += [int(count) for count in np.exp(rng.uniform(np.log(300), np.log(MAX_CODE_COUNT), 60))]
    vectors = [rng.integers(0, count, rng.integers(1, 140)).astype(code_dtype(count)) for count in counts]
    for codes, count in zip(vectors, counts, strict=True):
        codes[0] = count - 1
    found = run(
        "async (client, cases) => cases.map(([count, codes]) => text(client.pack(Uint32Array.from(codes), count)))",
        [[count, codes.tolist()] for count, codes in zip(counts, vectors, strict=True)],
    )
    for count, codes, payload in zip(counts, vectors, found, strict=True):
        expected = np.empty(FixedWidth(count).payload_bytes(codes.size), np.uint8)
        FixedWidth(count).pack(codes, expected)
        assert base64.b64decode(payload) == expected.tobytes(), f"K = {count}"


@pytest.mark.parametrize("vector", [False, True], ids=["one range", "a range per coordinate"])
def test_decoded_values_agree_bit_for_bit(run, vector):
    rng = np.random.default_rng(3)
    for mechanism in MECHANISMS:
        codes = rng.integers(0, mechanism.code_count, 500).astype(code_dtype(mechanism.code_count))
        range_ = rng.uniform(0.01, 3.0, 500) if vector else float(rng.uniform(0.01, 3.0))
        found = run(
            """async (client, { codes, mechanism, range, bounds }) => text(new Uint8Array(client.decode(
                Uint32Array.from(codes), mechanism, bounds === null ? range : doubles(bounds)).buffer))""",
            {
                "codes": codes.tolist(),
                "mechanism": fields_of(mechanism),
                "range": None if vector else range_,
                "bounds": base64_of(range_.tobytes()) if vector else None,
            },
        )
        assert base64.b64decode(found) == decode(codes, mechanism, range=range_).astype("<f8").tobytes()


@pytest.mark.parametrize("vector", [False, True], ids=["one range", "a range per coordinate"])
def test_the_rounding_probability_is_python_s_to_its_last_step(run, vector):
    """A generator that repeats one draw shows on which side of it the fraction lies: exact, no statistics.

    The carry happens for draw < fraction only, so the two draws at the fraction pin it to one step of 2^-24.
    """
    rng, count = np.random.default_rng(4), 200_000
    levels = np.exp(rng.uniform(0, np.log(MAX_LEVELS), count)).astype(int)
    levels[::2] = MAX_LEVELS - np.arange(count // 2) // 100
    bounds = np.exp(rng.normal(size=count))
    values = (bounds * rng.uniform(-1.2, 1.2, count)).astype(np.float32).astype(np.float64)
    cut, scale = np.clip(values, -bounds, bounds), levels * 2.0**ROUND_BITS
    by_quotient = np.floor(cut / bounds * scale + (scale + 0.5)).astype(int)
    by_factor = np.floor(cut * (scale / bounds) + (scale + 0.5)).astype(int)
    telling = np.flatnonzero(by_quotient != by_factor)  # the order of operations shows in few places: take all of them
    assert telling.size > 10
    picked = np.concatenate([np.arange(500), telling])
    whole, fraction = np.divmod((by_quotient if vector else by_factor)[picked], 1 << ROUND_BITS)
    columns = (levels[picked], bounds[picked], values[picked], whole, fraction)
    cases = list(zip(*(column.tolist() for column in columns), strict=True))
    found = run(
        """async (client, { cases, vector }) => {
            const real = crypto.getRandomValues;
            try {
                return cases.map(([levels, bound, value, whole, fraction]) => [fraction - 1, fraction].map((draw) => {
                    if (draw < 0) return null;
                    crypto.getRandomValues = (words) => words.fill(draw * 256 + 77);
                    const range = vector ? Float64Array.of(bound) : bound;
                    return client.encode(Float64Array.of(value), { levels, trials: 0 }, range)[0] - whole;
                }));
            } finally { crypto.getRandomValues = real; }
        }""",
        {"cases": cases, "vector": vector},
    )
    assert found == [[1 if fraction else None, 0] for *_, fraction in cases]


def test_the_noise_is_the_number_of_ones_among_fresh_bits(run):
    """From known words, exactly: one for the rounding, then m bits, each read once. Fair bits then give Bin(m, 1/2)."""
    rng = np.random.default_rng(7)
    cases = [
        (trials, rng.integers(0, 2**32, 35).tolist())
        for trials in (1, 2, 31, 32, 33, 63, 64, 251, 1024)
        for _ in range(50)
    ]
    codes = run(
        """async (client, cases) => {
            const real = crypto.getRandomValues;
            try {
                return cases.map(([trials, words]) => {
                    crypto.getRandomValues = (room) => room.set(words);
                    return client.encode(new Float32Array(1), { levels: 1, trials }, 1)[0];
                });
            } finally { crypto.getRandomValues = real; }
        }""",
        cases,
    )
    bits = ["".join(f"{word:032b}" for word in words[1:]) for _, words in cases]
    assert codes == [1 + ones[:trials].count("1") for (trials, _), ones in zip(cases, bits, strict=True)]


def test_the_rounding_to_points_draws_without_bias(run):
    """A draw below 6 from a word of 32 bits: the four words beyond the last multiple of 6 are drawn again.

    Levels 1, trials 1, value 0, no noise: fine code 1 of 0 to 3, 2/6 of the way to the upper of two points.
    """
    codes = run(
        """async (client, lasts) => {
            const real = crypto.getRandomValues;
            try {
                return lasts.map((last) => {
                    crypto.getRandomValues = (words) => words.set([0, 0, ...last]);
                    const mechanism = { levels: 1, trials: 1, coarsening: { points: 2, width: 3 } };
                    return client.encode(new Float32Array(1), mechanism, 1)[0];
                });
            } finally { crypto.getRandomValues = real; }
        }""",
        [[0], [1], [2], [5], [2**32 - 5], [2**32 - 4, 1], [2**32 - 1, 1], [2**32 - 1, 2**32 - 3, 2]],
    )
    assert codes == [1, 1, 0, 0, 0, 1, 1, 0]


# ---- The model message -----------------------------------------------------------------------------------------------


READ_MODEL = """async (client, { message, dimension }) => {
    const { round, model } = client.readModel(bytes(message), { dimension });
    return [round.toString(), text(new Uint8Array(model.buffer))];
}"""


@pytest.mark.parametrize(("dimension", "round_"), [(1, 0), (7, 2**63 - 1), (61_706, 12)])
def test_model_messages_are_read(run, dimension, round_):
    model = np.random.default_rng(dimension).normal(size=dimension).astype(np.float32)
    # Also with the memory of sgd with momentum, and of adam: this client does not need it.
    for memory in (None, np.ones(dimension), np.ones(2 * dimension + 1)):
        message = write_model(model, round=round_, memory=memory)
        read_round, read_values = run(READ_MODEL, {"message": base64_of(message), "dimension": dimension})
        assert int(read_round) == round_
        assert base64.b64decode(read_values) == model.astype("<f4").tobytes()


def sealed(head: bytes, body: bytes) -> bytes:
    """Any header and values with a right checksum."""
    return head + struct.pack("<Q", xxhash.xxh3_64_intdigest(head + body)) + body


def test_every_fault_of_a_model_message_is_refused(run):
    head = struct.Struct("<4sHHQQ")
    good = (b"BQSM", 1, 1, 7, 2)
    body = np.array([1.0, -0.5], "<f4").tobytes()
    whole = sealed(head.pack(*good), body)
    assert whole == write_model(np.array([1.0, -0.5], np.float32), round=7)
    faults = [
        ("length", b""),
        ("length", whole[:31]),
        ("magic", sealed(head.pack(b"BQSG", *good[1:]), body)),
        ("version", sealed(head.pack(b"BQSM", 2, 1, 7, 2), body)),
        ("dtype", sealed(head.pack(b"BQSM", 1, 3, 7, 2), body)),
        *(("length", sealed(head.pack(b"BQSM", 1, 2, 7, 2), body + bytes(more))) for more in (0, 7, 48)),
        ("magic", b"BQST" + whole[4:]),
        ("dimension", sealed(head.pack(b"BQSM", 1, 1, 7, 3), body + bytes(4))),
        ("dimension", sealed(head.pack(b"BQSM", 1, 1, 7, 2**64 - 1), body)),
        ("length", whole[:-1]),
        ("length", whole + b"\0"),
        ("checksum", whole[:-1] + bytes([whole[-1] ^ 1])),
        ("checksum", sealed(head.pack(b"BQSM", 1, 1, 7, 2), body)[:24] + bytes(8) + body),
        ("round", sealed(head.pack(b"BQSM", 1, 1, 2**63, 2), body)),
        *(
            ("not-finite", sealed(head.pack(*good), np.array([1, bad], "<f4").tobytes()))
            for bad in (np.nan, np.inf, -np.inf)
        ),
    ]
    found = run(
        """async (client, messages) => {
            const found = [];
            for (const message of messages) {
                found.push(await outcome(() => client.readModel(bytes(message), { dimension: 2 })));
            }
            return found;
        }""",
        [base64_of(message) for message in [whole, *(message for _, message in faults)]],
    )
    assert found == ["taken", *(reason for reason, _ in faults)]


def test_any_changed_byte_of_a_model_message_is_noticed(run):
    message = write_model(np.linspace(-1, 1, 5, dtype=np.float32), round=7)
    taken = run(
        """async (client, message) => {
            let taken = 0;
            for (let at = 0; at < bytes(message).length; at += 1) {
                for (let flip = 1; flip < 256; flip += 1) {
                    const damaged = bytes(message);
                    damaged[at] ^= flip;
                    if (await outcome(() => client.readModel(damaged, { dimension: 5 })) === "taken") taken += 1;
                }
            }
            return taken;
        }""",
        base64_of(message),
    )
    assert taken == 0


# ---- Frames ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dimension", [1, 7, 61_706])
@pytest.mark.parametrize("mechanism", MECHANISMS, ids=str)
def test_frames_are_accepted_and_hold_the_values(run, mechanism, dimension):
    values = np.random.default_rng(dimension).uniform(-0.5, 0.5, dimension).astype(np.float32)
    frame = frame_of(run, values, mechanism, range=0.5)
    known = {"mechanism": mechanism, "range": 0.5, "dimension": dimension, "client": 3, "round": 7}
    read = read_frame(frame, **known)
    assert read.header.coding is Coding.FIXED
    assert not read.header.seeded
    assert len(frame) == 80 + FixedWidth(mechanism.code_count).payload_bytes(dimension)
    decoded = decode_frame(frame, **known)
    if mechanism.coarsening is None:  # the noise moves a code by at most m/2, the rounding by less than 1
        assert np.abs(decoded - values).max() < 0.5 / mechanism.levels * (mechanism.trials / 2 + 1)


def test_a_range_per_coordinate(run):
    rng = np.random.default_rng(5)
    bounds, mechanism = rng.uniform(0.1, 2.0, 1001), Mechanism(levels=1 << 18, trials=0)
    values = (bounds * rng.uniform(-1.5, 1.5, 1001)).astype(np.float32)
    decoded = decode_frame(frame_of(run, values, mechanism, range=bounds), range=bounds, mechanism=mechanism)
    assert np.all(np.abs(decoded - np.clip(values, -bounds, bounds)) <= bounds / mechanism.levels)


def test_the_header_is_written_to_the_byte(run):
    """The same codes, framed by both: client and round beyond 53 bits too."""
    mechanism = Mechanism(levels=1, trials=1)
    writer = FrameWriter(
        Header(
            mechanism=mechanism,
            digest=parameters_digest(mechanism, range=0.1, dimension=2),
            client=2**64 - 2,
            round=2**63 + 1,
            dimension=2,
            seeded=False,
        )
    )
    FixedWidth(4).pack(np.array([1, 2], np.uint8), writer.payload)
    found = run(
        """async (client) => text(await client.writeFrame(Uint32Array.of(1, 2), {
            client: 2n ** 64n - 2n, round: 2n ** 63n + 1n, mechanism: { levels: 1, trials: 1 }, range: 0.1 }))""",
        None,
    )
    assert base64.b64decode(found) == bytes(writer.seal())


def test_subsets_are_python_s_and_the_server_takes_their_frames(run):
    shapes, one_in = [[10, 300], [10], [6, 1, 5, 5], [1], [3, 7]], 4
    some = Subsets(shapes=tuple(map(tuple, shapes)), one_in=one_in, rotated=True)
    gradient = np.random.default_rng(8).normal(size=some.dimension).astype(np.float32)
    argument = {
        "subsets": {"shapes": shapes, "oneIn": one_in, "rotated": True},
        "gradient": base64_of(gradient.tobytes()),
        "message": base64_of(write_model(np.zeros(some.dimension, np.float32), round=5)),
        "dimension": some.dimension,
    }
    found = run(
        """async (client, { subsets, gradient, message, dimension }) => {
            const drawn = await client.drawSubset(subsets, { round: 5n, client: null });
            const settings = { client: 3, dimension, mechanism: { levels: 1000, trials: 0 }, range: 8, subsets };
            const update = (model, round, subset) => client.keepPart(floats(gradient), subset);
            const frame = await client.answer(bytes(message), update, settings);
            const wrong = await outcome(() => client.answer(bytes(message), () => floats(gradient), settings));
            return { shared: Array.from(drawn.places), frame: text(frame), wrong };
        }""",
        argument,
    )
    assert found["shared"] == some.drawn(round=5, client=None).places.tolist()
    assert found["wrong"] == "dimension"
    frame = base64.b64decode(found["frame"])
    values = decode_frame(frame, range=8.0, kept=some.header, client=3, round=5)
    own = some.drawn(round=5, client=3)
    assert np.abs(values - own.keep(gradient)).max() <= 8 / 1000 * (1 + 1e-6)
    server = Server(
        model=np.zeros(some.dimension, np.float32),
        weights={3: 1.0},
        config=Config.of(
            clients=4, one_in=one_in, clip="l2", clip_norm=4.0, range=8.0, levels=1000, trials=0, epsilon=1e9
        ),
        subsets=some,
    )
    server.round = 5
    server.open_round()
    assert server.receive(frame).status == "ok"


def test_a_damaged_frame_is_refused_by_the_server_side(run):
    frame = frame_of(run, np.linspace(-1, 1, 40), Mechanism(levels=2, trials=251))
    decode_frame(frame, range=1.0, dimension=40, client=3, round=7)
    for at in range(len(frame)):
        damaged = bytearray(frame)
        damaged[at] ^= 0x20
        with pytest.raises(FrameError):
            decode_frame(damaged, range=1.0, dimension=40, client=3, round=7)
    for wrong in (
        {"range": 1.5},
        {"range": 1.0, "dimension": 41},
        {"range": 1.0, "client": 4},
        {"range": 1.0, "round": 8},
    ):
        with pytest.raises(FrameError):
            decode_frame(frame, **wrong)


def test_bad_input_is_refused_before_any_noise_is_drawn(run):
    cases = [
        ("taken", "encode([0.5], { levels: 2, trials: 9 }, 1)"),
        ("taken", "encode([1e30, -1e30], { levels: 2, trials: 9 }, 1)"),
        *(
            ("not-finite", f"encode([0, {bad}], {{ levels: 2, trials: 9 }}, 1)")
            for bad in ("NaN", "Infinity", "-Infinity")
        ),
        ("parameter", "encode([], { levels: 2, trials: 9 }, 1)"),
        ("parameter", "client.encode([0.5], { levels: 2, trials: 9 }, 1)"),
        *(
            ("parameter", f"encode([0.5], {{ levels: {bad}, trials: 9 }}, 1)")
            for bad in (0, MAX_LEVELS + 1, 1.5, '"2"')
        ),
        *(("parameter", f"encode([0.5], {{ levels: 2, trials: {bad} }}, 1)") for bad in (-1, MAX_TRIALS + 1, "NaN")),
        *(
            ("parameter", f"encode([0.5], {{ levels: 2, trials: 9 }}, {bad})")
            for bad in ('"1"', 0, -1, "NaN", "Infinity")
        ),
        ("parameter", "encode([0.5], { levels: 2, trials: 9 }, undefined)"),
        ("parameter", "encode([0.5], { levels: 2, trials: 9 }, Float64Array.of(1, 1))"),
        ("parameter", "encode([0.5], { levels: 2, trials: 9 }, Float64Array.of(NaN))"),
        ("parameter", "encode([0.5], { levels: 2, trials: 9, coarsening: { points: 1, width: 3 } }, 1)"),
        ("parameter", "encode([0.5], { levels: 2, trials: 9, coarsening: { points: 14, width: 3 } }, 1)"),
        ("parameter", "encode([0.5], { levels: 2, trials: 9, coarsening: { points: 4, width: 0 } }, 1)"),
        ("law", 'encode([0.5], { levels: 2, trials: 8, noise: { kind: "discrete gaussian", sigma: 0.5 } }, 1)'),
        ("law", "frame([1], { mechanism: { levels: 2, trials: 38, noise: { kind: 'geometric', alpha: 0.1 } } })"),
        ("taken", "frame([13], {})"),
        ("code", "frame([14], {})"),
        ("code", "frame([], {})"),
        *(("parameter", f"frame([1], {{ client: {bad} }})") for bad in (-1, "2n ** 64n", 0.5, "2 ** 60", "undefined")),
        *(("parameter", f"frame([1], {{ round: {bad} }})") for bad in (-1, "2n ** 64n", '"1"')),
        ("dimension", "client.answer(message, () => new Float32Array(3), settings)"),
        ("not-finite", "client.answer(message, () => Float32Array.of(0, NaN), settings)"),
        ("dimension", "client.answer(message, () => new Float32Array(3), { ...settings, dimension: 3 })"),
        ("taken", "client.answer(message, () => new Float32Array(2), settings)"),
    ]
    found = run(
        """async (client, { actions, model }) => {
            const message = bytes(model);
            const encode = (values, ...rest) => client.encode(Float64Array.from(values), ...rest);
            const frame = (codes, changes) => client.writeFrame(Uint32Array.from(codes),
                { client: 1, round: 2, mechanism: { levels: 2, trials: 9 }, range: 1, ...changes });
            const settings = { client: 1, dimension: 2, mechanism: { levels: 2, trials: 9 }, range: 1 };
            const real = crypto.getRandomValues;
            let draws = 0;
            crypto.getRandomValues = (words) => { draws += 1; return real.call(crypto, words); };
            const found = [];
            for (const action of actions) {
                draws = 0;
                const body = new Function("client", "encode", "frame", "message", "settings", `return ${action}`);
                const reason = await outcome(() => body(client, encode, frame, message, settings));
                found.push(reason === "taken" || draws === 0 ? reason : `${reason} after noise was drawn`);
            }
            crypto.getRandomValues = real;
            return found;
        }""",
        {
            "actions": [action for _, action in cases],
            "model": base64_of(write_model(np.zeros(2, np.float32), round=0)),
        },
    )
    assert list(zip(found, (action for _, action in cases), strict=True)) == cases


def test_without_randomness_there_is_no_frame(run):
    found = run(
        """async (client) => {
            const real = crypto.getRandomValues;
            crypto.getRandomValues = () => { throw new Error("no entropy"); };
            try {
                return await outcome(() => client.encode(new Float32Array(5), { levels: 1, trials: 3 }, 1));
            } finally { crypto.getRandomValues = real; }
        }""",
        None,
    )
    assert found == "Error: no entropy"


# ---- The server takes them -------------------------------------------------------------------------------------------


def test_a_round_with_the_server_over_http(run, site):
    """Two rounds of least squares: the model comes down, gradients go up, and the server steps by what they say."""
    target = np.linspace(-0.4, 0.4, 64).astype(np.float32)
    config = Config.of(
        clients=2,
        rounds=3,
        batch_size=1,
        clip="clamp",
        clip_bound=1.0,
        levels=1 << 18,
        trials=64,
        learning_rate=0.5,
        momentum=0.0,
        schedule="constant",
        seed=1,
    )
    server = Server(model=np.zeros(64, np.float32), weights={0: 1.0, 1: 1.0}, config=config)
    site.server = server
    expected = np.zeros(64)
    for _ in range(2):
        site.message = server.open_round()[0]
        receipts = run(
            """async (client, { address, mechanism, target }) => {
                const receipts = [];
                for (const sender of [0, 1, 1]) {
                    const message = new Uint8Array(await (await fetch(`${address}/model`)).arrayBuffer());
                    const gradient = (model) => model.map((value, j) => value - target[j]);
                    const settings = { client: sender, dimension: target.length, mechanism, range: 1.0 };
                    const body = await client.answer(message, gradient, settings);
                    receipts.push(await (await fetch(`${address}/frame`, { method: "POST", body })).json());
                }
                return receipts;
            }""",
            {"address": site.address, "mechanism": {"levels": 1 << 18, "trials": 64}, "target": target.tolist()},
        )
        assert [status for status, _ in receipts] == ["ok", "ok", "refused"]
        assert "second frame" in receipts[2][1]
        outcome = server.close_round()
        assert outcome.stepped
        assert not outcome.seeded
        expected -= 0.5 * (expected - target)
    # Noise of 4 steps of 2^-18 per frame: 1e-3 is 65 standard deviations.
    np.testing.assert_allclose(server.model, expected, atol=1e-3)


# ---- The law of the noise --------------------------------------------------------------------------------------------


def chi_square(counts: np.ndarray, law: np.ndarray) -> float:
    """The p-value; cells of fewer than 100 expected codes are one cell, so that the asymptotic law holds far out."""
    expected = law * counts.sum()
    large = expected >= 100
    cells = [*zip(counts[large], expected[large], strict=True), (counts[~large].sum(), expected[~large].sum())]
    cells.sort(key=lambda cell: cell[1])
    if cells[0][1] < 100:  # what is left over joins the smallest cell
        (count, mass), (other, more), *rest = cells
        cells = [(count + other, mass + more), *rest]
    found, mean = np.array(cells).T
    return float(stats.chi2.sf(((found - mean) ** 2 / mean).sum(), len(cells) - 1))


def law_of(mechanism: Mechanism, value: float, *, coin: float = 0.5) -> np.ndarray:
    """The law of one code at a value of C = 1: exact binomial, stochastic rounding, coarsening."""
    position = value * mechanism.levels + mechanism.levels
    whole = int(np.floor(position))
    law = np.zeros(mechanism.fine_code_count + 1)
    noise = stats.binom.pmf(np.arange(mechanism.trials + 1), mechanism.trials, coin)
    for at, weight in ((whole, 1 - (position - whole)), (whole + 1, position - whole)):
        law[at : at + noise.size] += weight * noise
    law = law[: mechanism.fine_code_count]
    return law if mechanism.coarsening is None else coarse_law(mechanism, law)


@pytest.mark.parametrize(
    ("mechanism", "value"),
    [
        (Mechanism(levels=3, trials=0), 0.3125),
        (Mechanism(levels=1, trials=1), 0.0),
        (Mechanism(levels=4, trials=31), -0.75),
        (Mechanism(levels=4, trials=32), 0.34375),
        (Mechanism(levels=2, trials=64), 1.0),
        (Mechanism(levels=2, trials=251), 0.0),
        (Mechanism(levels=10, trials=189), -0.625),
        (Mechanism(levels=52, trials=4079), 0.015625),
        (Mechanism(levels=2, trials=251, coarsening=Coarsening(points=16, width=45)), 0.375),
        (Mechanism(levels=26, trials=189, coarsening=Coarsening(points=7, width=63)), -1.0),
    ],
    ids=str,
)
def test_codes_have_the_exact_law(run, mechanism, value):
    """Chi-square of 200,000 codes against the exact law; a coin of 0.51 instead of 0.5 would be found."""
    counts = np.bincount(codes_of(frame_of(run, np.full(200_000, value), mechanism)), minlength=mechanism.code_count)
    p_value = chi_square(counts, law_of(mechanism, value))
    print(f"chi-square p = {p_value:.4f} for {mechanism} at {value}")
    assert p_value > FALSE_ALARM
    if mechanism.trials > 1:
        assert chi_square(counts, law_of(mechanism, value, coin=0.51)) < FALSE_ALARM


def test_no_noise_is_used_twice(run):
    """Correlation with itself at every lag, and with a second vector: 8 standard errors, 131,072 lags: 2e-10."""
    mechanism, dimension = Mechanism(levels=1, trials=16), 1 << 17
    one, two = (codes_of(frame_of(run, np.zeros(dimension), mechanism)) - 9.0 for _ in range(2))
    for left, right in ((one, one), (one, two)):
        spectrum = np.fft.rfft(left, 2 * dimension) * np.conj(np.fft.rfft(right, 2 * dimension))
        correlation = np.fft.irfft(spectrum)[int(left is right) : dimension] / (
            mechanism.trials / 4 * np.sqrt(dimension)
        )
        assert np.abs(correlation).max() < 8


def test_values_are_unbiased(run):
    """400 values, 1,000 codes each: every mean within 7 standard errors, for all 400 together 1e-9."""
    mechanism, repeats = Mechanism(levels=10, trials=189), 1000
    values = np.random.default_rng(6).uniform(-0.7, 0.7, 400).astype(np.float32)
    decoded = decode_frame(frame_of(run, np.tile(values, repeats), mechanism, range=0.7), range=0.7)
    fraction = values.astype(float) / 0.7 * mechanism.levels % 1
    error = 0.7 / mechanism.levels * np.sqrt((mechanism.trials / 4 + fraction * (1 - fraction)) / repeats)
    assert np.all(np.abs(decoded.reshape(repeats, -1).mean(axis=0) - values) < 7 * error)


# ---- The command line ------------------------------------------------------------------------------------------------


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with what docs/wire.md shows on its command lines: the client, a model message, an update."""
    if NODE is None:
        pytest.skip("no node on this machine: install Node 20 to test the JavaScript client")
    (tmp_path / "examples").symlink_to(CLIENT.parent)
    update = np.linspace(-1, 1, 1000, dtype="<f4")
    (tmp_path / "update.f32").write_bytes(update.tobytes())
    (tmp_path / "model.bin").write_bytes(write_model(np.zeros(1000, np.float32), round=11))
    return tmp_path


def documented_commands() -> str:
    page = (CLIENT.parent.parent / "docs" / "wire.md").read_text(encoding="utf-8")
    (block,) = [block for block in page.split("```sh\n")[1:] if "client.mjs" in block]
    return block.split("```")[0]


def test_the_documented_commands_write_frames(place):
    done = subprocess.run(["bash", "-euc", documented_commands()], cwd=place, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    coarsening = Coarsening(points=16, width=45)
    for name, mechanism in (
        ("frame.bin", Mechanism(levels=2, trials=251)),
        ("coarse.bin", Mechanism(levels=2, trials=251, coarsening=coarsening)),
    ):
        frame = (place / name).read_bytes()
        decoded = decode_frame(frame, range=1.0, dimension=1000, mechanism=mechanism, client=3, round=11)
        assert decoded.std() > 1  # the noise is in: its standard deviation is sqrt(251) / 2 / 2 = 4, the values' 0.58


def test_the_command_line_refuses_and_writes_nothing(place):
    right = ["--client", "3", "--levels", "2", "--trials", "251", "--range", "1.0", "--update", "update.f32"]
    model = (place / "model.bin").read_bytes()
    (place / "short.f32").write_bytes(bytes(4 * 999))
    (place / "odd.f32").write_bytes(bytes(4 * 1000 - 1))
    (place / "nan.f32").write_bytes(np.full(1000, np.nan, "<f4").tobytes())
    (place / "old.bin").write_bytes(b"sent before")

    def call(options: list[str], message: bytes = model) -> subprocess.CompletedProcess[bytes]:
        command = [str(NODE), "examples/client.mjs", *options]
        return subprocess.run(command, cwd=place, input=message, capture_output=True, check=False)

    assert call(right).returncode == 0
    damaged = model[:-1] + bytes([model[-1] ^ 1])
    for options, message in (
        (right, damaged),
        (right, b""),
        ([*right, "--model", "missing.bin"], model),
        ([*right, "--frame", "old.bin"], model),
        ([*right[:-1], "short.f32"], model),
        ([*right[:-1], "odd.f32"], model),
        ([*right[:-1], "nan.f32"], model),
        (right[:-2], model),
        (right[2:], model),
        (["--client", "-3", *right[2:]], model),
        ([*right, "--points", "16"], model),
        ([*right, "--seed", "1"], model),
        (["--client", "3", "--levels", "2e0", *right[4:]], model),
    ):
        done = call(options, message)
        assert done.returncode == 2, options
        assert done.stdout == b"", options
        assert done.stderr, options
    assert (place / "old.bin").read_bytes() == b"sent before"
