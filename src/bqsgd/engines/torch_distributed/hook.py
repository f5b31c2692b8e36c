"""A DDP communication hook: gradients travel between ranks as frames instead of float32.

    state = BQHookState(mechanism, range=0.01, rng=privacy_rng())
    ddp_model.register_comm_hook(state, bq_hook)

That much *compresses and guarantees nothing*: DDP's gradient is a mean over samples that were not clipped one by one,
so a single sample can move it anywhere within the range. With `private` the hook sends the mean of per-sample clipped
gradients instead, counts every step in the rank's ledger before its first byte leaves, and has a guarantee:

    private = PrivateSteps(model=model, loss=loss, clip=Dual(norm=0.5, bound=0.1), batch_size=64, dataset_size=9000,
                           ledger=Ledger.open(...), run="mine")
    state = BQHookState(mechanism, range=0.03, rng=privacy_rng(), private=private)
    ddp_model.register_comm_hook(state, bq_hook)
    for inputs, targets, indices in poisson_batches:   # indices: the number of each sample in this rank's data
        state.supply((inputs, targets), indices=indices)     # per-sample gradients, clipped, spent in the ledger
        loss(ddp_model(inputs), targets).mean().backward()   # the hook sends the clipped mean, not this gradient
        optimiser.step(); optimiser.zero_grad()
    print(private.guarantee(delta=1e-5))

All ranks must use the same mechanism and range. A frame that is damaged or foreign ends the step with an error: DDP
knows no round without one of its ranks.
"""

# No `from __future__ import annotations` here: DDP compares the hook's annotations with the real types.
import warnings
from typing import cast

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket

from bqsgd.codec import Accumulator, encode_frame
from bqsgd.engines.torch_distributed.private_steps import PrivateSteps
from bqsgd.errors import InvalidParameter
from bqsgd.noise import NoiseSource
from bqsgd.params import Mechanism, check_int, check_positive
from bqsgd.persample.chunks import Numbers

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
        self.private.supply(
            batch,
            indices=indices,
            mechanism=self.mechanism,
            range=self.range,
            step=self.step,
            seeded=self.rng.seeded,
        )


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

    def encode(values: npt.NDArray[np.float32]) -> bytearray:
        if values.size != buffer.numel():
            raise InvalidParameter(f"the bucket holds {buffer.numel()} gradients, the clipped mean {values.size}")
        return encode_frame(
            values, state.mechanism, range=state.range, rng=state.rng, client=rank, round=round, clamp=True
        )

    if state.private is None:
        if not state.warned:
            state.warned = True
            warnings.warn(_UNCLIPPED, NoGuaranteeWarning, stacklevel=2)
        frame = encode(buffer.detach().cpu().numpy())
    else:
        frame = state.private.frame(bucket.parameters(), index, encode)
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
