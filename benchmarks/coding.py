"""Which coder for the codes: constriction's ANS, zstandard and fixed width, on one core, in one run.

For each (levels, trials) and law of the values, at the size of LeNet-5 and at 2 * 10^6: how far each coder's bytes are
above the empirical entropy of the codes, and how many million codes a second it encodes and decodes. "ours" is what
`bqsgd._src.wire.entropy` writes. Times are the least of interleaved repeats.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import constriction
import numpy as np
import zstandard

import benchmarks
from bqsgd._src.params import Mechanism
from bqsgd._src.wire import entropy
from bqsgd._src.wire.entropy import best_binning, histogram, write_counts
from bqsgd._src.wire.fixed import Codes, FixedWidth

CASES = [(1, 251), (2, 251), (52, 16279), (8, 4079), (4, 60), (1024, 1 << 20), (127, 0), (7, 0), (1, 0)]
DIMENSIONS = [61_706, 2_000_000]
REPEATS = 9


def draw(mechanism: Mechanism, dimension: int, rng: np.random.Generator) -> Codes:
    """Codes of Laplace values scaled to their largest (the paper's clip by norm), noised with numpy's own binomial."""
    values = rng.laplace(size=dimension)
    values *= mechanism.levels / np.abs(values).max()
    low = np.floor(values)
    codes = low + (rng.random(dimension) < values - low) + mechanism.levels
    return (codes + rng.binomial(mechanism.trials, 0.5, dimension)).astype(FixedWidth(mechanism.code_count).dtype)


def entropy_bytes(codes: Codes) -> float:
    counts = np.unique_counts(codes).counts
    return float(-(counts * np.log2(counts / codes.size)).sum() / 8)


def ans(codes: Codes) -> tuple[Callable[[], bytes], Callable[[bytes], Any]]:
    """constriction on whole codes with their exact histogram, sent zstandard-compressed (four bytes per count)."""
    first = int(codes.min())
    counts = np.bincount(codes.astype(np.int64) - first)
    model = constriction.stream.model.Categorical(counts.astype(np.float64), perfect=False)

    def encode() -> bytes:
        coder = constriction.stream.stack.AnsCoder()
        coder.encode_reverse(codes.astype(np.int32) - first, model)
        table = zstandard.ZstdCompressor(level=19).compress(counts.astype("<u4").tobytes())
        return len(table).to_bytes(4, "little") + table + coder.get_compressed().tobytes()

    def decode(data: bytes) -> Any:
        words = np.frombuffer(data[4 + int.from_bytes(data[:4], "little") :], np.uint32)
        return constriction.stream.stack.AnsCoder(words).decode(model, codes.size) + first

    return encode, decode


def zstd(codes: Codes, level: int) -> tuple[Callable[[], bytes], Callable[[bytes], Any]]:
    """zstandard on the bytes of the codes as they are."""
    data = codes.tobytes()
    return (
        lambda: zstandard.ZstdCompressor(level=level).compress(data),
        lambda packed: np.frombuffer(zstandard.ZstdDecompressor().decompress(packed), codes.dtype),
    )


def fixed(codes: Codes, mechanism: Mechanism) -> tuple[Callable[[], bytes], Callable[[bytes], Any]]:
    coder = FixedWidth(mechanism.code_count)
    out = np.empty(coder.payload_bytes(codes.size), np.uint8)

    def encode() -> bytes:
        coder.pack(codes, out)
        return out.data  # type: ignore[return-value]  # no copy: as in a frame

    return encode, lambda data: coder.unpack(np.frombuffer(data, np.uint8), codes.size)


def ours(codes: Codes, mechanism: Mechanism) -> tuple[Callable[[], bytes], Callable[[bytes], Any]]:
    return (
        lambda: bytes(entropy.compress(codes, mechanism)),
        lambda data: entropy.decompress(np.frombuffer(data, np.uint8), mechanism, codes.size),
    )


def measure(mechanism: Mechanism, dimension: int, rng: np.random.Generator) -> dict[str, Any]:
    codes = draw(mechanism, dimension, rng)
    ideal = entropy_bytes(codes)
    coders = {
        "fixed": fixed(codes, mechanism),
        "ours": ours(codes, mechanism),
        "ans": ans(codes),
        "zstd-1": zstd(codes, 1),
        "zstd-9": zstd(codes, 9),
    }
    best = {name: [float("inf"), float("inf")] for name in coders}
    size: dict[str, int] = {}
    for _ in range(REPEATS):
        for name, (encode, decode) in coders.items():
            start = time.perf_counter()
            data = encode()
            middle = time.perf_counter()
            decoded = decode(data)
            stop = time.perf_counter()
            assert np.array_equal(decoded, codes), name
            best[name] = [min(best[name][0], middle - start), min(best[name][1], stop - middle)]
            size[name] = len(data)
    table = write_counts(best_binning(histogram(codes, mechanism.code_count), entropy.MAX_BINS).counts)
    mode = entropy.Mode(entropy.compress(codes, mechanism)[0]).name.lower()
    return {
        "levels": mechanism.levels,
        "trials": mechanism.trials,
        "dimension": dimension,
        "entropy_bits_per_coordinate": round(8 * ideal / dimension, 4),
        "our_mode": mode,
        "table_bytes": len(table),
        "table_bytes_zstd_19": len(zstandard.ZstdCompressor(level=19).compress(table)),
        "coders": {
            name: {
                "bits_per_coordinate": round(8 * size[name] / dimension, 4),
                "above_entropy_percent": round(100 * (size[name] / ideal - 1), 2),
                "encode_million_codes_per_second": round(dimension / best[name][0] / 1e6, 1),
                "decode_million_codes_per_second": round(dimension / best[name][1] / 1e6, 1),
            }
            for name in coders
        },
    }


def main() -> None:
    output = benchmarks.parser("coding", __doc__).parse_args().output
    rng, rows = np.random.default_rng(1), []
    for dimension in DIMENSIONS:
        for levels, trials in CASES:
            row = measure(Mechanism(levels=levels, trials=trials), dimension, rng)
            rows.append(row)
            cells = "  ".join(
                f"{name} {c['above_entropy_percent']:+.2f}% {c['encode_million_codes_per_second']:.0f}/"
                f"{c['decode_million_codes_per_second']:.0f}"
                for name, c in row["coders"].items()
            )
            print(
                f"d={dimension} s={levels} m={trials} H={row['entropy_bits_per_coordinate']} {row['our_mode']}: {cells}"
            )
    versions = {"constriction": version("constriction"), "zstandard": zstandard.__version__, "numpy": np.__version__}
    result = {
        "what": "bytes above entropy, million codes/s (encode/decode), one core",
        "versions": versions,
        "rows": rows,
    }
    benchmarks.write(output, result)
