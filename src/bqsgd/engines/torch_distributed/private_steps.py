"""The per-sample path of the DDP hook: clipped means in place of DDP's gradient, each step counted before it leaves."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from torch import Size, Tensor, nn

from bqsgd.errors import InvalidParameter
from bqsgd.ledger import Ledger
from bqsgd.ledger.spending import Spending
from bqsgd.params import Mechanism, check_int
from bqsgd.persample.chunks import Numbers, check_numbers
from bqsgd.persample.clips import Clip
from bqsgd.persample.functional import LossFunction
from bqsgd.privacy.guarantee import Guarantee
from bqsgd.release import Release, Scheme, Unit
from bqsgd.training.client_plan import clipped_setting
from bqsgd.training.parameters import dimension_of, trainable
from bqsgd.training.values import Values, check_model, sample_values


class PrivateSteps:
    """One rank's steps with a guarantee.

    Args:
        model: the module inside DDP (`ddp_model.module`).
        loss: (outputs, targets) -> one loss per sample.
        clip: of one sample's gradient: Dual, Clamp, L2 or Scale.
        batch_size: public L; the sum of clipped gradients is divided by it, however many samples a batch happens to
            have.
        dataset_size: samples this rank holds.
        sampling: how the caller draws its batches. Poisson: every sample by itself with probability L / dataset_size.
            Shuffling is neither Poisson nor fixed-size sampling: say Scheme.NONE then, which claims no amplification.
        ledger: this rank's, on its own disk; None only with seeded noise, which has no claim.
        run: name of this training in the ledger.
        resume: continues a run that the ledger knows.
    """

    def __init__(
        self,
        *,
        model: nn.Module,
        loss: LossFunction,
        clip: Clip,
        batch_size: int,
        dataset_size: int,
        ledger: Ledger | None,
        run: str,
        sampling: Scheme = Scheme.POISSON,
        resume: bool = False,
    ) -> None:
        self.model, self.loss, self.clip = model, loss, clip
        self.batch_size = check_int("batch_size", batch_size, 1, 2**53)
        self.dataset_size, self.sampling = dataset_size, Scheme(sampling)
        self._ledger, self._run, self._resume = ledger, run, resume
        self._spending: Spending | None = None
        self._places = _places(model)
        self._mean: Values | None = None
        self._checked: tuple[Size, ...] | None = None
        self._sent: set[int] = set()
        """Parameters of this step that have been encoded, by id."""
        self._frames: dict[tuple[int, ...], bytearray] = {}
        """This step's frames, by bucket and parameters."""

    def release(self, mechanism: Mechanism, *, range: float) -> Release:
        """What one step of this rank reveals."""
        setting = clipped_setting(
            self.clip,
            range=range,
            batch_size=self.batch_size,
            scheme=self.sampling,
            unit=Unit.SAMPLE,
            dimension=dimension_of(self.model),
            dataset_size=self.dataset_size,
        )
        return setting.release(mechanism)

    def supply(
        self,
        batch: tuple[Tensor, Tensor],
        *,
        indices: Numbers,
        mechanism: Mechanism,
        range: float,
        step: int,
        seeded: bool,
    ) -> None:
        """Count the step, then clip its gradients sample by sample and keep their mean for the hook.

        Once the step is counted there is a mean whatever the data are: see `training.values`.
        """
        if self._mean is not None:
            raise InvalidParameter("supply was called twice before a backward; call it once per step")
        shapes = tuple(part.shape[1:] for part in batch)
        if len(batch[0]) != len(batch[1]):
            raise InvalidParameter(f"{len(batch[0])} inputs and {len(batch[1])} targets do not pair up")
        check_numbers(indices, len(batch[0]))
        if shapes != self._checked:
            check_model(self.model, self.loss, batch, clip=self.clip, batch_size=self.batch_size, unit=Unit.SAMPLE)
            self._checked = shapes
        if self._spending is None:
            self._spending = Spending(self._ledger, run=self._run, seeded=seeded, resume=self._resume)
        self._spending.spend(self.release(mechanism, range=range), round=step, last_round=step)
        self._mean, _ = sample_values(
            self.model, self.loss, batch, indices=indices, clip=self.clip, batch_size=self.batch_size
        )

    def frame(self, parameters: Sequence[Tensor], bucket: int, encode: Callable[[Values], bytearray]) -> bytearray:
        """The one frame of this step that holds these parameters: encoded when first asked for, then the same bytes.

        A backward that fails half-way and is repeated asks again. New noise on the same mean would be another message,
        and only one was counted.

        Raises:
            InvalidParameter: `supply` was not called before this backward, or one of the parameters has left in another
                bucket of this step.
        """
        if self._mean is None:
            raise InvalidParameter("call state.supply(batch, indices=...) before every backward: nothing was sent")
        asked = (bucket, *(id(parameter) for parameter in parameters))
        found = self._frames.get(asked)
        if found is None:
            if any(id(parameter) in self._sent for parameter in parameters):
                raise InvalidParameter(
                    "a parameter of this bucket was sent in another bucket of the same step, which was counted once; "
                    "repeat a failed backward with the same buckets"
                )
            mean = self._mean
            self._sent.update(id(parameter) for parameter in parameters)
            found = encode(np.concatenate([mean[self._places[id(parameter)]] for parameter in parameters]))
            self._frames[asked] = found
        return found

    def used(self) -> None:
        """The last bucket of the step is on its way."""
        self._mean = None
        self._sent.clear()
        self._frames.clear()

    def guarantee(self, *, delta: float) -> Guarantee | None:
        """What the steps so far guarantee; None before the first."""
        return None if self._spending is None else self._spending.guarantee(delta=delta)


def _places(model: nn.Module) -> dict[int, slice]:
    """Where each trainable parameter is in the flat mean."""
    places, start = {}, 0
    for parameter in trainable(model):
        places[id(parameter)] = slice(start, start + parameter.numel())
        start += parameter.numel()
    return places
