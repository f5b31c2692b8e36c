"""Packed rows: several samples in a pass of torch's kernels, on an assumption that the guarantee states.

`torch.func.vmap` makes of the program of one sample a program of several, by construction without an operation that
reads across samples, and the result is traced into one flat graph. What is left to torch is floating point: what a
kernel does to a row may depend on the row's place and on the other rows. All passes have one shape and aligned memory;
that a sample's result is then the same in every row and beside all others is the assumption. It is tried bit for bit on
the running machine, and where it fails samples run in passes of their own (`passes`). `docs/accounting.md`, claim 8.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, fx
from torch.func import vmap
from torch.fx.experimental.proxy_tensor import make_fx

from bqsgd._src.persample import program as programs
from bqsgd._src.persample.device import dense, name_of
from bqsgd._src.persample.factors import Piece, micro_batch
from bqsgd._src.persample.native import native
from bqsgd._src.persample.passes import SAME_BITS, Output, check_aligned, made_up, outputs_of
from bqsgd._src.persample.program import Program, Whole
from bqsgd._src.runtime.generators import alone, generators_kept
from bqsgd._src.runtime.modes import repeatable
from bqsgd._src.runtime.threads import in_own_threads

aten = torch.ops.aten
MOST = 64
ROWS_APART = "in passes of one shape, torch's kernels give a row a result that other rows do not change"


DEVICE_ROWS, DEVICE_BYTES = 256, 1 << 29
"""The same on a device, and bytes of the gradients that it holds at once."""


def rows_for(batch_size: int, dimension: int, device: torch.device | None = None) -> int:
    """Rows of a pass, from the *public* batch size and the size of the model: a power of two up to 64; 256 on a
    device."""
    fitting = (MOST, micro_batch(dimension)) if device is None else (DEVICE_ROWS, DEVICE_BYTES // (4 * dimension + 4))
    return 1 << (max(1, min(batch_size, *fitting)).bit_length() - 1)


class NotRows(Exception):
    """A program that torch cannot vectorise, or whose rows are not apart on this machine."""


class RowsRoad:
    """Runs a program in passes of `rows` samples, several passes at once in threads of ours.

    Raises:
        NotRows: samples must run in passes of their own.
    """

    def __init__(self, program: Program, whole: Whole, batch_size: int, device: torch.device | None = None) -> None:
        self.draws, self.rows, self._device = program.draws, rows_for(batch_size, program.dimension, device), device
        self.assumes = ROWS_APART if device is None else f"{ROWS_APART}; {SAME_BITS.format(name_of(device))}"
        self._prelude, self._outputs = program.prelude(), outputs_of(program, tables=True, products=device is None)
        nodes = [node for output in self._outputs for node in output.nodes]
        if self.rows == 1 or _looks_up(program, nodes):
            raise NotRows
        with torch.no_grad():
            shared = self._prelude(*whole.randomised())
        for bounded in (False, True):
            leaves = [made_up(node, self.rows, bounded=bounded) for node in program.leaves]
            over = vmap(program.body(nodes), in_dims=(None,) * len(shared) + (0,) * len(leaves), randomness="different")
            with suppress(Exception):
                with programs.plain_operations(whole):
                    traced = make_fx(over, tracing_mode="fake", _allow_non_fake_inputs=True)(*shared, *leaves)
                self._pass = native(traced)
                if rows_are_apart(self._values, shared, leaves, any_row=not self.draws):
                    return
                break
        raise NotRows

    def _values(self, *tensors: Tensor) -> list[Tensor]:
        """The outputs of a pass. Call it in threads of ours: modes of the caller's thread would change the kernels."""
        with torch.no_grad():
            return list(self._pass(*tensors))

    def passes(self, whole: Whole, leaves: Sequence[Tensor]) -> Iterator[tuple[int, int, list[Piece]]]:
        """(samples, how many of them were lost, pieces of the others' gradients) of each pass."""
        with torch.no_grad(), repeatable:
            shared = self._prelude(*whole.given())
            chunks = [[leaf[start : start + self.rows] for leaf in leaves]
                      for start in range(0, len(leaves[0]), self.rows)]  # fmt: skip
            threads = torch.get_num_threads()
            for start in range(0, len(chunks), threads):
                group = chunks[start : start + threads]
                for chunk, values in zip(group, self._run(shared, group), strict=True):
                    if values is not None:
                        yield len(chunk[0]), 0, self._pieces(values, len(chunk[0]))
                        continue
                    for sample in range(len(chunk[0])):  # one of them raised an error: each fills a pass by itself
                        (own,) = self._run(shared, [[leaf[sample : sample + 1] for leaf in chunk]])
                        yield 1, int(own is None), [] if own is None else self._pieces(own, 1)

    def _run(self, shared: Sequence[Tensor], chunks: Sequence[Sequence[Tensor]]) -> list[list[Tensor] | None]:
        """The outputs of some passes; None of a pass that raised an error."""
        results: list[list[Tensor] | None] = [None] * len(chunks)

        def run(place: int) -> None:
            # Empty rows repeat a sample: an operation may refuse zeros, and the pass with them.
            filled = [check_aligned(torch.cat([leaf, *[leaf[:1]] * (self.rows - len(leaf))])) for leaf in chunks[place]]
            with suppress(Exception):
                results[place] = self._values(*shared, *(leaf.unsqueeze(1) for leaf in filled))

        in_own_threads(run, len(chunks), in_order=self.draws or self._device is not None)
        return results

    def _pieces(self, values: Sequence[Tensor], samples: int) -> list[Piece]:
        waiting, used = iter(values), torch.arange(samples)
        piece_of = Output.piece if self._device is None else dense
        pieces = [piece_of(output, [next(waiting) for _ in output.nodes]) for output in self._outputs]
        return [Piece(piece.parameters, piece.factor.take(used)) for piece in pieces]


