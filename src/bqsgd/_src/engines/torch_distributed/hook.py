"""A DDP communication hook: gradients travel between ranks as frames instead of float32.

    state = BQHookState(mechanism, range=0.01, rng=privacy_rng())
    ddp_model.register_comm_hook(state, bq_hook)

That much *compresses and guarantees nothing*: DDP's gradient is a mean over samples that were not clipped one by one,
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

All ranks must use the same mechanism and range. A frame that is damaged or foreign ends the step with an error: DDP
knows no round without one of its ranks.
"""

# No `from __future__ import annotations` here: DDP compares the hook's annotations with the real types.
import warnings
from collections.abc import Iterable, Sequence
from typing import cast

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket

from bqsgd._src.client.draws import GivenSources
from bqsgd._src.client.objective import Objective
from bqsgd._src.client.outlet import FrameOutlet
from bqsgd._src.client.samples import Part
from bqsgd._src.client.sender import Sender
from bqsgd._src.client.values import Values
from bqsgd._src.codec import Accumulator
from bqsgd._src.errors import InvalidParameter
from bqsgd._src.ledger import Ledger
from bqsgd._src.ledger.spending import Charge, Spending
from bqsgd._src.models import dimension_of, trainable
from bqsgd._src.noise import NoiseSource
from bqsgd._src.params import Mechanism, check_int, check_positive
from bqsgd._src.persample.clips import Clip
from bqsgd._src.persample.program import LossFunction
from bqsgd._src.persample.rows import Numbers, check_numbers
from bqsgd._src.privacy.guarantee import Guarantee
from bqsgd._src.release import Release, Sampling, Scheme, Unit
from bqsgd._src.runtime.interrupts import interrupts_deferred
from bqsgd._src.runtime.modes import full_precision
from bqsgd._src.settings.client_plan import clipped_terms


