"""What a client's samples add to a message: of any form, through a model and a loss per sample, each clipped by itself.

Model and loss are tried on made-up samples of a form before real ones of that form go through them. Samples of a form
that does not pass count as zero: whether it passes is a matter of shapes and types alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from bqsgd.errors import InvalidParameter
from bqsgd.models import dimension_of
from bqsgd.persample import BatchMean, Clip
from bqsgd.persample.functional import LossFunction
from bqsgd.release import Unit
from bqsgd.training.samples import Part
from bqsgd.training.values import Values, check_model, made_of, sample_values

_log = logging.getLogger("bqsgd.samples")
Forward = Callable[[nn.Module, Any], tuple[Any, Any]]
"""(model, batch as the collate_fn made it) -> (outputs, targets), which the loss takes."""
_MADE_UP = 16
"""Made-up samples on which a batch of another form than (inputs, targets) is tried."""


class Objective:
    """One sample's loss as a function of the model: what is differentiated, clipped and added up.

    Args:
        model: the module that is trained.
        loss: (outputs, targets) -> one loss per sample.
        forward: (model, batch) -> (outputs, targets), for batches of another form than (inputs..., targets).
    """

    def __init__(self, model: nn.Module, loss: LossFunction, forward: Forward | None = None) -> None:
        self.model, self.loss, self.forward = model, loss, forward
        self._gathered: dict[object, _Gathered] = {}
        """What gathers samples of one form, by the form: what is found out of a model is kept with the module."""
        self._holding: _Gathered | None = None
        self._passed: dict[object, bool] = {}
        """What was checked -> whether it passed."""
        self.draws = False
        """Whether model or loss draw random numbers, as far as was seen."""

    @property
    def dimension(self) -> int:
        """Coordinates of what a sample adds."""
        return dimension_of(self.model)

    def _plain(self, data: Any) -> bool:
        return (
            self.forward is None
            and isinstance(data, (tuple, list))
            and len(data) == 2
            and all(isinstance(part, Tensor) for part in data)
        )

    def _question(self, *asked: Any) -> object:
        """What a check depends on besides the model: of the data the form of one sample, not how many there are."""
        data, *settings = asked
        return _form(data), *settings, torch.get_num_threads(), made_of(self.model)

    def _hold(self, data: Any) -> _Gathered:
        """These samples, to be named by number; those held before are let go."""
        if self._holding is not None:
            self._holding.rest()
        form = _form(data)
        if form not in self._gathered:
            self._gathered[form] = _Gathered(self.model, self.loss, self.forward or _inputs_then_target)
        self._holding = self._gathered[form]
        self._holding.hold(data)
        return self._holding

    def check(self, data: Any, *, clip: Clip, batch_size: int, unit: Unit = Unit.SAMPLE, packed: bool = False) -> None:
        """Run model and loss on zeros and made-up samples of the shapes of `data`, whose values are not read.

        Raises:
            InvalidParameter: the model mixes samples, the loss is reduced, or the shapes do not go together.
        """
        question = self._question(data, clip, batch_size, unit, packed)
        if self._passed.get(question):
            return
        self._passed[question] = False
        asked: dict[str, Any] = {"clip": clip, "batch_size": batch_size, "unit": unit, "packed": packed}
        try:
            if self._plain(data):
                draws = check_model(self.model, self.loss, data, **asked)
            else:
                gathered, numbers = self._hold(_made_up(data)), torch.arange(_MADE_UP)
                draws = check_model(gathered, _same, (numbers, numbers), made_up=(numbers, numbers), **asked)
        except (InvalidParameter, Warning):
            raise
        except Exception as error:
            raise InvalidParameter(
                f"the model or the loss fails on samples of the shapes {_shapes(data)}, so nothing was spent: "
                f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
            ) from error
        self._passed[question] = True
        self.draws |= draws

    def mean(self, parts: Iterable[Part], *, clip: Clip, batch_size: int, packed: bool = False) -> tuple[Values, int]:
        """The clipped gradients of all parts over the public batch size, and how many samples count as zero.

        The mean is the same to the last bit however the samples are divided into parts: whole steps of the clip's grid
        are added, and divided once. How many count as zero depends on the data: keep it private.
        """
        # A power of two gives the same rows as the batch size and divides without rounding; a batch mean is clamped,
        # so it must be divided by the batch size itself.
        whole = isinstance(clip, BatchMean)
        power = batch_size if whole else 1 << (batch_size.bit_length() - 1)
        total, lost = np.zeros(self.dimension), 0
        for part in parts:
            if part.data is None or not self._fits(part.data, clip=clip, batch_size=batch_size, packed=packed):
                lost += len(part)
                continue
            model, loss, batch = self._as_pair(part.data)
            values, dropped = sample_values(
                model, loss, batch, indices=None if packed else part.numbers, clip=clip, batch_size=power
            )
            total += values if whole else values * power
            lost += dropped
        if isinstance(clip, BatchMean):
            return total.clip(-clip.bound, clip.bound), lost
        return total / batch_size, lost

    def mean_loss(self, parts: Iterable[Part]) -> Tensor | None:
        """The mean loss of all samples that could be read, to be differentiated; None without any."""
        losses = []
        for part in parts:
            if part.data is not None:
                model, loss, (inputs, targets) = self._as_pair(part.data)
                losses.append(loss(model(inputs), targets).reshape(-1))  # a whole update may do with a mean
        return torch.cat(losses).mean() if losses else None

    def outputs(self, data: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Outputs, targets and losses of some samples, as the model stands."""
        outputs, targets = (self.forward or _inputs_then_target)(self.model, data)
        return outputs, targets, self.loss(outputs, targets)

    def _as_pair(self, data: Any) -> tuple[nn.Module, LossFunction, tuple[Tensor, Tensor]]:
        if self._plain(data):
            return self.model, self.loss, (data[0], data[1])
        gathered = self._hold(data)
        numbers = torch.arange(1, len(gathered) + 1)  # 0 is the empty row
        return gathered, _same, (numbers, numbers)

    def _fits(self, data: Any, *, clip: Clip, batch_size: int, packed: bool) -> bool:
        """Whether samples of these shapes pass the check; the answer is a matter of the shapes alone."""
        question = self._question(data, clip, batch_size, Unit.SAMPLE, packed)
        if question not in self._passed:
            try:
                self.check(data, clip=clip, batch_size=batch_size, packed=packed)
            except Exception as error:
                _log.warning("samples of a new shape count as zero (keep this line private): %s", error)
        return self._passed[question]


