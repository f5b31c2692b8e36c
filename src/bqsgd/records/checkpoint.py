"""A run's state on disk: one safetensors file whose metadata holds a JSON object. No pickle, ever.

It is written beside its final name, made durable and then renamed, so a reader finds the old one or the new one whole.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from bqsgd.errors import BqsgdError, UnsafeFile
from bqsgd.records.record import MAX_COUNT
from bqsgd.storage import open_regular, write_atomic

FILE_NAME = "checkpoint.safetensors"
MODEL = "model.safetensors"
_FORMAT = "bqsgd.checkpoint.v1"
_MAX_BYTES = 1 << 36
Arrays = dict[str, npt.NDArray[Any]]


class CheckpointError(BqsgdError, RuntimeError):
    """A checkpoint is missing, damaged or of another run."""


def save_checkpoint(folder: Path, arrays: Mapping[str, npt.NDArray[Any]], state: Mapping[str, Any]) -> None:
    """Write the checkpoint of `folder`; when this returns it survives a power cut."""
    metadata = {"format": _FORMAT, "state": json.dumps(state, allow_nan=False)}
    content = save({name: np.ascontiguousarray(array) for name, array in arrays.items()}, metadata=metadata)
    write_atomic(folder / FILE_NAME, content)


def save_model(folder: Path, tensors: Mapping[str, npt.NDArray[Any]]) -> None:
    """Write the finished model of `folder`, whole or not at all: the names and shapes of its `state_dict`."""
    arrays = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
    write_atomic(folder / MODEL, save(arrays, metadata={"format": "pt"}))


def load_checkpoint(folder: Path) -> tuple[Arrays, dict[str, Any]] | None:
    """The arrays and the state, or None when the run was stopped before its first checkpoint."""
    path = folder / FILE_NAME
    try:
        file = open_regular(path, limit=_MAX_BYTES)
    except UnsafeFile as error:
        raise CheckpointError(f"{error}; a checkpoint is one") from error
    if file is None:
        return None
    try:
        # Opened above without following a link or waiting for a pipe; by its descriptor it cannot be swapped for one.
        with file, safe_open(f"/dev/fd/{file.fileno()}", framework="np") as stream:
            metadata = stream.metadata() or {}
            if metadata.get("format") != _FORMAT:
                raise CheckpointError(f"{path} is not a checkpoint of format {_FORMAT}")
            arrays = {name: stream.get_tensor(name) for name in stream.keys()}  # noqa: SIM118 (not a dict)
        state = json.loads(metadata["state"])
    except (SafetensorError, OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); start the run again in another folder") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} holds no state object")
    return arrays, state


def round_of(state: Mapping[str, Any]) -> int:
    """How many rounds were done when the state was written."""
    found = state.get("round")
    if not isinstance(found, int) or isinstance(found, bool) or not 0 <= found <= MAX_COUNT:
        raise CheckpointError(f"the checkpoint names no round: {str(found)[:40]!r}")
    return found


def seconds_of(state: Mapping[str, Any]) -> float:
    """How long the run had taken when the state was written."""
    found = state.get("elapsed_seconds", 0.0)
    if isinstance(found, bool) or not isinstance(found, (int, float)) or not 0 <= found < 1e18:
        raise CheckpointError(f"the checkpoint names no duration: {str(found)[:40]!r}")
    return float(found)


def take(arrays: Arrays, name: str, like: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The array called `name`, refused unless its shape and dtype are those of `like`, and finite."""
    found = arrays.get(name)
    if found is None or found.shape != like.shape or found.dtype != like.dtype:
        got = None if found is None else (found.dtype, found.shape)
        raise CheckpointError(f"checkpoint array {name!r} must be {like.dtype} {like.shape}, got {got}")
    if not bool(np.isfinite(found).all()):
        raise CheckpointError(f"checkpoint array {name!r} holds NaN or infinity")
    return found