class PrivateSteps:
    """One rank's steps with a guarantee.

    Args:
        model: the module inside DDP (`ddp_model.module`).
        loss_fn: (outputs, targets) -> one loss per sample.
        clip: of one sample's gradient: Dual, Clamp, L2 or Scale.
        batch_size: public L; the sum of clipped gradients is divided by it, however many samples a batch happens to
            have.
        dataset_size: samples this rank holds.
        sampling: how the caller draws batches. Poisson: every sample independently with probability L / dataset_size.
            Shuffling is neither Poisson nor fixed-size sampling: say Scheme.NONE then, which claims no amplification.
        ledger: this rank's, on its own disk; None only with seeded noise, which has no claim.
        run: name of this training in the ledger.
        resume: continues a run that the ledger knows.
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
        self.model, self.clip = model, clip
        self._objective = Objective(model, loss_fn)
        self.batch_size = check_int("batch_size", batch_size, 1, 2**53)
        self.dataset_size, self.sampling = dataset_size, Scheme(sampling)
        self._ledger, self._run, self._resume = ledger, run, resume
        self._sender: Sender | None = None
        self._places = _places(model)
        self._mean: Values | None = None
        self._counted: Release | None = None
        """What the ledger has counted for this step."""
        self._fixed = _copies(_fixed(model))
        """What training leaves as it is, as it was."""
        self._trained: dict[str, Tensor] = {}
        """The trained parameters when the step was supplied."""
        self._sent: set[int] = set()
        """Parameters of this step that have been encoded, by id."""
        self._frames: dict[tuple[int, ...], bytearray] = {}
        """This step's frames, by bucket and parameters."""

    def release(self, mechanism: Mechanism, *, range: float) -> Release:
        """What one step of this rank reveals."""
        terms = clipped_terms(
            self.clip,
            range=range,
            batch_size=self.batch_size,
            sampling=Sampling.of_batch(self.sampling, batch_size=self.batch_size, dataset_size=self.dataset_size),
            dimension=dimension_of(self.model),
        )
        return Release(mechanism=mechanism, terms=terms)

    def supply(self, batch: tuple[Tensor, Tensor], *, indices: Numbers, state: "BQHookState") -> None:
        """Count the step, then clip its gradients sample by sample and keep their mean for the hook.

        Once the step is counted there is a mean whatever the data are: see `client.objective`. A Ctrl-C is raised when
        the mean is there, a second one at once; the step may then be supplied again, and is counted again.
        """
        if self._mean is not None:
            raise InvalidParameter("supply was called twice before a backward; call it once per step")
        numbers = self._check(batch, indices)
        if self._sender is None:
            sources = GivenSources(state.rng)
            spending = Spending(self._ledger, run=self._run, seeded=sources.seeded, resume=self._resume)
            self._sender = Sender(spending, sources)
        sender, step = self._sender, state.step
        self._counted = self.release(state.mechanism, range=state.range)
        charge = Charge(release=self._counted, round=step, last_round=step)
        self._trained = _copies(_trained(self.model))

        def values() -> Values:
            part = Part(numbers=numbers, data=batch)
            return self._objective.mean([part], clip=self.clip, batch_size=self.batch_size)[0]

        with interrupts_deferred():
            try:
                self._mean = sender.mean(charge, values)
            except BaseException:
                # The step may be taken again, and is then counted again; also if it ended just after it was counted.
                sender.spending.resume |= sender.next_round == step + 1
                raise

    def _check(self, batch: tuple[Tensor, Tensor], indices: Numbers) -> npt.NDArray[np.int64]:
        """The numbers of the samples. Raises now what must not be raised once the step is counted."""
        if len(batch[0]) != len(batch[1]):
            raise InvalidParameter(f"{len(batch[0])} inputs and {len(batch[1])} targets do not pair up")
        numbers = check_numbers(indices, len(batch[0]))
        if len(np.unique(numbers)) < len(numbers) or (len(numbers) and int(numbers.max()) >= self.dataset_size):
            raise InvalidParameter(
                f"indices must be different numbers below dataset_size={self.dataset_size}: a sample that stands in a "
                "batch twice would count twice"
            )
        if not _same(self._fixed, _fixed(self.model)):
            raise InvalidParameter(
                "the model has changed its buffers or its frozen parameters, and they leave this rank as they are: "
                "nothing would make them private; take the layer out that writes them, or make PrivateSteps after the "
                "change, if no data were in it"
            )
        form = tuple(part.new_zeros(1, *part.shape[1:]) for part in batch)
        with full_precision():
            self._objective.check(form, clip=self.clip, batch_size=self.batch_size, unit=Unit.SAMPLE)
        return numbers

    def frame(
        self, parameters: Sequence[Tensor], bucket: int, mechanism: Mechanism, outlet: FrameOutlet, *, round: int
    ) -> bytearray:
        """The one frame of this step that holds these parameters: encoded when first asked for, then the same bytes.

        A backward that fails half-way and is repeated asks again. New noise on the same mean would be another message,
        and only one was counted.

        Raises:
            InvalidParameter: `supply` was not called before this backward, mechanism or range are not those that it
                counted, the forward has changed a parameter, or one of the parameters has left in another bucket of
                this step.
        """
        if self._mean is None or self._sender is None:
            raise InvalidParameter("call state.supply(batch, indices=...) before every backward: nothing was sent")
        if self.release(mechanism, range=outlet.range) != self._counted:
            raise InvalidParameter(
                "mechanism or range have changed since supply, which counted the step with those before: nothing was "
                "sent; change them before supply"
            )
        if not self._sent and not _same(self._trained, _trained(self.model)):
            raise InvalidParameter(
                "the model has changed its parameters between supply and the backward, so what it saw would be "
                "released with them: nothing was sent; take the layer out that writes them"
            )
        asked = (bucket, *(id(parameter) for parameter in parameters))
        if asked not in self._frames:
            if any(id(parameter) in self._sent for parameter in parameters):
                raise InvalidParameter(
                    "a parameter of this bucket was sent in another bucket of the same step, which was counted once; "
                    "repeat a failed backward with the same buckets"
                )
            values = np.concatenate([self._mean[self._places[id(parameter)]] for parameter in parameters])
            with interrupts_deferred():  # a frame that was encoded and not kept could never be sent again
                self._sent.update(id(parameter) for parameter in parameters)
                self._frames[asked] = self._sender.encode(values, mechanism, outlet, round=round)
        return self._frames[asked]

    def used(self) -> None:
        """The last bucket of the step is on its way."""
        self._mean = None
        self._trained = {}
        self._sent.clear()
        self._frames.clear()

    def guarantee(self, *, delta: float) -> Guarantee | None:
        """What the steps so far guarantee; None before the first."""
        return None if self._sender is None else self._sender.spending.guarantee(delta=delta)


def _places(model: nn.Module) -> dict[int, slice]:
    """Where each trainable parameter is in the flat mean."""
    places, start = {}, 0
    for parameter in trainable(model):
        places[id(parameter)] = slice(start, start + parameter.numel())
        start += parameter.numel()
    return places


