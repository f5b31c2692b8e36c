"""Rank 1 sends what no honest rank sends; rank 0 writes down what it made of it. argv: see `distributed_processes`."""

import json
import os
import struct
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from bqsgd._src.engines.torch_distributed.ranks import Channel, meet
from bqsgd._src.private._ranks import Peers

ANNOUNCED, SENT = 50_000, 50
NOTE = 1 << 12


def listening(folder):
    found = {}
    held = [torch.full((ANNOUNCED,), ord("s"), dtype=torch.uint8) for _ in range(20)]  # what this process knows
    del held
    _, body = Channel(1).receive(most_bytes=ANNOUNCED)
    found["beyond"] = sorted(set(bytes(body[SENT:])))
    peers = Peers(rank=0, size=2)
    for name in ("nested", "gone"):
        try:
            peers.tell({"a": 1})
        except Exception as error:
            found[name] = [type(error).__module__, type(error).__name__]
    (folder / "found.json").write_text(json.dumps(found))


def lying():
    head = struct.pack("<4sIQ", b"BQSD", 19, ANNOUNCED)
    dist.send(torch.frombuffer(bytearray(head), dtype=torch.uint8), 0)
    dist.send(torch.full((SENT,), ord("x"), dtype=torch.uint8), 0)
    note = torch.full((NOTE,), ord("["), dtype=torch.uint8)
    dist.all_gather([torch.empty_like(note) for _ in range(2)], note)


def main():
    meet(timeout_seconds=60)
    if dist.get_rank() == 0:
        listening(Path(json.loads(sys.argv[1])["folder"]))
    else:
        lying()
    os._exit(0)  # rank 1 leaves in the midst of what rank 0 waits for
