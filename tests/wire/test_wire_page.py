"""What docs/wire.md states for writers of another reader or client, and no other test holds."""

import math
import re
import struct
from pathlib import Path

import numpy as np
import pytest
import zstandard

from bqsgd._src.codec import Accumulator
from bqsgd._src.descent.descent import Descent
from bqsgd._src.errors import BadPayload, CodeOutOfRange
from bqsgd._src.laws import Binomial
from bqsgd._src.mechanism.encoder import decode
from bqsgd._src.noise import CUT_LAW, ROUNDING_SLACK_STEPS
from bqsgd._src.params import MAX_TRIALS, Coarsening, Mechanism, code_dtype, parameters_digest
from bqsgd._src.secure.messages import HEADER_BYTES
from bqsgd._src.settings.client_plan import sum_plan
from bqsgd._src.settings.config import Config
from bqsgd._src.wire import entropy
from bqsgd._src.wire.fixed import FixedWidth
from bqsgd._src.wire.frame import Coding, FrameWriter, Header
from bqsgd._src.wire.model_change import make_change, write_changes
from bqsgd._src.wire.model_message import ModelMessage, write_model
from bqsgd._src.wire.model_steps import STEPS_HEADER_BYTES, Aggregate, StepKind, part_bytes, write_steps
from bqsgd._src.wire.reply import WHOLE_MODEL_NEEDED

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "wire.md").read_text(encoding="utf-8")
MECHANISMS = [
    Mechanism(levels=3, trials=10),
    Mechanism(levels=52, trials=4079),
    Mechanism(levels=26, trials=189, coarsening=Coarsening(points=7, width=63)),
]


def frame_of(codes, mechanism, *, range, client=3, round_=7, coding=Coding.FIXED):
    payload = None
    if coding is Coding.ENTROPY:
        payload = entropy.compress(codes, mechanism)
    writer = FrameWriter(
        Header(
            mechanism=mechanism,
            digest=parameters_digest(mechanism, range=range, dimension=codes.size),
            client=client,
            round=round_,
            dimension=codes.size,
            coding=coding,
            seeded=False,
        ),
        payload,
    )
    if payload is None:
        FixedWidth(mechanism.code_count).pack(codes, writer.payload)
    else:
        writer.payload[:] = np.frombuffer(payload, np.uint8)
    return bytes(writer.seal())


def test_worked_examples_are_what_the_library_writes():
    shown = [bytes.fromhex(found) for found in re.findall(r"`((?:[0-9a-f]{2} ){7,}[0-9a-f]{2})`", PAGE)]
    frame = frame_of(np.array([1, 2], np.uint8), Mechanism(levels=1, trials=1), range=0.1)
    assert struct.pack("<d", 0.1) in shown
    assert write_model(np.array([1.0, -0.5], np.float32), round=7) in shown
    assert frame in shown
    change, after = make_change(np.array([1.0, -0.5], np.float32), np.array([1.75, -0.75]), bits=3)
    assert write_changes([change], model=after, round=7) in shown
    assert WHOLE_MODEL_NEEDED in PAGE
    assert example_of_steps() in shown
    assert len(frame) == 81  # the shortest frame of fixed width


def example_of_steps():
    """The message that leads to the same model by a step, as the server writes it and a client repeats it."""
    config = Config.of(
        clients=4, secure=True, dropouts=0, levels=1, trials=0, range=1.0, momentum=0.0, schedule="constant",
        learning_rate=1.0,
    )  # fmt: skip
    descent = Descent(config=config, dimension=2, subsets=None, sums=sum_plan(config, dimension=2))
    none, after = np.empty(0), np.array([1.75, -0.75], np.float32)
    aggregate = Aggregate(messages=4, width=4, numbers=np.array([1, 5], np.uint8))
    message = write_steps([aggregate.part()], kind=StepKind.SUMS, one_in=1, model=after, memory=none, round=7)
    held = ModelMessage(round=6, model=np.array([1.0, -0.5], np.float32), memory=none)
    assert descent.receive(message, held=held).model.tobytes() == after.tobytes()
    return message


