"""A run's state on disk: one safetensors file whose metadata hold a JSON object. Pickle is never used.

The file is written under another name, made durable and then renamed, so a reader finds either the whole old checkpoint
or the whole new one.
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

from bqsgd._src.errors import BqsgdError, UnsafeFile
from bqsgd._src.records.record import MAX_COUNT
from bqsgd._src.storage import open_regular, write_atomic

FILE_NAME = "checkpoint.safetensors"
MODEL, BEST = "model.safetensors", "best.safetensors"
_FORMAT = "bqsgd.checkpoint.v1"
_MAX_BYTES = 1 << 36  # 64 GiB
Arrays = dict[str, npt.NDArray[Any]]


class CheckpointError(BqsgdError, RuntimeError):
    """A checkpoint is missing, damaged, or belongs to another run."""


def save_checkpoint(folder: Path, arrays: Mapping[str, npt.NDArray[Any]], state: Mapping[str, Any]) -> None:
    """Write the checkpoint of `folder`. When this returns, the checkpoint survives a power cut."""
    _write(folder / FILE_NAME, arrays, {"format": _FORMAT, "state": json.dumps(state, allow_nan=False)})


def save_model(folder: Path, tensors: Mapping[str, npt.NDArray[Any]], *, name: str = MODEL) -> None:
    """Write a model into `folder`, with the names and shapes of its `state_dict`, whole or not at all."""
    _write(folder / name, tensors, {"format": "pt"})


def _write(path: Path, arrays: Mapping[str, npt.NDArray[Any]], metadata: dict[str, str]) -> None:
    # safetensors takes an array's memory as it lies, so a transposed view must be copied first.
    contiguous = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    write_atomic(path, save(contiguous, metadata=metadata))


def load_checkpoint(folder: Path) -> tuple[Arrays, dict[str, Any]] | None:
    """The arrays and the state, or None if the run stopped before its first checkpoint.

    Raises:
        CheckpointError: the file is not a regular file, is damaged, or has another format.
    """
    path = folder / FILE_NAME
    try:
        file = open_regular(path, limit=_MAX_BYTES)
    except UnsafeFile as error:
        raise CheckpointError(f"{error}; a checkpoint must be a regular file") from error
    if file is None:
        return None
    try:
        # `open_regular` refused links and pipes. Reading by descriptor means nobody can swap the file for one
        # afterwards.
        with file, safe_open(f"/dev/fd/{file.fileno()}", framework="np") as stream:
            metadata = stream.metadata() or {}
            if metadata.get("format") != _FORMAT:
                raise CheckpointError(f"{path} is not a checkpoint of format {_FORMAT}")
            arrays = {name: stream.get_tensor(name) for name in stream.keys()}  # noqa: SIM118 (not a dict)
        state = json.loads(metadata["state"])
    except (SafetensorError, OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); start the run again in another folder") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} has no JSON object as its state; start the run again in another folder")
    return arrays, state


def round_of(state: Mapping[str, Any]) -> int:
    """The number of rounds that were done when the state was written."""
    rounds = state.get("round")
    if not isinstance(rounds, int) or isinstance(rounds, bool) or not 0 <= rounds <= MAX_COUNT:
        raise CheckpointError(f"round of the checkpoint must be an integer of at least 0, got {str(rounds)[:40]!r}")
    return rounds


def seconds_of(state: Mapping[str, Any]) -> float:
    """The seconds that the run had taken when the state was written."""
    seconds = state.get("elapsed_seconds", 0.0)
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 <= seconds < 1e18:
        raise CheckpointError(f"elapsed_seconds of the checkpoint must be a duration, got {str(seconds)[:40]!r}")
    return float(seconds)


def take(arrays: Arrays, name: str, like: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The array `name` of a checkpoint, which must be finite and have the shape and dtype of `like`."""
    array = arrays.get(name)
    if array is None or array.shape != like.shape or array.dtype != like.dtype:
        got = "none" if array is None else f"{array.dtype} {array.shape}"
        raise CheckpointError(f"checkpoint array {name!r} must be {like.dtype} {like.shape}, got {got}")
    # A NaN in the model or the optimizer would spread to every coordinate in the next rounds.
    if not bool(np.isfinite(array).all()):
        raise CheckpointError(f"checkpoint array {name!r} holds NaN or infinity")
    return array
