"""The program of one sample, vectorised: passes of one fixed shape with a sample in each row, on torch's own kernels.

`torch.func.vmap` makes of the program of one sample a program of several, by construction without an operation that
reads across samples, and the result is traced into one flat graph. What is left to torch is floating point: what a
kernel does to a row may depend on the shape of the pass, on the row's place in it and on its alignment in memory. So
none of the three may depend on the other samples of the batch: all passes have the same number of rows in aligned
buffers, and a sample stands in row (its number modulo the rows), in the first pass where that row is free. Empty rows
repeat a sample of the pass. What is assumed: in one shape, a row's result does not depend on the contents of other
rows; it is tried bit for bit on the running machine, and where it fails a pass takes one row. `docs/accounting.md`,
claim 8.

A sample whose program is long fills the processor by itself: then a pass has one row, nothing is assumed of rows, and
no row is ever empty. Such passes run side by side, each operation for a few samples in turn, so that weights are read
from the cache; and in several threads of ours, on one core each.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, fx
from torch.func import vmap
from torch.fx.experimental.proxy_tensor import make_fx

from bqsgd._src.errors import InvalidParameter
from bqsgd._src.persample import program as programs
from bqsgd._src.persample._kernels.loops import usable
from bqsgd._src.persample.factors import Dense, Factor, Piece, Scattered, factor_of, micro_batch, nodes_of, working
from bqsgd._src.persample.native import native
from bqsgd._src.persample.program import Program, Whole, shape_of
from bqsgd._src.runtime.generators import alone, generators_kept
from bqsgd._src.runtime.modes import repeatable
from bqsgd._src.runtime.threads import in_own_threads

aten = torch.ops.aten
MOST = 64
AT_ONCE, AT_ONCE_BYTES = 8, 16 << 20
"""Passes of one sample, and bytes of their gradients, that are held together at most; then they are clipped and added
up. With few, the gradients are still in the caches; with more, the sums are read and written less often."""
ENTRIES = 1 << 19
"""Numbers that a pass computes, about: fewer, and the time goes into starting operations; more leave the caches."""
WIDE = 1 << 15
"""Coordinates of a gradient from which on its factors are kept instead, where they are much smaller."""
ROWS_APART = "in passes of one shape, torch's kernels give a row a result that other rows do not change"
_ALIGNMENT = 64
"""Bytes; torch's own allocator promises as much for the tensors a pass makes."""

Numbers = Tensor | npt.NDArray[np.int64]