def test_lengths_of_steps():
    """56 + ceil(k w / 8) bytes beside 48 + ceil(k w / 8) of a masked vector, and 64 + 4k for estimates."""
    assert "takes 56 + ceil(k w / 8) bytes" in " ".join(PAGE.split())
    for kept, width in ((1, 2), (1000, 9), (2057, 21)):
        assert STEPS_HEADER_BYTES + part_bytes(kept, width=width) == 56 + -(-kept * width // 8)
        assert HEADER_BYTES == 48
        assert STEPS_HEADER_BYTES + part_bytes(kept, width=None) == 64 + 4 * kept


def test_the_shortest_messages():
    assert len(write_model(np.zeros(1, np.float32), round=0)) == 36
    code = np.array([2], np.uint8)
    assert len(frame_of(code, Mechanism(levels=1, trials=1), range=1.0, coding=Coding.ENTROPY)) == 97


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=str)
@pytest.mark.parametrize("vector", [False, True], ids=["one range", "a range per coordinate"])
def test_values_and_sums_round_in_the_order_of_the_page(mechanism, vector):
    """Bit for bit, from the page's formulas in plain Python floats (which never fuse a multiplication with a sum)."""
    rng = np.random.default_rng(1)
    s, last = mechanism.levels, mechanism.code_count - 1
    centre = last / 2
    step = 1.0 if mechanism.coarsening is None else mechanism.coarsening.width / last
    range_ = rng.uniform(0.01, 3.0, 300) if vector else 0.7312
    bounds = range_.tolist() if vector else [range_] * 300
    total, weights, sums = [0.0] * 300, 0.0, Accumulator(300)
    for p in (0.1, 0.37, 0.53):
        codes = rng.integers(0, last + 1, 300).astype(code_dtype(last + 1))
        if vector:
            values = [(((1 / s) * step) * c) * (code - centre) for c, code in zip(bounds, codes.tolist(), strict=True)]
            units = [((p / s) * step) * c for c in bounds]
        else:
            values = [((c / s) * step) * (code - centre) for c, code in zip(bounds, codes.tolist(), strict=True)]
            units = [((p * c) / s) * step for c in bounds]
        assert decode(codes, mechanism, range=range_).tolist() == values
        total = [t + u * (code - centre) for t, u, code in zip(total, units, codes.tolist(), strict=True)]
        weights += p
        sums.add(frame_of(codes, mechanism, range=range_), range=range_, weight=p)
    assert sums.total.tolist() == total
    assert sums.mean().tolist() == [t / weights for t in total]


def zstd_payload(stream, *, bins=4):
    return np.frombuffer(entropy.PREFIX.pack(entropy.Mode.ZSTD, 0, 0, 0, bins, 0) + stream, np.uint8)


def test_zstandard_frames_that_may_be_read_and_those_that_may_not():
    mechanism = Mechanism(levels=50, trials=5)
    data = (np.arange(1000) % 4).astype(np.uint8).tobytes()

    def compress(content=data, **options):
        return zstandard.ZstdCompressor(**options).compress(content)

    wide = zstandard.ZstdCompressionParameters(window_log=27)
    for stream in (compress(), compress(level=19), compress(write_checksum=True), compress(compression_params=wide)):
        codes = entropy.decompress(zstd_payload(stream), mechanism, 1000)
        assert codes.tobytes() == data
    skippable = b"\x50\x2a\x4d\x18" + struct.pack("<I", 4) + b"skip"
    checked = bytearray(compress(write_checksum=True))
    checked[-1] ^= 1
    dictionary = zstandard.ZstdCompressionDict(data * 4, dict_type=zstandard.DICT_TYPE_RAWCONTENT)
    plain = zstandard.ZstdCompressionParameters(format=zstandard.FORMAT_ZSTD1_MAGICLESS)
    for stream in (
        b"",
        skippable + compress(),
        compress() + skippable,
        compress(data[:500]) + compress(data[500:]),
        compress() + b"\0",
        compress()[:-1],
        compress(compression_params=plain),
        compress(write_content_size=False),
        compress(data[:999]),
        compress(data + b"\0"),
        bytes(checked),
        compress(dict_data=dictionary),
    ):
        with pytest.raises(BadPayload):
            entropy.decompress(zstd_payload(stream), mechanism, 1000)
    with pytest.raises((BadPayload, CodeOutOfRange)):
        entropy.decompress(zstd_payload(compress(), bins=3), mechanism, 1000)


def test_what_exact_binomial_noise_owes():
    """Its distance from the accountant's law is below 2^-63 for every number of trials, and nothing to m = 64."""
    trials = {*range(1025), *np.geomspace(1025, MAX_TRIALS, 40).astype(int).tolist(), MAX_TRIALS}
    assert CUT_LAW < 2.0**-63
    # Both tails, and the floors of 104 bits of fixed point.
    assert all(2.0**-64 + (len(Binomial(m).pmf) + 1) * 2.0**-104 <= CUT_LAW for m in trials)
    for m in range(65):
        law = Binomial(m)
        assert law.first == 0
        assert law.pmf.tolist() == [math.comb(m, k) / 2**m for k in range(m + 1)]
    rounds, dimension, epsilon, shown = re.search(
        r"For T = ([\d,]+), d = ([\d,]+) and epsilon = (\d+) that is ([\d.e-]+);", " ".join(PAGE.split())
    ).groups()
    owed = (1 + math.exp(int(epsilon))) * int(rounds.replace(",", "")) * int(dimension.replace(",", "")) * 2.0**-63
    assert owed <= float(shown) < 1.01 * owed
    assert ROUNDING_SLACK_STEPS == 2 * 2.0**-25 * (1 + 2.0**-6)
