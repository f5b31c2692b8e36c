"""A DDP communication hook: gradients travel between ranks as frames instead of float32.

    state = BQHookState(mechanism, range=0.01, rng=privacy_rng())
    ddp_model.register_comm_hook(state, bq_hook)

This alone *compresses and guarantees nothing*: DDP's gradient is a mean over samples that were not clipped one by one,
so a single sample can move it anywhere within the range. With `private` the hook sends the mean of per-sample clipped
gradients instead, counts every step in the rank's ledger before its first byte leaves, and has a guarantee:

    private = PrivateSteps(model=model, loss_fn=loss_fn, clip=Dual(norm=0.5, bound=0.1), batch_size=64,
                           dataset_size=9000, ledger=Ledger.open(...), run="mine")
    state = BQHookState(mechanism, range=0.03, rng=privacy_rng(), private=private)
    ddp_model.register_comm_hook(state, bq_hook)
    for inputs, targets, indices in poisson_batches:   # indices: the number of each sample in this rank's data
        state.supply((inputs, targets), indices=indices)     # per-sample gradients, clipped, spent in the ledger
        loss_fn(ddp_model(inputs), targets).mean().backward()   # the hook sends the clipped mean, not this gradient
        optimizer.step(); optimizer.zero_grad()
    print(private.guarantee(delta=1e-5))

All ranks must use the same mechanism and range. A frame that is damaged or comes from another run ends the step with an
error, because DDP cannot complete a step without one of its ranks.
"""

# No `from __future__ import annotations` here: DDP compares the hook's annotations with the real types.
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import cast

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket

from bqsgd._src.client.draws import GivenSources
from bqsgd._src.client.objective import Objective
from bqsgd._src.client.samples import Part
from bqsgd._src.client.sender import Outlet, Sender
from bqsgd._src.client.values import Values
from bqsgd._src.codec import Accumulator, encode_frame
from bqsgd._src.errors import InvalidParameter
from bqsgd._src.ledger import Ledger
from bqsgd._src.ledger.spending import Charge, Spending
from bqsgd._src.models import dimension_of, trainable
from bqsgd._src.noise import NoiseSource
from bqsgd._src.params import Mechanism, check_int, check_positive
from bqsgd._src.persample.clips import Clip
from bqsgd._src.persample.program import LossFunction
from bqsgd._src.privacy.guarantee import Guarantee
from bqsgd._src.release import Release, Sampling, Scheme
from bqsgd._src.runtime.interrupts import interrupts_deferred
from bqsgd._src.runtime.modes import full_precision
from bqsgd._src.settings.client_plan import clipped_terms

Numbers = Tensor | npt.NDArray[np.int64]


def _check_numbers(numbers: Numbers, count: int) -> npt.NDArray[np.int64]:
    """The numbers of `count` samples in their data."""
    found = np.asarray(numbers)
    if found.shape != (count,) or found.dtype.kind not in "iu" or (count and int(found.min()) < 0):
        raise InvalidParameter(
            f"indices must be {count} non-negative integers, the number of each sample in the data, "
            f"got {found.dtype} of shape {found.shape}"
        )
    return found.astype(np.int64)


@dataclass(kw_only=True, eq=False)
class _Step:
    """A step that the ledger has counted and whose frames have not all left.

    mean: id of a parameter -> its part of the clipped mean. trained: copies of the trained parameters at `supply`.
    sent: ids of the parameters that were encoded. frames: by bucket and the ids of its parameters.
    """

    mean: dict[int, Values]
    counted: Release
    trained: dict[str, Tensor]
    sent: set[int] = field(default_factory=set)
    frames: dict[tuple[int, ...], bytearray] = field(default_factory=dict)