class _Gathered(nn.Module):
    """The losses of samples named by number: a batch of any structure goes through the model as one tensor of rows.

    Number 0 is a sample of zeros, which fills empty rows.
    """

    def __init__(self, model: nn.Module, loss: LossFunction, forward: Forward) -> None:
        super().__init__()
        self.model = model
        self._how = (loss, forward)  # in a tuple: a loss that is a module must not lend its parameters
        self._leaves: list[Tensor] = []
        self._structure: Callable[[list[Tensor]], Any] = tuple

    def hold(self, data: Any) -> None:
        """Take these samples."""
        leaves, spec = tree_flatten(data)
        self._structure = lambda values: tree_unflatten(values, spec)
        self._leaves = [torch.cat([leaf.new_zeros(1, *leaf.shape[1:]), leaf]) for leaf in leaves]

    def __len__(self) -> int:
        """How many samples are held."""
        return len(self._leaves[0]) - 1

    def rest(self) -> None:
        """Let go of the samples."""
        self._leaves = []

    def forward(self, numbers: Tensor) -> Tensor:
        """One loss per number."""
        loss, forward = self._how
        batch = self._structure([leaf[numbers] for leaf in self._leaves])
        outputs, targets = forward(self.model, batch)
        return loss(outputs, targets)


def _same(losses: Tensor, numbers: Tensor) -> Tensor:
    return losses


def _inputs_then_target(model: nn.Module, batch: Any) -> tuple[Any, Any]:
    """model(every input in turn), and the last element of the batch."""
    if not isinstance(batch, (tuple, list)) or len(batch) < 2:
        raise InvalidParameter(
            f"a batch is a {type(batch).__name__}, not (inputs..., targets): say what the loss takes, for example "
            'forward=lambda model, batch: (model(batch["ids"], batch["mask"]), batch["labels"])'
        )
    return model(*batch[:-1]), batch[-1]


def _made_up(data: Any) -> Any:
    """Samples of the shapes of `data` and of no data at all, over four orders of magnitude."""
    leaves, spec = tree_flatten(data)
    generator = torch.Generator().manual_seed(1)
    made = []
    for leaf in leaves:
        shape = (_MADE_UP, *leaf.shape[1:])
        numbers = torch.arange(_MADE_UP).view(-1, *[1] * (leaf.dim() - 1))
        if leaf.is_floating_point() or leaf.is_complex():
            scale = 10.0 ** (numbers.remainder(5) - 2)
            made.append((torch.randn(shape, generator=generator) * scale).to(leaf.dtype))
        else:
            made.append(numbers.remainder(2).expand(shape).to(leaf.dtype))
    return tree_unflatten(made, spec)


def _form(data: Any) -> object:
    """Structure, types and shapes of one sample of `data`."""
    leaves, spec = tree_flatten(data)
    return str(spec), tuple((leaf.dtype, leaf.shape[1:]) if isinstance(leaf, Tensor) else type(leaf) for leaf in leaves)


def _shapes(data: Any) -> str:
    return ", ".join(str(tuple(leaf.shape[1:])) for leaf in tree_flatten(data)[0])