_PLACED = {
    aten.gather.default, aten.nll_loss_forward.default, aten.nll_loss_backward.default, aten._to_copy.default,
    aten.eq.Tensor, aten.eq.Scalar, aten.ne.Tensor, aten.ne.Scalar, aten.lt.Scalar, aten.gt.Scalar, aten.ge.Scalar,
    aten.le.Scalar, aten.view.default, aten._unsafe_view.default, aten.expand.default, aten.unsqueeze.default,
    aten.squeeze.dim, aten.select.int, aten.slice.Tensor, aten.clone.default, aten.where.self, aten.full_like.default,
}  # fmt: skip
"""Operations on a sample's whole numbers that vmap keeps in the sample's row whatever the numbers are."""


_MADE = {
    aten.max_pool2d_with_indices.default, aten.max_pool3d_with_indices.default, aten.sort.default, aten.topk.default,
    aten.max.dim, aten.min.dim, aten.argmax.default, aten.argmin.default,
}  # fmt: skip
"""Operations whose whole numbers are places in their own input, whatever the data are."""


def _looks_up(program: Program, wanted: Sequence[fx.Node]) -> bool:
    """Whether a sample's whole numbers are used as places in a way that vmap may lay end to end: tables of several
    samples then lie one after another, and a number out of range would reach the next sample's."""
    body = program.body(wanted)
    placeholders = [node for node in body.graph.nodes if node.op == "placeholder"]
    fixed = set(placeholders[: len(program.shared)])
    for node in body.graph.nodes:
        if node.op != "call_function" or node.target in _PLACED or node.target is operator.getitem:
            continue
        whole = [each for each in node.all_input_nodes if _is_whole(each) and each not in fixed]
        if whole and not (node.target is aten.embedding.default and node.args[0] in fixed):
            return True
    return False


def _is_whole(node: Any) -> bool:
    value, source = node.meta.get("val"), node.args[0] if node.target is operator.getitem else node
    if source.target in _MADE:
        return False
    return isinstance(value, Tensor) and not value.is_floating_point() and value.dtype != torch.bool


def rows_are_apart(
    run: Callable[..., Sequence[Tensor]], shared: Sequence[Tensor], leaves: Sequence[Tensor], *, any_row: bool
) -> bool:
    """Whether each row of a pass comes out the same, bit for bit, while the other rows change.

    any_row: whether a sample also comes out the same in every row.
    """
    apart: list[bool] = []
    with alone, generators_kept(), repeatable:
        in_own_threads(lambda _: apart.append(_rows_are_apart(run, shared, leaves, any_row=any_row)), 1)
    return apart == [True]


@torch.no_grad()
def _rows_are_apart(
    run: Callable[..., Sequence[Tensor]], shared: Sequence[Tensor], leaves: Sequence[Tensor], *, any_row: bool
) -> bool:
    torch.manual_seed(0)  # the same draws each time
    first = run(*shared, *leaves)
    for parity in (0, 1):
        kept = torch.arange(len(leaves[0]), device=leaves[0].device) % 2 == parity
        mixed = [leaf.clone() for leaf in leaves]
        for leaf in mixed:
            other = leaf[kept][:1]  # repeated: the same rows in another order would leave their sum as it is
            leaf[~kept] = other * 3 if leaf.is_floating_point() else other
        torch.manual_seed(0)
        second = run(*shared, *mixed)
        if not all(_same_bits(old[kept], new[kept]) for old, new in zip(first, second, strict=True)):
            return False
    if any_row:
        alike = [leaf[:1].expand_as(leaf).contiguous() for leaf in leaves]
        return all(_same_bits(found, found[:1].expand_as(found)) for found in run(*shared, *alike))
    return True


def _same_bits(left: Tensor, right: Tensor) -> bool:
    return torch.equal(*(each.contiguous().view(torch.uint8).cpu() for each in (left, right)))
