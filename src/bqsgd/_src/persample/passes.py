"""The program of one sample on torch's own kernels, a pass for each sample: no kernel ever sees two samples.

Passes run side by side, each operation for a few samples in turn, so that weights are read from the cache; and in
several threads of ours, on one core each, without Python (`native`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor, fx

from bqsgd._src.errors import InvalidParameter
from bqsgd._src.persample import program as programs
from bqsgd._src.persample._kernels.loops import usable
from bqsgd._src.persample.device import dense, name_of
from bqsgd._src.persample.factors import Dense, Factor, Piece, Scattered, factor_of, nodes_of, working
from bqsgd._src.persample.layouts import lay_out
from bqsgd._src.persample.native import native
from bqsgd._src.persample.program import Program, Whole, shape_of, side_by_side
from bqsgd._src.runtime.generators import alone, generators_kept
from bqsgd._src.runtime.modes import repeatable
from bqsgd._src.runtime.threads import in_own_threads

aten = torch.ops.aten
SIDE_BY_SIDE = 8
"""Passes of a thread that run side by side at most. With few, their activations are still in the caches; with more,
weights are read less often."""
AT_ONCE, AT_ONCE_BYTES = 64, 28 << 20
"""Passes, and bytes of their gradients, that a thread holds at most; then they are clipped and added up."""
FEW, FEW_BYTES = 4, 256 << 20
"""The same for large models, whose weights take longer to read than a few gradients more."""
WIDE = 1 << 15
"""Coordinates of a gradient from which on its factors are kept instead, where they are much smaller."""
_ALIGNMENT = 64
"""Bytes; torch's own allocator promises as much for the tensors a pass makes."""


SAME_BITS = "the kernels of {} give the same values the same bits, and add whole numbers exactly"