def _fixed(model: nn.Module) -> Iterable[tuple[str, Tensor]]:
    yield from model.named_buffers()
    yield from ((name, parameter) for name, parameter in model.named_parameters() if not parameter.requires_grad)


def _trained(model: nn.Module) -> Iterable[tuple[str, Tensor]]:
    return ((name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad)


def _copies(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors}


def _same(before: dict[str, Tensor], now: Iterable[tuple[str, Tensor]]) -> bool:
    """Whether the tensors have the names, types and values that they had; contents, since anything may write them."""
    found = dict(now)
    return found.keys() == before.keys() and all(
        tensor.dtype == before[name].dtype and torch.equal(tensor.detach(), before[name])
        for name, tensor in found.items()
    )


_BUCKET_BITS = 20
_UNCLIPPED = (
    "bq_hook without `private`: gradients are compressed and noised, but samples are not clipped one by one, so there "
    "is NO privacy guarantee. Give BQHookState(private=PrivateSteps(...)) for one."
)


class NoGuaranteeWarning(UserWarning):
    """The hook compresses, and promises nothing about privacy."""


class BQHookState:
    """What the hook keeps between buckets.

    Args:
        mechanism: levels and trials; trials = 0 quantises without noise.
        range: of the encoder. A gradient coordinate beyond it is clamped.
        rng: where the noise comes from.
        process_group: that of the DDP model; the default group when None.
        private: the per-sample path; without it no guarantee is made, and a warning says so once.
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
        """Clip this step's gradients sample by sample and count the step; call it once before every backward.

        indices: the number of each sample in this rank's data, the same in every batch it is drawn for.

        Raises:
            BudgetExhausted: the step would pass the budget; nothing was recorded, and the backward would be refused.
        """
        if self.private is None:
            raise InvalidParameter("supply needs BQHookState(private=PrivateSteps(...))")
        self.private.supply(batch, indices=indices, state=self)


def bq_hook(state: BQHookState, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Encode this rank's bucket, gather every rank's frame as bytes, and give back the mean of the decoded frames.

    Without `state.private` this compresses and guarantees nothing; see the module's first lines.

    Raises:
        InvalidParameter: `state.private` is given and `supply` was not called before this backward, or a repeated
            backward has other buckets than the one that failed.
        NonFiniteInput: the gradient holds NaN or infinity (without `state.private` only).
        RuntimeError: from the backward, when a rank's frame is damaged or made with another mechanism or range. It is
            torch's, and its first line names the FrameError that its callback met.
    """
    buffer = bucket.buffer()
    if buffer.dtype != torch.float32:
        raise InvalidParameter(f"bq_hook takes float32 gradients, got {buffer.dtype}")
    index = check_int("bucket", bucket.index(), 0, (1 << _BUCKET_BITS) - 1)
    round = (state.step << _BUCKET_BITS) | index
    group = state.process_group if state.process_group is not None else dist.group.WORLD
    rank, size = dist.get_rank(group), dist.get_world_size(group)

    outlet = FrameOutlet(client=rank, range=state.range)
    if state.private is None:
        if not state.warned:
            state.warned = True
            warnings.warn(_UNCLIPPED, NoGuaranteeWarning, stacklevel=2)
        frame = outlet.encode(buffer.detach().cpu().numpy(), state.mechanism, round=round, rng=state.rng)
    else:
        parameters = bucket.parameters()
        clipped = sum(parameter.numel() for parameter in parameters)
        if clipped != buffer.numel():
            raise InvalidParameter(f"the bucket holds {buffer.numel()} gradients, the clipped mean {clipped}")
        frame = state.private.frame(parameters, index, state.mechanism, outlet, round=round)
    if bucket.is_last():
        state.step += 1
        if state.private is not None:
            state.private.used()
    own = torch.frombuffer(frame, dtype=torch.uint8).to(buffer.device)
    frames = [torch.empty_like(own) for _ in range(size)]  # fixed width: every rank's frame has the same length
    work = dist.all_gather(frames, own, group=group, async_op=True)
    assert work is not None

    def mean(done: torch.futures.Future[list[Tensor]]) -> Tensor:
        done.value()
        total = Accumulator(buffer.numel())
        for sender, received in enumerate(frames):
            content: np.ndarray = received.cpu().numpy()
            total.add(content, range=state.range, mechanism=state.mechanism, client=sender, round=round)
        return buffer.copy_(torch.from_numpy(total.mean().astype(np.float32)))

    return cast(torch.futures.Future[Tensor], work.get_future().then(mean))
