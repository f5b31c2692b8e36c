"""What is wrong with a client's own data, found on the client and told to nobody else.

After the spend a sample that makes the model fail counts as zero, and nobody is told. So this looks at the data before
the first spend. Its findings depend on the data without noise: they go to the log of the client's own process, or to
the terminal of whoever runs `bqsgd check`, and never into a message or a record.
"""

from __future__ import annotations

import copy
import hashlib
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from bqsgd._src.client.objective import Objective
from bqsgd._src.client.samples import Reader
from bqsgd._src.models import device_of
from bqsgd._src.persample.program import inputs_then_target
from bqsgd._src.runtime.generators import alone, generators_kept
from bqsgd._src.runtime.interrupts import errors_dropped

_log = logging.getLogger("bqsgd.data")
_AT_ONCE = 4096
_MOST_FEATURES = 1_000_000


def log_findings(samples: Reader, objective: Objective, *, form: Any, delta: float, who: str) -> None:
    """Warn about rows with NaN, labels out of range and delta above 1/n, if the data are tensors in memory.

    Others may read the log, so it says that there are such samples, not which or how many; `bqsgd check` says that.
    Other data sets are not read: that may take long, and `bqsgd check` does it when it is asked.
    """
    tensors = samples.in_memory()
    if tensors is None:
        return
    with errors_dropped("the data could not be checked"):
        classes = _classes(objective, form)
        bad, wrong = _faulty_rows(tensors, classes)
        if bool(bad.any()):
            _log.warning("%s: some samples hold NaN or infinity and count as zero; `bqsgd check` names them", who)
        if bool(wrong.any()):
            _log.warning(
                "%s: some labels are not among the model's classes 0 to %d, and such samples count as zero; "
                "`bqsgd check` names them",
                who,
                (classes or 0) - 1,
            )
        for finding in _of_delta(len(samples), delta):
            _log.warning("%s: %s", who, finding)


def findings(samples: Reader, objective: Objective, *, form: Any, delta: float) -> Iterator[str]:
    """Everything that is worth saying of these samples, one sentence each. Reads all of them."""
    lost, parts = 0, list[list[Tensor]]()
    for start in range(0, len(samples), _AT_ONCE):
        for part in samples.read(range(start, min(start + _AT_ONCE, len(samples)))):
            if part.data is None:
                lost += len(part)
            else:
                parts.append(tree_leaves(part.data))
    if lost:
        yield f"{lost} of {len(samples)} samples cannot be read: each counts as zero"
    if not parts:
        return
    if len({tuple((leaf.shape[1:], leaf.dtype) for leaf in leaves) for leaves in parts}) > 1:
        yield "samples differ in shape or type; only those that the model takes count"
        return
    tensors = [torch.cat(column) for column in zip(*parts, strict=True)]
    yield from _of_values(tensors, _classes(objective, form))
    yield from _of_delta(len(samples), delta)
    yield from _of_features(tensors[0])
    yield from _of_repeats(tensors)


def _faulty_rows(tensors: Sequence[Tensor], classes: int | None) -> tuple[Tensor, Tensor]:
    """For each row, whether it holds NaN or infinity, and whether its label is no class of the model."""
    rows, labels = len(tensors[0]), tensors[-1]
    bad, wrong = torch.zeros(2, rows, dtype=torch.bool)
    for tensor in tensors:
        if tensor.is_floating_point():
            bad |= ~tensor.isfinite().reshape(rows, -1).all(dim=1)
    if classes is not None and not labels.is_floating_point():
        wrong |= ((labels < 0) | (labels >= classes)).reshape(rows, -1).any(dim=1)
    return bad, wrong


def _of_values(tensors: Sequence[Tensor], classes: int | None) -> Iterator[str]:
    """Rows with NaN, and labels that are no class of the model."""
    rows, labels = len(tensors[0]), tensors[-1]
    bad, wrong = _faulty_rows(tensors, classes)
    if bool(bad.any()):
        yield (
            f"{int(bad.sum())} of {rows} samples hold NaN or infinity (the first is sample {int(bad.nonzero()[0])}): "
            "each counts as zero; remove them or fill the gaps"
        )
    if bool(wrong.any()):
        first = int(wrong.nonzero()[0])
        yield (
            f"{int(wrong.sum())} of {rows} labels are not among the model's classes 0 to {(classes or 0) - 1} (the "
            f"first is sample {first}, label {labels[first].tolist()}): such samples count as zero"
        )


def _of_delta(samples: int, delta: float) -> Iterator[str]:
    if delta > 1 / samples:
        yield (
            f"delta {delta:g} is above 1/n = {1 / samples:.2g} for {samples} samples: a method that publishes one "
            "sample in full would meet it; use a smaller delta"
        )


def _of_features(inputs: Tensor) -> Iterator[str]:
    """Features that are the same in every sample."""
    flat = inputs.reshape(len(inputs), -1)
    if len(flat) < 2 or flat.shape[1] < 2 or flat.shape[1] > _MOST_FEATURES:
        return
    constant = (flat == flat[:1]).all(dim=0)
    if bool(constant.any()):
        yield (
            f"{int(constant.sum())} of {flat.shape[1]} features are the same in every sample (the first is feature "
            f"{int(constant.nonzero()[0])}): they teach nothing, and their coordinates carry noise"
        )


def _of_repeats(tensors: Sequence[Tensor]) -> Iterator[str]:
    """Rows that are there more than once. The guarantee hides one row, so a person with several is hidden less."""
    flat = (tensor.reshape(len(tensor), -1).cpu().contiguous() for tensor in tensors)
    rows = [tensor.view(torch.uint8).numpy() for tensor in flat]  # NumPy has no bfloat16
    seen: dict[bytes, int] = {}
    repeated = 0
    for number in range(len(rows[0])):
        digest = hashlib.sha256(b"".join(part[number].tobytes() for part in rows)).digest()
        repeated += digest in seen
        seen.setdefault(digest, number)
    if repeated:
        yield (
            f"{repeated} samples repeat another one in full: the guarantee hides one row, so whoever has several rows "
            "is hidden less; remove copies"
        )


def _classes(objective: Objective, form: Any) -> int | None:
    """How many classes the model scores, from its outputs for a made-up sample; None if its task is another."""
    with errors_dropped("the model's classes are unknown"), alone, generators_kept(), torch.no_grad():
        forward = objective.forward or inputs_then_target
        device = device_of(objective.model)
        form = tree_map(lambda leaf: leaf.to(device), form)
        outputs, targets = forward(copy.deepcopy(objective.model).eval(), form)
        whole = not targets.is_floating_point() and targets.dtype != torch.bool
        # As torch's losses have it: (batch, classes, ...) and (batch, ...). A language model may score each place last.
        if whole and outputs.shape[:1] + outputs.shape[2:] == targets.shape and outputs.shape[1] > 1:
            return int(outputs.shape[1])
    return None