class PrivateSteps:
    """One rank's steps with a guarantee.

    Args:
        model: the module inside DDP (`ddp_model.module`).
        loss_fn: (outputs, targets) -> one loss per sample.
        clip: bounds one sample's gradient; any of `bqsgd.clips` but BatchMean.
        batch_size: public L. The sum of clipped gradients is divided by it, whatever number of samples a batch has.
        dataset_size: number of samples on this rank.
        sampling: how the caller draws batches. Poisson: every sample independently with probability L / dataset_size.
            Shuffling is neither Poisson nor fixed-size sampling: use Scheme.NONE then, which claims no amplification.
        ledger: this rank's, on its own disk. None only with seeded noise, which makes no privacy claim.
        run: name of this training in the ledger.
        resume: continue a run that is in the ledger.
    """

    def __init__(
        self,
        *,
        model: nn.Module,
        loss_fn: LossFunction,
        clip: Clip,
        batch_size: int,
        dataset_size: int,
        ledger: Ledger | None,
        run: str,
        sampling: Scheme = Scheme.POISSON,
        resume: bool = False,
    ) -> None:
        self.model = model
        # Clip and batch size are kept there alone: what is counted and what is computed cannot differ.
        self._objective = Objective(model, loss_fn, clip=clip, batch_size=check_int("batch_size", batch_size, 1, 2**53))
        self.dataset_size, self.sampling = dataset_size, Scheme(sampling)
        self._ledger, self._run, self._resume = ledger, run, resume
        self._sender: Sender | None = None
        self._step: _Step | None = None
        self._fixed = _copies(_tensors(model, trained=False))

    def release(self, mechanism: Mechanism, *, range: float) -> Release:
        """What one step of this rank reveals."""
        clip, batch_size = self._objective.clip, self._objective.batch_size
        terms = clipped_terms(
            clip,
            range=range,
            batch_size=batch_size,
            sampling=Sampling.of_batch(self.sampling, batch_size=batch_size, dataset_size=self.dataset_size),
            dimension=dimension_of(self.model),
        )
        return Release(mechanism=mechanism, terms=terms)

    def supply(self, batch: tuple[Tensor, Tensor], *, indices: Numbers, state: "BQHookState") -> None:
        """Count the step, then clip its gradients sample by sample and keep their mean for the hook.

        Once the step is counted there is a mean, whatever the data are: see `client.objective`. A Ctrl-C is raised when
        the mean is complete, a second one at once; the step may then be supplied again, and is counted again.
        """
        if self._step is not None:
            raise InvalidParameter("supply was called twice before a backward; call it once per step")
        numbers = self._check(batch, indices)
        if self._sender is None:
            sources = GivenSources(state.rng)
            spending = Spending(self._ledger, run=self._run, seeded=sources.seeded, resume=self._resume)
            self._sender = Sender(spending, sources)
        sender, number = self._sender, state.step
        release = self.release(state.mechanism, range=state.range)
        charge = Charge(release=release, round=number, last_round=number)
        trained = _copies(_tensors(self.model, trained=True))
        with interrupts_deferred():
            try:
                with sender.counted(charge):
                    mean, _ = self._objective.mean([Part(numbers=numbers, data=batch)])
                self._step = _Step(mean=_by_parameter(self.model, mean), counted=release, trained=trained)
            except BaseException:
                # A step that was counted may be supplied again, with new noise, and must then be counted again. If the
                # ledger refused the step, `next_round` has not moved.
                sender.spending.resume |= sender.next_round == number + 1
                raise

    def _check(self, batch: tuple[Tensor, Tensor], indices: Numbers) -> npt.NDArray[np.int64]:
        """The numbers of the samples. Raises now what must not be raised once the step is counted."""
        if len(batch[0]) != len(batch[1]):
            raise InvalidParameter(f"{len(batch[0])} inputs and {len(batch[1])} targets do not pair up")
        numbers = _check_numbers(indices, len(batch[0]))
        if len(np.unique(numbers)) < len(numbers) or (len(numbers) and int(numbers.max()) >= self.dataset_size):
            raise InvalidParameter(
                f"indices must be different numbers below dataset_size={self.dataset_size}: a sample that is twice in "
                "a batch would count twice"
            )
        # DDP sends these tensors to all ranks unchanged, and the model is released with them. A layer that writes what
        # it saw into them would publish it without noise.
        if not _same(self._fixed, _tensors(self.model, trained=False)):
            raise InvalidParameter(
                "the model has changed its buffers or its frozen parameters, which leave this rank without noise: "
                "remove the layer that writes them; if the change used no data, make PrivateSteps after it"
            )
        form = tuple(part.new_zeros(1, *part.shape[1:]) for part in batch)
        with full_precision():
            self._objective.check(form)
        return numbers

    def frame(
        self, parameters: Sequence[Tensor], bucket: int, state: "BQHookState", outlet: Outlet, *, round: int
    ) -> bytearray:
        """The frame of this step for these parameters: encoded when it is first asked for, later the same bytes.

        A backward that fails half-way and is repeated asks again. New noise on the same mean would be a second message,
        and the ledger has counted one.

        Raises:
            InvalidParameter: `supply` was not called before this backward, mechanism or range differ from those that it
                counted, the forward has changed a parameter, or one of the parameters has left in another bucket of
                this step.
        """
        step = self._step
        if step is None or self._sender is None:
            raise InvalidParameter("call state.supply(batch, indices=...) before every backward: nothing was sent")
        if self.release(state.mechanism, range=state.range) != step.counted:
            raise InvalidParameter(
                "mechanism or range have changed since supply counted this step: nothing was sent; change them before "
                "supply"
            )
        # The trained parameters are released too, after the optimizer's step: a forward that writes what it saw into
        # them would publish it. The first frame decides; the forward of this step is over by then.
        if not step.sent and not _same(step.trained, _tensors(self.model, trained=True)):
            raise InvalidParameter(
                "the model has changed its parameters between supply and the backward, so the data that it saw would "
                "be released with them: nothing was sent; remove the layer that writes them"
            )
        ids = [id(parameter) for parameter in parameters]
        key = (bucket, *ids)
        if key not in step.frames:
            if not step.sent.isdisjoint(ids):
                raise InvalidParameter(
                    "a parameter of this bucket was sent in another bucket of the same step, which was counted once; "
                    "repeat a failed backward with the same buckets"
                )
            values = np.concatenate([step.mean[parameter] for parameter in ids])
            with interrupts_deferred():  # a frame that was encoded and then lost could never be sent
                step.sent.update(ids)  # before the encoding: if that fails half-way, its noise must not be drawn again
                step.frames[key] = self._sender.encode(values, state.mechanism, outlet, round=round)
        return step.frames[key]

    def used(self) -> None:
        """The last bucket of the step has its frame: forget the step."""
        self._step = None

    def guarantee(self, *, delta: float) -> Guarantee | None:
        """What the steps so far guarantee; None before the first."""
        return None if self._sender is None else self._sender.spending.guarantee(delta=delta)