class PassesRoad:
    """Runs a program once for each sample, a few samples side by side."""

    def __init__(self, program: Program, whole: Whole, device: torch.device | None = None) -> None:
        self._device, self.assumes = device, "" if device is None else SAME_BITS.format(name_of(device))
        self.draws, self._prelude = program.draws, program.prelude()
        self._outputs = outputs_of(program, tables=device is not None, products=device is None)
        returned = [node for output in self._outputs for node in output.nodes]
        each = 1 + sum(4 * shape_of(node).numel() for node in returned)
        fitting = max(1, min(AT_ONCE, AT_ONCE_BYTES // each), min(FEW, FEW_BYTES // each))
        self._at_once = fitting - fitting % min(fitting, SIDE_BY_SIDE)
        body = program.body(returned)
        lay_out(self._prelude, body, len(program.shared))
        count = len(self._prelude.graph.output_node().args[0])  # type: ignore[arg-type]
        self._for = lru_cache(lambda samples: native(side_by_side(body, count, samples)))
        errors = []
        for bounded in (False, True):  # what raises here, whatever the sample, would raise for every sample
            leaves = [made_up(node, 1, bounded=bounded)[0] for node in program.leaves]
            try:
                with alone, generators_kept(), repeatable, torch.no_grad():
                    shared = self._prelude(*whole.randomised())
                    self._run(shared, leaves, [range(1)], raises=True)
                return
            except Exception as error:
                errors.append(error)
        raise programs.fails_on_made_up(errors[0], [shape_of(node)[1:] for node in program.leaves]) from errors[0]

    def passes(self, whole: Whole, leaves: Sequence[Tensor]) -> Iterator[tuple[int, int, list[Piece]]]:
        """(samples, how many of them were lost, pieces of the others' gradients), a few passes at a time."""
        threads = torch.get_num_threads()
        with torch.no_grad(), repeatable:
            shared = self._prelude(*whole.given())
            for start in range(0, len(leaves[0]), threads * self._at_once):
                samples = range(start, min(len(leaves[0]), start + threads * self._at_once))
                values = self._run(shared, leaves, self._groups(samples, threads))
                pieces = self._pieces(values) if values else []
                yield len(samples), len(samples) - len(values), pieces

    def _groups(self, samples: range, threads: int) -> list[range]:
        """Samples that run side by side: powers of two, so that few functions serve every size of a batch. Samples
        that draw random numbers go one after another, in the order of the batch."""
        most = 1 if self.draws else max(1, min(SIDE_BY_SIDE, len(samples) // threads))
        groups: list[range] = []
        while samples:
            size = 1 << (min(most, len(samples)).bit_length() - 1)
            groups.append(samples[:size])
            samples = samples[size:]
        return groups

    def _run(
        self, shared: Sequence[Tensor], leaves: Sequence[Tensor], groups: Sequence[range], *, raises: bool = False
    ) -> list[Sequence[Tensor]]:
        """The outputs of the samples that raised no error, in order."""
        results: list[list[Sequence[Tensor]]] = [[] for _ in groups]
        functions = [self._for(size) for size in (1, *map(len, groups))]

        def run(group: int) -> None:
            inputs = [[_own(leaf, sample) for leaf in leaves] for sample in groups[group]]
            with suppress(*() if raises else (Exception,)), torch.no_grad():
                results[group] = _cut(functions[1 + group](*shared, *itertools.chain(*inputs)), len(inputs))
                return
            if len(inputs) > 1:  # one of them raised an error, which must cost that sample alone
                for tensors in inputs:
                    with suppress(Exception), torch.no_grad():
                        results[group].append(functions[0](*shared, *tensors))

        in_own_threads(run, len(groups), in_order=self.draws or self._device is not None)
        return list(itertools.chain(*results))

    def _pieces(self, samples: Sequence[Sequence[Tensor]]) -> list[Piece]:
        """Of the outputs of some passes; float32 gradients stay where they are."""
        pieces, waiting = [], [iter(values) for values in samples]
        for output in self._outputs:
            tensors = [list(itertools.islice(values, len(output.nodes))) for values in waiting]
            if self._device is not None:
                pieces.append(dense(output, [torch.stack(column) for column in zip(*tensors, strict=True)]))
            elif output.factored is None and all(usable(value) for value in tensors[0]):
                pieces.append(Piece(output.parameters, Scattered(tensors)))
            else:
                pieces.append(output.piece([torch.stack(column) for column in zip(*tensors, strict=True)]))
        return pieces


def check_aligned(own: Tensor) -> Tensor:
    """A new tensor, if its alignment is what it is for all samples."""
    if own.data_ptr() % _ALIGNMENT and own.device.type == "cpu":
        raise InvalidParameter("torch returned memory off its 64-byte alignment: samples cannot be kept apart")
    return own


def _own(leaf: Tensor, sample: int) -> Tensor:
    """One sample in memory of its own."""
    return check_aligned(leaf[sample : sample + 1].clone(memory_format=torch.contiguous_format))


def _cut(values: Sequence[Tensor], samples: int) -> list[Sequence[Tensor]]:
    each = len(values) // samples
    return [values[start : start + each] for start in range(0, len(values), each)]


def made_up(node: fx.Node, rows: int, *, bounded: bool) -> Tensor:
    """Rows over four orders of magnitude. Whole numbers are 0, which every table and loss takes; of several rows, 0 or
    1, so that rows differ.

    bounded: between 0 and 1 instead, for losses that take nothing else, such as nn.BCELoss.
    """
    like: Tensor = node.meta["val"]
    shape = (rows, *like.shape)
    generator = torch.Generator().manual_seed(rows + like.numel())
    if not like.is_floating_point():
        return torch.randint(1 if rows == 1 else 2, shape, generator=generator).to(like.device, like.dtype)
    if bounded:
        return torch.rand(shape, generator=generator).to(like.device, like.dtype)
    scale = 10 ** (4 * torch.rand(rows, *[1] * like.dim(), generator=generator) - 2)
    return (torch.randn(shape, generator=generator) * scale).to(like.device, like.dtype)


# What a pass returns: gradients as they are, or the factors of a large one.


@dataclass(frozen=True, eq=False)
class Output:
    """The gradients of a run of parameters as they are, or of one parameter by its factors."""

    parameters: slice
    nodes: tuple[fx.Node, ...]
    factored: programs.Gradient | None = None

    def piece(self, values: Sequence[Tensor]) -> Piece:
        """Of the values of the nodes, each with the samples first."""
        factor: Factor
        if self.factored is not None:
            factor = factor_of(self.factored, iter(values))
        else:
            factor = Dense(torch.cat([working(value).reshape(len(value), -1) for value in values], 1))
        return Piece(self.parameters, factor)


def outputs_of(program: Program, *, tables: bool = False, products: bool = True) -> list[Output]:
    """What a pass returns for each parameter.

    tables: keep the factors of every table, however small. products: keep those of large products.
    """
    outputs: list[Output] = []
    run: list[fx.Node] = []
    for n, gradient in enumerate([*program.gradients, None]):
        if gradient is not None and not _stays_factored(gradient, tables, products):
            run.append(gradient.node)
            continue
        if run:
            outputs.append(Output(slice(n - len(run), n), tuple(run)))
            run = []
        if gradient is not None:
            outputs.append(Output(slice(n, n + 1), nodes_of(gradient), gradient))
    return outputs


def _stays_factored(gradient: programs.Gradient, tables: bool, products: bool) -> bool:
    """Whether norms and sums are cheaper to have from the factors than from the gradient itself."""
    coordinates = shape_of(gradient.node).numel()
    match gradient:
        case programs.Product(positions=positions):
            return products and positions == 1 and coordinates > WIDE
        case programs.Table(index=index):
            return tables or (coordinates > WIDE and gradient.rows > 4 * shape_of(index).numel())
    return False
