"""Bytes and seconds of one round by dimension and number of clients: measured on one core, then extrapolated.

`python -m benchmarks scaling` writes benchmarks/results/scaling.json and prints two tables, one for docs/scaling.md.
`--tables` prints them from the stored figures. Measured: client and server work on synthetic vectors, without a network
and without the model's own work; CPU time of one thread, best of several turns; the server's peak memory. On paper:
n clients and a link are arithmetic on those figures.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
import tracemalloc
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import numpy as np

import benchmarks
from bqsgd._src.codec import encode_frame
from bqsgd._src.noise import privacy_rng
from bqsgd._src.params import Mechanism
from bqsgd._src.server.server import Server
from bqsgd._src.settings.config import Config
from bqsgd._src.wire.model_message import read_model

CLIENTS = {60_000: (4, 16, 64), 4_000_000: (4, 16), 60_000_000: (4,)}
ON_PAPER = (4, 100, 1_000, 10_000)
MECHANISM = Mechanism(levels=16, trials=203)
RANGE = 0.004
LINKS_BITS_PER_SECOND = {"1 Gbit/s": 1e9, "10 Gbit/s": 1e10}


def settings(clients: int) -> Config:
    return Config.of(
        clients=clients,
        levels=MECHANISM.levels,
        trials=MECHANISM.trials,
        range=RANGE,
        learning_rate=0.1,
        seed=0,
        batch_size=512,
    )


def frame_of(values: np.ndarray, client: int) -> bytearray:
    return encode_frame(values, MECHANISM, range=RANGE, rng=privacy_rng(), client=client, round=0, clamp=True)


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    started = time.process_time()
    result = work()
    return time.process_time() - started, result


def one_round(dimension: int, clients: int, values: np.ndarray) -> dict[str, float]:
    """CPU seconds of one round by stage, and the bytes of its messages."""
    server = Server(
        model=np.zeros(dimension, np.float32), weights=dict.fromkeys(range(clients), 1.0), config=settings(clients)
    )
    write, message = timed(lambda: server.open_round()[0])
    read, _ = timed(lambda: read_model(message, dimension=dimension))
    encode = receive = float("inf")
    received = 0.0
    frame = bytearray()
    for client in range(clients):
        once, frame = timed(lambda client=client: frame_of(values, client))
        encode = min(encode, once)
        once, receipt = timed(lambda frame=frame: server.receive(frame))
        assert receipt.status == "ok", receipt
        receive, received = min(receive, once), received + once
    step, outcome = timed(server.close_round)
    assert outcome.stepped
    return {
        "client_read_seconds": read,
        "client_encode_seconds": encode,
        "server_write_seconds": write,
        "server_frame_seconds": receive,
        "server_mean_frame_seconds": received / clients,
        "server_step_seconds": step,
        "frame_bytes": len(frame),
        "broadcast_bytes": len(message),
    }


def peak_bytes(dimension: int, clients: int, values: np.ndarray) -> int:
    """Most memory the server holds at once during a round, one frame at a time and its model included."""
    frames = (frame_of(values, client) for client in range(clients))
    tracemalloc.start()
    try:
        server = Server(
            model=np.zeros(dimension, np.float32), weights=dict.fromkeys(range(clients), 1.0), config=settings(clients)
        )
        server.open_round()
        for frame in frames:
            server.receive(frame)
            del frame
        server.close_round()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def measured(repeats: int) -> list[dict[str, Any]]:
    rows = []
    for dimension, counts in CLIENTS.items():
        values = np.random.default_rng(0).normal(0, RANGE / 2, dimension).astype(np.float32)
        for clients in counts:
            one_round(min(dimension, 60_000), clients, values[:60_000])  # compiled and warm
            turns = [one_round(dimension, clients, values) for _ in range(repeats)]
            best = {name: min(turn[name] for turn in turns) for name in turns[0]}
            row = {"dimension": dimension, "clients": clients, **best}
            row["server_peak_bytes"] = peak_bytes(dimension, clients, values)
            rows.append(row)
            print(json.dumps(row), file=sys.stderr, flush=True)
    return rows


def on_paper(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """n clients from the figures measured at the most clients of each dimension: seconds of server and links."""
    extended = []
    for dimension in CLIENTS:
        base = max((row for row in rows if row["dimension"] == dimension), key=lambda row: row["clients"])
        for clients in ON_PAPER:
            up, down = clients * base["frame_bytes"], clients * base["broadcast_bytes"]
            extended.append(
                {
                    "dimension": dimension,
                    "clients": clients,
                    "bytes_up": up,
                    "bytes_down": down,
                    "server_seconds": base["server_write_seconds"]
                    + clients * base["server_frame_seconds"]
                    + base["server_step_seconds"],
                    "client_seconds": base["client_read_seconds"] + base["client_encode_seconds"],
                    "link_seconds": {name: 8 * (up + down) / rate for name, rate in LINKS_BITS_PER_SECOND.items()},
                    "server_peak_bytes": base["server_peak_bytes"],
                }
            )
    return extended


def size(count: float) -> str:
    """Bytes in decimal units, three digits."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def seconds(value: float) -> str:
    """Seconds in the unit that fits, two digits."""
    for unit, length, limit in (("ms", 1e-3, 1.0), ("s", 1.0, 120.0), ("min", 60.0, 7200.0)):
        if value < limit:
            return f"{float(f'{value / length:.2g}'):g} {unit}"
    return f"{float(f'{value / 3600:.2g}'):g} h"


def tables(result: dict[str, Any]) -> str:
    """The measured table, which docs/scaling.md shows, and the extrapolated one."""
    lines = [
        "| d | n | frame up | model down | client: read | client: encode | server: write | server: per frame "
        "| server: step | server memory | per coordinate |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in result["measured"]:
        stages = ("client_read", "client_encode", "server_write", "server_frame", "server_step")
        cells = [f"{row['dimension']:,}", str(row["clients"]), size(row["frame_bytes"]), size(row["broadcast_bytes"])]
        cells += [seconds(row[f"{stage}_seconds"]) for stage in stages]
        peak = row["server_peak_bytes"]
        lines.append("| " + " | ".join([*cells, size(peak), f"{peak / row['dimension']:.1f} B"]) + " |")
    links = list(LINKS_BITS_PER_SECOND)
    lines += [
        "",
        f"| d | n | up | down | server, one core | {links[0]} | {links[1]} | server memory |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in result["on_paper"]:
        cells = [f"{row['dimension']:,}", f"{row['clients']:,}", size(row["bytes_up"]), size(row["bytes_down"])]
        cells += [seconds(row["server_seconds"]), *(seconds(row["link_seconds"][link]) for link in links)]
        lines.append("| " + " | ".join([*cells, size(row["server_peak_bytes"])]) + " |")
    return "\n".join(lines)


def main() -> int:
    parser = benchmarks.parser("scaling", __doc__)
    parser.add_argument("--tables", action="store_true", help="print the tables from the stored figures")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    if not arguments.tables:
        before, rows = os.getloadavg(), measured(arguments.repeats)
        result = {
            "what": __doc__.splitlines()[0],
            "mechanism": {"levels": MECHANISM.levels, "trials": MECHANISM.trials},
            "measured": rows,
            "on_paper": on_paper(rows),
            "load_average_before": before,
            "load_average_after": os.getloadavg(),
            "cores": os.cpu_count(),
            "machine": platform.machine(),
            "versions": {"python": platform.python_version(), "numpy": version("numpy")},
        }
        benchmarks.write(arguments.output, result)
    print(tables(json.loads(arguments.output.read_text(encoding="utf-8"))))
    return 0
