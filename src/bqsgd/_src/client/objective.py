"""What a client's samples add to a message: of any form, through a model and a loss per sample, each clipped by itself.

A peer sees whether a reply comes and of what kind. After the spend neither may depend on the data: a sample that cannot
be read, whose gradient is not finite or that makes the program raise an error counts as zero. Only what follows from
the model, the settings and the public form of a sample is refused, and that before the spend (`Objective.check`).
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from bqsgd._src.client.samples import Part
from bqsgd._src.client.values import Values
from bqsgd._src.descent.centre import Centre
from bqsgd._src.models import device_of, dimension_of, load_vector, trainable
from bqsgd._src.persample import BatchMean, Clip, clipped_gradients
from bqsgd._src.persample._kernels.grid import Grid
from bqsgd._src.persample.gradients import Road, road_of
from bqsgd._src.persample.program import Form, Forward, LossFunction, fails_on_made_up, inputs_then_target
from bqsgd._src.privacy.guarantee import Guarantee
from bqsgd._src.release import Unit
from bqsgd._src.runtime.generators import alone, check_lent, generators_kept, states
from bqsgd._src.runtime.interrupts import errors_dropped
from bqsgd._src.runtime.modes import Autocast
from bqsgd._src.runtime.threads import check_ieee
from bqsgd._src.subset import Subset, Subsets

_log = logging.getLogger("bqsgd.clip")
_COARSE_STEP = 1e-3
"""A grid with larger steps loses coordinates of gradients whose length is about 1."""


class Objective:
    """One sample's loss as a function of the model: what is differentiated, clipped and added up.

    Args:
        model: the module that is trained.
        loss_fn: (outputs, targets) -> one loss per sample.
        clip: what one sample's gradient is clipped to.
        batch_size: the public batch size, which the sum of the clipped gradients is divided by.
        forward: (model, batch) -> (outputs, targets), for batches of another form than (inputs..., targets).
        unit: CLIENT if the loss may be a mean over samples, because the update is clipped as a whole.
        packed: see `clipped_gradients`.
        subsets: the coordinates that messages carry; None for all.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFunction,
        *,
        clip: Clip,
        batch_size: int,
        forward: Forward | None = None,
        unit: Unit = Unit.SAMPLE,
        packed: bool = False,
        subsets: Subsets | None = None,
    ) -> None:
        self.model, self.loss_fn, self.forward = model, loss_fn, forward
        self.clip, self.batch_size, self.unit, self.packed = clip, batch_size, unit, packed
        self.subsets = subsets
        # A power of two divides without rounding, so that parts of a batch add up exactly. A batch mean is clamped, so
        # it must be divided by the batch size itself.
        self._divisor = batch_size if isinstance(clip, BatchMean) else 1 << (batch_size.bit_length() - 1)
        self._clipped = partial(
            clipped_gradients, model, loss_fn, clip=clip, forward=forward, batch_size=self._divisor, packed=packed
        )
        self.centre: Centre | None = None
        """How the centre of the features is measured; None if it is not."""
        self.autocast: Autocast | None = None
        """The mode of torch.autocast in which forward and loss run; None for off. See `in_callers_autocast`."""
        self.draws = False
        """Whether model or loss draw random numbers, as far as `check` has seen."""
        self._assumes: set[str] = set()
        self._warned = False
        self._tried: set[Form] = set()
        """Forms of which a made-up sample was clipped."""

    @property
    def dimension(self) -> int:
        """Coordinates of what a sample adds."""
        return dimension_of(self.model) if self.subsets is None else self.subsets.kept

    def load(self, model: npt.NDArray[np.float32], *, round: int) -> None:
        """Take over the server's model of `round`.

        Raises:
            InvalidParameter, NonFiniteInput: the vector does not fit or is not finite.
        """
        load_vector(self.model, model)

    def check(self, data: Any) -> None:
        """Find out how samples of the form of `data` go through model and loss. The values of `data` are not read.

        Raises:
            InvalidParameter: a layer mixes samples, the loss is reduced, the shapes do not go together, or this
                process does not keep IEEE arithmetic.
        """
        check_ieee()
        self._check_grid()
        form = Form.of(data, device_of(self.model))
        if self.unit is Unit.CLIENT:
            self._check_whole(data, form)
            return
        road = self._road(form)
        self.draws |= road.draws
        if road.draws:
            check_lent(device_of(self.model))
        # Only here, from the public form: what a guarantee says must not depend on the records that were drawn.
        self._assumes |= {road.assumes} - {""}
        if form not in self._tried:
            # After the spend an error in a clip would cost every sample of every round, and nobody would be told.
            zeros = tree_map(lambda leaf: leaf.new_zeros((1, *leaf.shape[1:])), data)
            with alone, generators_kept():
                self._clipped(zeros, subset=self.subset(round=0, client=0), autocast=self._mode)
            self._tried.add(form)

    def _check_grid(self) -> None:
        """Say it if the clip is so loose that gradients of ordinary length are rounded away. Reads no data."""
        bound = max(clip.largest for clip in self.clip.layers(len(trainable(self.model))))
        step = Grid(bound).step
        if step > _COARSE_STEP and not self._warned:
            self._warned = True
            _log.warning(
                "the clip bound %g is large: gradients are rounded to whole steps of %.2g, so smaller coordinates are "
                "lost; use a clip norm near the length of your gradients (0.5 to 10 is usual)",
                bound,
                step,
            )

    def _road(self, form: Form) -> Road:
        model, divisor, packed = self.model, self._divisor, self.packed
        return road_of(model, self.loss_fn, self.forward, form, batch_size=divisor, packed=packed, autocast=self._mode)

    @property
    def _mode(self) -> Autocast:
        return self.autocast or Autocast(device_of(self.model).type)

    def in_callers_autocast(self) -> None:
        """Take over the mode of torch.autocast that this thread is in now, for the next check and the next mean.

        It must be called before a spend, by the program's own code: then it depends on the program alone. Whatever
        turns autocast on or off after that, such as the code of a record that is read, changes no sample's program.
        """
        self.autocast = Autocast.now(device_of(self.model).type)

    def _check_whole(self, data: Any, form: Form) -> None:
        """A whole update may do with a loss that is a mean, so model and loss are tried on two made-up samples."""
        device = device_of(self.model)
        zeros = tree_map(lambda leaf: torch.zeros((2, *leaf.shape[1:]), dtype=leaf.dtype, device=device), data)
        model = copy.deepcopy(self.model)
        with alone, generators_kept():
            before = states()
            try:
                mean = self.mean_loss([Part(numbers=np.arange(2), data=zeros)], model)
                assert mean is not None
                torch.autograd.grad(mean, trainable(model), allow_unused=True)
            except Exception as error:
                raise fails_on_made_up(error, form.shapes) from error
            self.draws |= states() != before

    def stated(self, guarantee: Guarantee) -> Guarantee:
        """The guarantee with the assumptions under which this model's samples are kept apart; most models need none."""
        known = [guarantee.assumption] if guarantee.assumption else []
        return replace(guarantee, assumption="; ".join([*known, *sorted(self._assumes)]))

    def subset(self, *, round: int, client: int | None) -> Subset | None:
        """The coordinates of a message; None for all."""
        return None if self.subsets is None else self.subsets.drawn(round=round, client=client)

    def mean(self, parts: Iterable[Part], subset: Subset | None = None) -> tuple[Values, int]:
        """The clipped gradients of all parts over the public batch size, and how many samples count as zero.

        The mean is the same to the last bit however the samples are divided into parts: whole steps of the clip's grid
        are added, and divided once. How many count as zero depends on the data: keep it private.

        subset: the coordinates that the mean holds; None for all.
        """
        is_batch_mean = isinstance(self.clip, BatchMean)
        total, lost = np.zeros(self.dimension), 0
        for part in parts:
            waiting = [part]
            while waiting:
                samples = waiting.pop()
                gradients = None
                with errors_dropped():
                    gradients = self._clipped(samples.data, subset=subset, autocast=self._mode)
                if gradients is not None:
                    mean = gradients.mean.numpy()
                    total += mean if is_batch_mean else mean * self._divisor
                    lost += gradients.dropped
                elif len(samples) > 1 and self._takes(samples.data):
                    waiting += reversed(samples.singly())  # one of them failed, or all together need too much memory
                else:
                    lost += len(samples)
        if isinstance(self.clip, BatchMean):
            return total.clip(-self.clip.bound, self.clip.bound), lost
        return total / self.batch_size, lost

    def _takes(self, data: Any) -> bool:
        """Whether samples of this form can go through the model at all; otherwise none needs to be tried by itself."""
        with errors_dropped("samples of a form that the model cannot take count as zero"):
            self._road(Form.of(data, device_of(self.model)))
            return True
        return False

    def mean_loss(self, parts: Iterable[Part], model: nn.Module | None = None) -> Tensor | None:
        """The mean loss of all samples that could be read, to be differentiated; None if there are none.

        model: computes the loss, and its forward may change it; by default a copy of the objective's model.
        """
        model = copy.deepcopy(self.model) if model is None else model
        forward = self.forward or inputs_then_target
        # Flat, because the loss may be one per sample or, for a whole client's update, a mean.
        device = device_of(model)
        given = (tree_map(lambda leaf: leaf.to(device), part.data) for part in parts if part.data is not None)
        losses = [self.loss_fn(*forward(model, data)).reshape(-1) for data in given]
        return torch.cat(losses).mean() if losses else None
