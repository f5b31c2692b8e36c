"""Models that a hostile server may send, data that they may meet, and what a peer can see of the answers."""

import functools
import struct
import warnings

import numpy as np
import torch
import xxhash
from torch import nn

from bqsgd._src.persample import SlowGradientsWarning
from bqsgd._src.settings.config import Config
from bqsgd._src.wire.frame import read_frame

LOSS = nn.CrossEntropyLoss(reduction="none")
SAMPLES, FEATURES, CLASSES = 12, 3, 2
UNITS_AND_CLIPS = [
    *(("sample", clip) for clip in ("dual", "clamp", "l2", "scale", "batch-mean", "normalize", "per-layer")),
    *(("client", clip) for clip in ("dual", "clamp", "l2", "scale", "per-layer")),
]
BASE = {
    "clients": 2,
    "rounds": 1000,
    "batch_size": SAMPLES,
    "sampling": "none",
    "clip_bound": 0.1,
    "clip_norm": 0.5,
    "levels": 4,
    "trials": 1_000,
    "seed": 1,
    "epsilon": 1e4,
}


class Odd(nn.Module):
    """A parameter outside any layer: per-sample gradients go the slow road."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(FEATURES, CLASSES))

    def forward(self, x):
        return (x @ self.weight).exp()


class Picky(nn.Module):
    """Raises errors of its own on some values, as a model with checks does."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(FEATURES, CLASSES)

    def forward(self, x):
        y = self.layer(x)
        if bool((y > 1e30).any()):
            raise ArithmeticError(f"a secret: {float(y.detach().max())}")
        return y


NETWORKS = {
    "linear": lambda: nn.Linear(FEATURES, CLASSES),
    "mlp": lambda: nn.Sequential(nn.Linear(FEATURES, 4), nn.ReLU(), nn.LayerNorm(4), nn.Linear(4, CLASSES)),
    "convolution": lambda: nn.Sequential(
        nn.Unflatten(1, (1, FEATURES)), nn.Conv1d(1, 2, 2), nn.Tanh(), nn.Flatten(), nn.Linear(4, CLASSES)
    ),
    "picky": Picky,
    "odd": Odd,
}


@functools.cache
def shared_network(name):
    """One model for all clients of a process, which load the server's weights for every round anyway.

    A model is traced when it is first used, and tracing takes longer than all else that these clients do.
    """
    return NETWORKS[name]()


def dimension(network):
    return sum(parameter.numel() for parameter in shared_network(network).parameters())


def settings(unit, clip, **changes):
    local = {"local_steps": 3, "local_learning_rate": 0.5} if unit == "client" else {}
    return Config.of(**{**BASE, "unit": unit, "clip": clip, **local, **changes})


def finite_models(size):
    """Name -> a model that a client must answer."""
    rng = np.random.default_rng(0)
    signs = np.where(np.arange(size) % 2, -1, 1).astype(np.float32)
    one = np.zeros(size, np.float32)
    one[0] = 3e38
    return {
        "ordinary": rng.normal(size=size).astype(np.float32),
        "largest": np.full(size, np.finfo(np.float32).max),
        "alternating": signs * np.float32(3e38),
        "one": one,
        "cancelling": signs * np.float32(1e12),
        "denormal": np.full(size, 1e-45, np.float32),
        "bits": any_finite(rng, size),
    }


def any_finite(rng, size):
    """Random bit patterns that are finite numbers."""
    bits = rng.integers(0, 2**32, size, dtype=np.uint32)
    exponent = (bits >> 23) & 0xFF
    return np.where(exponent == 0xFF, bits & ~np.uint32(1 << 23), bits).astype(np.uint32).view(np.float32)


NOT_FINITE = {"nan": np.nan, "inf": np.inf, "-inf": -np.inf}


def data_sets():
    """Name -> (inputs, targets), all of one size: the first is ordinary, the others hold what could show."""
    rng = np.random.default_rng(1)
    inputs = rng.normal(size=(SAMPLES, FEATURES)).astype(np.float32)
    targets = (inputs[:, 0] > 0).astype(np.int64)
    found = {"ordinary": (inputs, targets)}
    for name, value in {
        "zeros": 0.0, "nan": np.nan, "inf": np.inf, "largest": 3e38, "denormal": 1e-45, "large": 1e10,
    }.items():  # fmt: skip
        found[f"all {name}"] = (np.full_like(inputs, value), targets)
        one = inputs.copy()
        one[5] = value
        found[f"one {name}"] = (one, targets)
    for name, value in {"beyond": CLASSES, "far beyond": 2**40, "negative": -1}.items():
        wrong = targets.copy()
        wrong[3] = value
        found[f"a label {name}"] = (inputs, wrong)
    found["all labels beyond"] = (inputs, np.full_like(targets, CLASSES))
    return found


def few_data_sets():
    """One of each sort, for the engines that cost more: usual, NaN, beyond all numbers, the loss raises."""
    found = data_sets()
    return {name: found[name] for name in ("ordinary", "one nan", "all largest", "a label beyond")}


def message(model, *, round):
    """A model message with a right checksum, whatever the values: a hostile server's own writer."""
    body = np.asarray(model, "<f4").tobytes()
    head = struct.pack("<4sHHQQ", b"BQSM", 1, 1, round, len(model))
    return head + struct.pack("<Q", xxhash.xxh3_64(head + body).intdigest()) + body


def seen(reply):
    """All that the server can see of a reply, but for the codes, whose law is the mechanism's, and their checksum."""
    if reply.frame is None:
        return ("declined", reply.reason)
    return ("frame", len(reply.frame), read_frame(bytes(reply.frame)).header)


class Watch:
    """Warnings that a block gives, as (class, text); not the one on the client's own screen that its model is slow."""

    def __enter__(self):
        self._catch = warnings.catch_warnings(record=True)
        self._caught = self._catch.__enter__()
        warnings.simplefilter("always")
        return self

    def __exit__(self, *error):
        self.warnings = {
            (warning.category.__name__, str(warning.message))
            for warning in self._caught
            if warning.category is not SlowGradientsWarning
        }
        return self._catch.__exit__(*error)
