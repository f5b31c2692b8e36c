"""What a client's samples add to a message: of any form, through a model and a loss per sample, each clipped by itself.

A peer sees whether a reply comes and of what kind. After the spend neither may depend on the data: a sample that cannot
be read, whose gradient is not finite or that makes the program raise an error counts as zero. Only what follows from
the model, the settings and the public form of a sample is refused, and that before the spend (`Objective.check`).
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from bqsgd._src.client.samples import Part
from bqsgd._src.client.values import Values
from bqsgd._src.models import dimension_of, trainable
from bqsgd._src.persample import BatchMean, Clip, clipped_gradients
from bqsgd._src.persample.gradients import ClippedGradients, Road, road_of
from bqsgd._src.persample.program import Form, Forward, LossFunction, fails_on_made_up, inputs_then_target
from bqsgd._src.privacy.guarantee import Guarantee
from bqsgd._src.release import Unit
from bqsgd._src.runtime.generators import alone, generators_kept, states
from bqsgd._src.runtime.interrupts import StopNow
from bqsgd._src.runtime.threads import check_ieee

_log = logging.getLogger("bqsgd.samples")


class Objective:
    """One sample's loss as a function of the model: what is differentiated, clipped and added up.

    Args:
        model: the module that is trained.
        loss_fn: (outputs, targets) -> one loss per sample.
        forward: (model, batch) -> (outputs, targets), for batches of another form than (inputs..., targets).
    """

    def __init__(self, model: nn.Module, loss_fn: LossFunction, forward: Forward | None = None) -> None:
        self.model, self.loss_fn, self.forward = model, loss_fn, forward
        self.draws = False
        """Whether model or loss draw random numbers, as far as was seen."""
        self._assumes: set[str] = set()
        self._tried: set[object] = set()
        """What `_try_clip` has run."""

    @property
    def dimension(self) -> int:
        """Coordinates of what a sample adds."""
        return dimension_of(self.model)

    def check(self, data: Any, *, clip: Clip, batch_size: int, unit: Unit = Unit.SAMPLE, packed: bool = False) -> None:
        """Find out how samples of the form of `data` go through model and loss. The values of `data` are not read.

        Raises:
            InvalidParameter: a layer mixes samples, the loss is reduced, the shapes do not go together, or this
                process does not keep IEEE arithmetic.
        """
        check_ieee()
        if unit is Unit.CLIENT:
            self._check_whole(data)
        else:
            road = self._road(Form.of(data), batch_size, packed)
            self.draws |= road.draws
            # Only here, of the public form: what a guarantee says must not depend on the records that were drawn.
            self._assumes |= {road.assumes} - {""}
            self._try_clip(data, clip, batch_size, packed)

    def _try_clip(self, data: Any, clip: Clip, batch_size: int, packed: bool) -> None:
        """Clip a made-up sample, once per setting. After the spend an error in a clip would cost every sample of every
        round, and nobody would be told."""
        setting = Form.of(data), repr(clip), batch_size, packed
        if setting not in self._tried:
            zeros = tree_map(lambda leaf: leaf.new_zeros((1, *leaf.shape[1:])), data)
            with alone, generators_kept():
                self._clipped(zeros, None if packed else np.zeros(1, np.int64), clip, batch_size)
            self._tried.add(setting)

    def _clipped(
        self, data: Any, numbers: npt.NDArray[np.int64] | None, clip: Clip, batch_size: int
    ) -> ClippedGradients:
        return clipped_gradients(
            self.model, self.loss_fn, data, indices=numbers, clip=clip, batch_size=batch_size, forward=self.forward
        )

    def _road(self, form: Form, batch_size: int, packed: bool) -> Road:
        return road_of(self.model, self.loss_fn, self.forward, form, batch_size=_power(batch_size), packed=packed)

    def stated(self, guarantee: Guarantee) -> Guarantee:
        """The guarantee with what keeping this model's samples apart rests on; nothing for most models."""
        known = [guarantee.assumption] if guarantee.assumption else []
        return replace(guarantee, assumption="; ".join([*known, *sorted(self._assumes)]))

    def _check_whole(self, data: Any) -> None:
        """A whole update may do with a loss that is a mean, so model and loss are tried on two made-up samples."""
        zeros = tree_map(lambda leaf: torch.zeros((2, *leaf.shape[1:]), dtype=leaf.dtype), data)
        model = copy.deepcopy(self.model)
        with alone, generators_kept():
            before = states()
            try:
                mean = self.mean_loss([Part(numbers=np.arange(2), data=zeros)], model)
                assert mean is not None
                torch.autograd.grad(mean, trainable(model), allow_unused=True)
            except Exception as error:
                raise fails_on_made_up(error, Form.of(data).shapes) from error
            self.draws |= states() != before

    def mean(self, parts: Iterable[Part], *, clip: Clip, batch_size: int, packed: bool = False) -> tuple[Values, int]:
        """The clipped gradients of all parts over the public batch size, and how many samples count as zero.

        The mean is the same to the last bit however the samples are divided into parts: whole steps of the clip's grid
        are added, and divided once. How many count as zero depends on the data: keep it private.
        """
        # A power of two gives the same rows as the batch size and divides without rounding; a batch mean is clamped,
        # so it must be divided by the batch size itself.
        is_batch_mean = isinstance(clip, BatchMean)
        power = batch_size if is_batch_mean else _power(batch_size)
        total, lost = np.zeros(self.dimension), 0
        for part in parts:
            if not self._fits(part.data, power, packed):
                lost += len(part)
                continue
            for mean, dropped in self._means(part, clip, power, packed):
                total += mean if is_batch_mean else mean * power
                lost += dropped
        if isinstance(clip, BatchMean):
            return total.clip(-clip.bound, clip.bound), lost
        return total / batch_size, lost

    def _means(self, part: Part, clip: Clip, batch_size: int, packed: bool) -> Iterator[tuple[Values, int]]:
        """The mean over a part; if that fails, as for want of memory, the same from each sample by itself."""
        whole = self._mean(part, slice(None), clip, batch_size, packed)
        if whole is not None:
            yield whole
            return
        for n in range(len(part)):
            yield self._mean(part, slice(n, n + 1), clip, batch_size, packed) or (np.zeros(self.dimension), 1)

    def _mean(self, part: Part, span: slice, clip: Clip, batch_size: int, packed: bool) -> tuple[Values, int] | None:
        """The mean over some samples of a part, and how many count as zero; None if an error was raised."""
        try:
            data, numbers = tree_map(lambda leaf: leaf[span], part.data), None if packed else part.numbers[span]
            gradients = self._clipped(data, numbers, clip, batch_size)
        except StopNow:
            raise
        except BaseException:
            return None
        return gradients.mean.numpy(), gradients.dropped

    def _fits(self, data: Any, batch_size: int, packed: bool) -> bool:
        """Whether samples could be read and can go through the model: the latter is a matter of their form alone."""
        if data is None:
            return False
        try:
            self._road(Form.of(data), batch_size, packed)
        except StopNow:
            raise
        except BaseException:
            _log.debug("samples of a form that the model cannot take count as zero (keep this line private)")
            return False
        return True

    def mean_loss(self, parts: Iterable[Part], model: nn.Module | None = None) -> Tensor | None:
        """The mean loss of all samples that could be read, to be differentiated; None without any.

        model: what it is computed with, and may be changed by its own forward; a copy of the model unless given.
        """
        model = copy.deepcopy(self.model) if model is None else model
        losses = []
        for part in parts:
            if part.data is not None:
                outputs, targets = (self.forward or inputs_then_target)(model, part.data)
                losses.append(self.loss_fn(outputs, targets).reshape(-1))  # a whole update may do with a mean
        return torch.cat(losses).mean() if losses else None

    def outputs(self, data: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Outputs, targets and losses of some samples, as the model stands."""
        outputs, targets = (self.forward or inputs_then_target)(self.model, data)
        return outputs, targets, self.loss_fn(outputs, targets)


def _power(batch_size: int) -> int:
    """The power of two below a batch size."""
    return 1 << (batch_size.bit_length() - 1)