def rows_for(batch_size: int, entries: int, *, packed: bool) -> int:
    """Rows of a pass, from the *public* batch size and the size of the program alone: a power of two up to 64.

    With rows of their own, a batch drawn at random fills few rows more evenly than many: about 16 samples a row, and
    one row where a sample is work enough. Packed rows are all taken, so as many as there may be.
    """
    fair = batch_size if packed else min(batch_size // 16, ENTRIES // max(1, entries))
    return 1 << (max(1, min(MOST, fair)).bit_length() - 1)


@dataclass(frozen=True)
class Chunk:
    """One pass: member m of the batch stands in row `rows[m]`."""

    rows: Tensor
    members: Tensor


def plan_chunks(count: int, numbers: Numbers | None, rows: int) -> list[Chunk]:
    """Which samples of a batch go through the program together.

    With `numbers` every sample gets its own row; without them rows are taken as they come.
    """
    given = np.arange(count) if numbers is None else check_numbers(numbers, count)
    row = given % rows
    order = np.argsort(row, kind="stable")
    first = np.searchsorted(row[order], row[order])  # where the samples of the same row begin
    turn = np.arange(count) - first
    by_turn = np.argsort(turn, kind="stable")
    edges = np.searchsorted(turn[by_turn], np.arange(int(turn.max(initial=-1)) + 2))
    return [
        Chunk(torch.from_numpy(row[order][by_turn[low:high]]), torch.from_numpy(order[by_turn[low:high]]))
        for low, high in itertools.pairwise(edges)
    ]


def check_numbers(numbers: Numbers, count: int) -> npt.NDArray[np.int64]:
    """The numbers of `count` samples in their data."""
    found = np.asarray(numbers)
    if found.shape != (count,) or found.dtype.kind not in "iu" or (count and int(found.min()) < 0):
        raise InvalidParameter(
            f"indices must be {count} non-negative integers, the number of each sample in the data, "
            f"got {found.dtype} of shape {found.shape}"
        )
    return found.astype(np.int64)


def aligned_zeros(rows: int, like: Tensor) -> Tensor:
    """(rows, ...) zeros shaped as the samples of `like`, on a multiple of 64 bytes."""
    found = like.new_zeros(rows, *like.shape[1:])
    if found.device.type == "cpu" and found.data_ptr() % _ALIGNMENT:
        raise InvalidParameter("torch returned memory off its 64-byte alignment: samples cannot be kept apart")
    return found


class RowsRoad:
    """Runs a program in passes of `rows` samples, several passes at once in threads of ours."""

    def __init__(self, program: Program, whole: Whole, batch_size: int, *, packed: bool) -> None:
        dimension = sum(shape_of(gradient.node).numel() for gradient in program.gradients if gradient is not None)
        rows = rows_for(batch_size, program.entries(), packed=packed)
        self._prelude = program.prelude()
        self._packed, self.draws = packed, program.draws
        self.rows = 1 << (min(rows, micro_batch(dimension)).bit_length() - 1)
        self._at_once = max(1, min(AT_ONCE, AT_ONCE_BYTES // (4 * max(1, dimension))) // self.rows)
        with torch.no_grad():
            shared = self._prelude(*whole.randomised())
        if self.rows > 1 and not self._runs_in_rows(program, whole, shared):
            self.rows = 1
        # Samples that draw random numbers go one after another, in the order of the batch.
        self._abreast = max(1, self._at_once // torch.get_num_threads()) if self.rows == 1 and not self.draws else 1
        if self.rows == 1:
            self._outputs = _outputs(program, rows=1)
            body = _body(program, self._outputs)
            self._pass = native(body)
            self._several = native(programs.side_by_side(body, len(program.shared), self._abreast))
            self._try(program, shared)

    def _try(self, program: Program, shared: Sequence[Tensor]) -> None:
        """Run a pass on a made-up sample: what raises here, whatever the sample, would raise for every sample."""
        errors = []
        for bounded in (False, True):
            leaves = [_made_up(node, 1, bounded=bounded)[0] for node in program.leaves]
            try:
                with alone, generators_kept(), repeatable:
                    self._in_own_thread(*shared, *leaves)
                return
            except Exception as error:
                errors.append(error)
        raise programs.fails_on_made_up(errors[0], [shape_of(node)[1:] for node in program.leaves]) from errors[0]

    @property
    def assumes(self) -> str:
        """What keeping samples apart rests on besides its construction."""
        return ROWS_APART if self.rows > 1 else ""

    def _runs_in_rows(self, program: Program, whole: Whole, shared: Sequence[Tensor]) -> bool:
        """Whether torch can vectorise the program, and a row's result is its own on this machine."""
        self._outputs = _outputs(program, rows=self.rows)
        if _looks_up(program, [node for output in self._outputs for node in output.nodes]):
            return False
        for bounded in (False, True):
            leaves = [_made_up(node, self.rows, bounded=bounded) for node in program.leaves]
            dims = (None,) * len(shared) + (0,) * len(leaves)
            over = vmap(_body(program, self._outputs), in_dims=dims, randomness="different")
            try:
                with programs.plain_operations(whole):
                    traced = make_fx(over, tracing_mode="fake", _allow_non_fake_inputs=True)(*shared, *leaves)
                self._pass = native(traced)
                return rows_are_apart(self._values, shared, leaves, any_row=self._packed and not program.draws)
            except Exception:
                continue
        return False

    def _values(self, *tensors: Tensor) -> list[Tensor]:
        """The outputs of a pass. Call it in threads of ours: modes of the caller's thread would change the kernels."""
        with torch.no_grad():
            return list(self._pass(*tensors))

    def _in_own_thread(self, *tensors: Tensor) -> list[Tensor]:
        """A pass as it will run: kernels may split their work otherwise with the number of threads of the caller."""
        outputs: list[Tensor] = []
        in_own_threads(lambda _: outputs.extend(self._values(*tensors)), 1)
        return outputs

    def passes(
        self, whole: Whole, leaves: Sequence[Tensor], numbers: npt.NDArray[np.int64] | None
    ) -> Iterator[tuple[int, int, list[Piece]]]:
        """(samples, how many of them were lost, pieces of the others' gradients), a few passes at a time."""
        with torch.no_grad(), repeatable:
            shared = self._prelude(*whole.given())
            chunks = plan_chunks(len(leaves[0]), numbers, self.rows)
            size = max(torch.get_num_threads(), self._at_once)
            for start in range(0, len(chunks), size):
                group = chunks[start : start + size]
                values = self._run(shared, leaves, group)
                if self.rows == 1:
                    known = [value for value in values if value is not None]
                    yield len(group), len(group) - len(known), self._pieces_of_singles(known) if known else []
                    continue
                for chunk, value in zip(group, values, strict=True):
                    if value is None:
                        yield from self._one_by_one(shared, leaves, chunk)
                    else:
                        yield len(chunk.rows), 0, self._pieces(value, chunk)

    def _run(
        self, shared: Sequence[Tensor], leaves: Sequence[Tensor], chunks: Sequence[Chunk]
    ) -> list[list[Tensor] | None]:
        """The outputs of some passes; None of a pass that raised an error."""
        results: list[list[Tensor] | None] = [None] * len(chunks)
        abreast = self._abreast

        def run(group: int) -> None:
            places = range(len(chunks))[group * abreast : (group + 1) * abreast]
            inputs = [self._laid_out(leaves, chunks[place]) for place in places]
            if len(places) == abreast > 1:
                with suppress(Exception), torch.no_grad():
                    values = self._several(*shared, *itertools.chain(*inputs))
                    each = len(values) // abreast
                    results[places.start : places.stop] = [
                        list(values[start : start + each]) for start in range(0, len(values), each)
                    ]
                    return
            # Too few for a group, or one of them raised an error, which must cost that sample alone.
            for place, tensors in zip(places, inputs, strict=True):
                with suppress(Exception):
                    results[place] = self._values(*shared, *tensors)

        in_own_threads(run, -(-len(chunks) // abreast), in_order=self.draws)
        return results

    def _one_by_one(
        self, shared: Sequence[Tensor], leaves: Sequence[Tensor], chunk: Chunk
    ) -> Iterator[tuple[int, int, list[Piece]]]:
        """A pass in which a sample raised an error: each runs in its own row again, and in all the others."""
        for row, member in zip(chunk.rows, chunk.members, strict=True):
            single = Chunk(row[None], member[None])
            (values,) = self._run(shared, leaves, [single])
            yield 1, int(values is None), [] if values is None else self._pieces(values, single)

    def _laid_out(self, leaves: Sequence[Tensor], chunk: Chunk) -> list[Tensor]:
        laid_out = []
        for leaf in leaves:
            members = leaf[chunk.members.to(leaf.device)]
            buffer = aligned_zeros(self.rows, leaf)
            buffer[:] = members[:1]  # not zeros: an operation may refuse those, and the pass with them
            buffer[chunk.rows.to(leaf.device)] = members
            laid_out.append(buffer if self.rows == 1 else buffer.unsqueeze(1))
        return laid_out

    def _pieces(self, values: Sequence[Tensor], chunk: Chunk) -> list[Piece]:
        pieces, waiting = [], iter(values)
        for output in self._outputs:
            factor = output.factor([next(waiting) for _ in output.nodes])
            pieces.append(Piece(output.parameters, factor))
        if len(chunk.rows) < self.rows:
            pieces = [Piece(piece.parameters, piece.factor.take(chunk.rows)) for piece in pieces]
        return pieces

    def _pieces_of_singles(self, samples: Sequence[Sequence[Tensor]]) -> list[Piece]:
        pieces, waiting = [], [iter(values) for values in samples]
        for output in self._outputs:
            own = [[next(values) for _ in output.nodes] for values in waiting]
            pieces.append(Piece(output.parameters, output.factor_of_singles(own)))
        return pieces


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


def _made_up(node: fx.Node, rows: int, *, bounded: bool) -> Tensor:
    """Rows over four orders of magnitude; whole numbers are zeros, which every table and loss takes.

    bounded: between 0 and 1 instead, for losses that take nothing else, such as nn.BCELoss.
    """
    like: Tensor = node.meta["val"]
    shape = (rows, *like.shape)
    if not like.is_floating_point():
        return torch.zeros(shape, dtype=like.dtype, device=like.device)
    generator = torch.Generator().manual_seed(rows + like.numel())
    if bounded:
        return torch.rand(shape, generator=generator).to(like.device, like.dtype)
    scale = 10 ** (4 * torch.rand(rows, *[1] * like.dim(), generator=generator) - 2)
    return (torch.randn(shape, generator=generator) * scale).to(like.device, like.dtype)


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
        kept = torch.arange(len(leaves[0])) % 2 == parity
        mixed = [leaf.clone() for leaf in leaves]
        for leaf in mixed:
            other = leaf[~kept].roll(1, 0)
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
    return left.contiguous().cpu().numpy().tobytes() == right.contiguous().cpu().numpy().tobytes()


# What a pass returns: gradients as they are, or the factors of a large one.


@dataclass(frozen=True, eq=False)
class Flat:
    """The dense gradients of a run of parameters."""

    parameters: slice
    nodes: tuple[fx.Node, ...]

    def factor(self, values: Sequence[Tensor]) -> Factor:
        """Of the outputs of a pass of several rows."""
        return Dense(torch.cat([working(value).reshape(len(value), -1) for value in values], 1))

    def factor_of_singles(self, samples: Sequence[Sequence[Tensor]]) -> Factor:
        """Of the outputs of passes of one sample; they stay where they are."""
        tensors = [[working(value).contiguous() for value in values] for values in samples]
        if all(usable(value) for value in tensors[0]):
            return Scattered(tensors)
        return Dense(torch.stack([torch.cat([value.flatten() for value in values]) for values in tensors]))


@dataclass(frozen=True, eq=False)
class Factored:
    """A gradient that is made of smaller tensors."""

    parameters: slice
    gradient: programs.Gradient

    @property
    def nodes(self) -> tuple[fx.Node, ...]:
        """The tensors it is made of."""
        return nodes_of(self.gradient)

    def factor(self, values: Sequence[Tensor]) -> Factor:
        """Of the outputs of a pass of several rows."""
        return factor_of(self.gradient, iter(values))

    def factor_of_singles(self, samples: Sequence[Sequence[Tensor]]) -> Factor:
        """Of the outputs of passes of one sample."""
        return self.factor([torch.stack(column) for column in zip(*samples, strict=True)])


def _outputs(program: Program, *, rows: int) -> list[Flat | Factored]:
    found: list[Flat | Factored] = []
    run: list[fx.Node] = []
    for n, gradient in enumerate([*program.gradients, None]):
        dense = gradient is not None and not _stays_factored(gradient, rows)
        if dense and gradient is not None:
            run.append(gradient.node)
            continue
        if run:
            found.append(Flat(slice(n - len(run), n), tuple(run)))
            run = []
        if gradient is not None:
            found.append(Factored(slice(n, n + 1), gradient))
    return found


def _stays_factored(gradient: programs.Gradient, rows: int) -> bool:
    """Whether norms and sums are cheaper to have from the factors than from the gradient itself."""
    coordinates = shape_of(gradient.node).numel()
    match gradient:
        case programs.Product(positions=positions):
            return positions == 1 and coordinates > WIDE
        case programs.Table(index=index):
            return rows > 1 or (coordinates > WIDE and gradient.rows > 16 * shape_of(index).numel())
    return False


def _body(program: Program, outputs: Sequence[Flat | Factored]) -> fx.GraphModule:
    """(shared, leaves) -> the tensors of all outputs, in order."""
    return program.body([node for output in outputs for node in output.nodes])