def _by_parameter(model: nn.Module, mean: Values) -> dict[int, Values]:
    """The flat mean, cut into the parts of the trainable parameters, by their ids."""
    parameters = trainable(model)
    ends = np.cumsum([parameter.numel() for parameter in parameters])
    return dict(zip(map(id, parameters), np.split(mean, ends[:-1]), strict=True))


def _tensors(model: nn.Module, *, trained: bool) -> dict[str, Tensor]:
    """The trained parameters by name, or everything else that the model holds: frozen parameters and buffers."""
    weights = {name: weight.detach() for name, weight in model.named_parameters() if weight.requires_grad == trained}
    return weights if trained else weights | dict(model.named_buffers())


def _copies(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def _same(before: dict[str, Tensor], now: dict[str, Tensor]) -> bool:
    """Whether names, types and values are equal. Compares values: code can write a tensor without leaving a trace."""
    return now.keys() == before.keys() and all(
        tensor.dtype == before[name].dtype and torch.equal(tensor, before[name]) for name, tensor in now.items()
    )


_BUCKET_BITS = 20
_UNCLIPPED = (
    "bq_hook without `private`: gradients are compressed and noised, but samples are not clipped one by one, so there "
    "is NO privacy guarantee. Use BQHookState(private=PrivateSteps(...)) for one."
)


class NoGuaranteeWarning(UserWarning):
    """The hook compresses, and makes no privacy claim."""


class BQHookState:
    """What the hook keeps between buckets.

    Args:
        mechanism: levels and trials; trials = 0 quantises without noise.
        range: of the encoder. Gradient coordinates outside it are clamped.
        rng: where the noise comes from.
        process_group: of the DDP model; None for the default group.
        private: clips per sample. Without it there is no guarantee, and the hook warns once.
    """

    def __init__(
        self,
        mechanism: Mechanism,
        *,
        range: float,
        rng: NoiseSource,
        process_group: dist.ProcessGroup | None = None,
        private: PrivateSteps | None = None,
    ) -> None:
        self.mechanism, self.range, self.rng = mechanism, check_positive("range", range), rng
        self.process_group, self.private = process_group, private
        self.step, self.warned = 0, False

    def supply(self, batch: tuple[Tensor, Tensor], *, indices: Numbers) -> None:
        """Count the step and clip its gradients sample by sample; call it once before every backward.

        indices: the number of each sample in this rank's data, the same in every batch that contains the sample.

        Raises:
            BudgetExhausted: the step would exceed the budget. Nothing was recorded, and the hook refuses the backward.
        """
        if self.private is None:
            raise InvalidParameter("supply needs BQHookState(private=PrivateSteps(...))")
        self.private.supply(batch, indices=indices, state=self)


def bq_hook(state: BQHookState, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Encode this rank's bucket, gather every rank's frame as bytes, and return the mean of the decoded frames.

    Without `state.private` this compresses and guarantees nothing; see the beginning of this module.

    Raises:
        InvalidParameter: `state.private` is set and `supply` was not called before this backward, or a repeated
            backward has other buckets than the one that failed.
        NonFiniteInput: the gradient holds NaN or infinity (only without `state.private`).
        RuntimeError: from the backward, if a rank's frame is damaged or was made with another mechanism or range. Torch
            raises it; its first line names the FrameError.
    """
    buffer = bucket.buffer()
    if buffer.dtype != torch.float32:
        raise InvalidParameter(f"bq_hook takes float32 gradients, got {buffer.dtype}")
    index = check_int("bucket", bucket.index(), 0, (1 << _BUCKET_BITS) - 1)
    # Every bucket of every step has its own round number, so that no frame can take the place of another.
    round = (state.step << _BUCKET_BITS) | index
    group = state.process_group if state.process_group is not None else dist.group.WORLD
    rank, size = dist.get_rank(group), dist.get_world_size(group)

    outlet = partial(encode_frame, client=rank, range=state.range)
    if state.private is None:
        if not state.warned:
            state.warned = True
            warnings.warn(_UNCLIPPED, NoGuaranteeWarning, stacklevel=2)
        gradient = buffer.detach().cpu().numpy()
        frame = outlet(gradient, state.mechanism, round=round, rng=state.rng, clamp=True)
    else:
        parameters = bucket.parameters()
        clipped = sum(parameter.numel() for parameter in parameters)
        if clipped != buffer.numel():
            raise InvalidParameter(f"the bucket holds {buffer.numel()} gradients, the clipped mean {clipped}")
        frame = state.private.frame(parameters, index, state, outlet, round=round)
    # Now, not after the gathering: the step's frames exist, and a new `supply` may follow.
    if bucket.is_last():
        state.step += 1
        if state.private is not None:
            state.private.used()
    sent = torch.frombuffer(frame, dtype=torch.uint8).to(buffer.device)
    frames = [torch.empty_like(sent) for _ in range(size)]  # fixed width: every rank's frame has the same length
    work = dist.all_gather(frames, sent, group=group, async_op=True)
    assert work is not None

    def mean(done: torch.futures.Future[list[Tensor]]) -> Tensor:
        done.value()  # raises if the gathering failed
        total = Accumulator(buffer.numel())
        for sender, received in enumerate(frames):
            content: np.ndarray = received.cpu().numpy()
            total.add(content, range=state.range, mechanism=state.mechanism, client=sender, round=round)
        return buffer.copy_(torch.from_numpy(total.mean().astype(np.float32)))

    return cast(torch.futures.Future[Tensor], work.get_future().then(mean))
