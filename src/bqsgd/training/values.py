"""What a message carries, computed once its round is counted: from here on there is a vector whatever the data are.

A peer sees whether an answer comes and of what kind. After the spend neither may depend on the data: a sample whose
gradient is not finite, or that makes the model or the loss raise an error, counts as zero, and so does a client's whole
update. Only what follows from the model and the settings is refused, and that before the spend (`check_model`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from bqsgd.errors import InvalidParameter
from bqsgd.models import dimension_of, to_vector, trainable
from bqsgd.params import check_int, check_positive
from bqsgd.persample import BatchMean, check_samples_apart, clipped_gradients
from bqsgd.persample.check import samples_like
from bqsgd.persample.clips import L2, Clamp, Clip, Dual, Scale
from bqsgd.persample.functional import LossFunction
from bqsgd.persample.generators import alone, generators_kept, states
from bqsgd.persample.rows import Numbers
from bqsgd.release import Unit

Values = npt.NDArray[np.floating]
_TRIAL_ROWS = 2
_MOST_CLASSES = 16
_apart: WeakKeyDictionary[nn.Module, dict[tuple[object, ...], LossFunction]] = WeakKeyDictionary()
"""What was checked of each model, which many clients may share, and with which loss."""


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def _hooks(layer: nn.Module) -> Iterator[int]:
    return (id(hook) for kind in _HOOKS for hook in getattr(layer, kind, {}).values())


def made_of(model: nn.Module) -> object:
    """What a program can change of a model in mid-training: its layers, their modes and hooks."""
    return tuple((id(layer), type(layer), layer.training, *_hooks(layer)) for layer in model.modules())


def check_model(
    model: nn.Module,
    loss: LossFunction,
    batch: tuple[Tensor, Tensor],
    *,
    clip: Clip,
    batch_size: int,
    unit: Unit,
    packed: bool = False,
    made_up: tuple[Tensor, Tensor] | None = None,
) -> bool:
    """Run model and loss on rows of zeros shaped like `batch`: what raises here is no matter of the data.

    Where the guarantee is for one sample, also refuse a model or a machine on which samples touch each other, tried on
    made-up samples. Nothing of the data is read but its shape, and nothing is left behind: buffers and generators are
    put back. Returns whether model or loss draw random numbers.

    made_up: the samples to try; made from the shapes of `batch` unless given.
    """
    x, y = (torch.zeros((_TRIAL_ROWS, *rows.shape[1:]), dtype=rows.dtype, device=rows.device) for rows in batch)
    parameters = [(parameter, parameter._version, parameter.detach().clone()) for parameter in model.parameters()]
    with alone, generators_kept():
        untouched = states()
        with state_kept(model):
            if unit is Unit.CLIENT:
                torch.autograd.grad(loss(model(x), y).mean(), trainable(model), allow_unused=True)
            else:
                clipped_gradients(model, loss, (x, y), indices=None, clip=clip, batch_size=1)
        draws = states() != untouched
    if not all(p._version == version and torch.equal(p, before) for p, version, before in parameters):
        raise InvalidParameter(
            "the model changes its parameters in its forward: what it writes there would not be private; do it outside "
            "of the forward, from public values"
        )
    if unit is Unit.SAMPLE and not isinstance(clip, BatchMean):
        form = x.shape, y.shape, x.dtype, y.dtype
        question = (packed, batch_size, torch.get_num_threads(), id(loss), made_of(model), *form)
        answered = _apart.setdefault(model, {})
        if answered.get(question) is not loss:
            tried = made_up or _made_up(model, loss, batch)
            check_samples_apart(model, loss, tried, batch_size=batch_size, packed=packed)
            answered[question] = loss
    return draws


def _made_up(model: nn.Module, loss: LossFunction, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Samples to try, of many classes where the loss takes them: it may weigh a class against others of the batch."""
    inputs, targets = batch
    if not targets.is_floating_point():
        with torch.no_grad(), state_kept(model), generators_kept():
            try:
                classes = model(samples_like(inputs)).shape[1]
                many = min(max(classes, 4), _MOST_CLASSES)
                tried = samples_like(inputs, samples=many), samples_like(targets, samples=many, classes=max(classes, 2))
                loss(model(tried[0]), tried[1])
            except Exception:
                pass  # the whole numbers have another meaning
            else:
                return tried
    return samples_like(inputs), samples_like(targets)


@contextmanager
def state_kept(model: nn.Module) -> Iterator[None]:
    """Put buffers and attributes back, and those away that a forward has made: what it writes there depends on the
    data, and the model is released with them, or used for other samples or by the next client."""
    before = [
        (m, dict(vars(m)), dict(m._buffers), [(b, b.clone()) for b in m._buffers.values() if b is not None])
        for m in model.modules()
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for module, attributes, buffers, values in before:
                own = vars(module)
                for name in own.keys() - attributes.keys():
                    del own[name]
                own.update(attributes)
                module._buffers.clear()
                module._buffers.update(buffers)
                for buffer, value in values:
                    buffer.copy_(value)


def sample_values(
    model: nn.Module,
    loss: LossFunction,
    batch: tuple[Tensor, Tensor],
    *,
    indices: Numbers | None,
    clip: Clip,
    batch_size: int,
) -> tuple[Values, int]:
    """The mean of the clipped gradients over the public batch size, and how many samples count as zero.

    indices: the number of each sample in the client's data; None packs rows as they come.
    The number depends on the data: keep it on the client.
    """
    try:
        with state_kept(model):
            clipped = clipped_gradients(model, loss, batch, indices=indices, clip=clip, batch_size=batch_size)
        mean = clipped.mean.cpu().numpy()
        if bool(np.isfinite(mean).all()):
            return mean, clipped.dropped
    except Exception:
        pass  # one sample's doing: the others must count all the same, or it would move the mean by more than its share
    return _one_by_one(model, loss, batch, indices=indices, clip=clip, batch_size=batch_size)


def _one_by_one(
    model: nn.Module,
    loss: LossFunction,
    batch: tuple[Tensor, Tensor],
    *,
    indices: Numbers | None,
    clip: Clip,
    batch_size: int,
) -> tuple[Values, int]:
    """The same mean from each sample alone, to the last bit: in the row and the shape that it has in every batch."""
    numbers = None if indices is None else np.asarray(indices)
    # A power of two that gives the same rows and is exact to divide by; a batch mean is clamped sample by sample here.
    power = 1 if isinstance(clip, BatchMean) else 1 << (batch_size.bit_length() - 1)
    total, dropped = np.zeros(dimension_of(model)), 0
    for row in range(len(batch[0])):
        one = (batch[0][row : row + 1], batch[1][row : row + 1])
        try:
            number = None if numbers is None else numbers[row : row + 1]
            with state_kept(model):
                alone = clipped_gradients(model, loss, one, indices=number, clip=clip, batch_size=power)
            values = alone.mean.cpu().numpy()
            lost = bool(alone.dropped) or not bool(np.isfinite(values).all())
        except Exception:
            lost = True
        if lost:
            dropped += 1
        else:
            total += values  # whole steps over a power of two: exact
    return total * power / batch_size, dropped


def client_values(
    model: nn.Module,
    mean_loss: Callable[[], Tensor | None],
    *,
    steps: int,
    learning_rate: float,
    clip: Clip,
) -> Values:
    """The clipped update after several local steps; zero when the steps cannot be made."""
    try:
        return _local_update(model, mean_loss, steps=steps, learning_rate=learning_rate, clip=clip)
    except Exception:
        return np.zeros(dimension_of(model), np.float32)


_INSIDE = 1 - 2.0**-20
"""Norms are rounded, so the clip aims this much inside its bound."""


def _local_update(
    model: nn.Module,
    mean_loss: Callable[[], Tensor | None],
    *,
    steps: int,
    learning_rate: float,
    clip: Clip,
) -> npt.NDArray[np.float32]:
    """The clipped difference (received model - model after `steps` steps of SGD): a step for the server to subtract.

    mean_loss: draws a batch and gives its mean loss, None for an empty one.
    """
    check_int("steps", steps, 1, 2**31)
    check_positive("learning_rate", learning_rate)
    received = to_vector(model)
    parameters = trainable(model)
    for _ in range(steps):
        loss = mean_loss()
        if loss is None:
            continue
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                if gradient is not None:
                    parameter.sub_(gradient, alpha=learning_rate)
    with np.errstate(over="ignore", invalid="ignore"):
        return clip_update(received - to_vector(model), clip)


def clip_update(update: npt.NDArray[np.float32], clip: Clip) -> npt.NDArray[np.float32]:
    """One vector within the clip's bounds, whatever it was; zero if it was not finite.

    >>> clip_update(np.array([3.0, -4.0], dtype=np.float32), L2(norm=1.0)).round(2).tolist()
    [0.6000000238418579, -0.800000011920929]
    """
    values = np.asarray(update, dtype=np.float64)
    if not bool(np.isfinite(values).all()):
        values = np.zeros_like(values)  # an error would tell the server something of the data, without noise
    match clip:
        case Clamp(bound=bound) if not isinstance(bound, tuple):
            values = np.clip(values, -bound, bound)
        case Scale(bound=bound):
            values = _scaled(values, float(np.abs(values).max()), bound)
        case L2(norm=norm):
            values = _scaled(values, float(np.linalg.norm(values)), norm)
        case Dual(norm=norm, bound=bound):
            values = np.clip(values, -bound, bound)
            values = _scaled(values, float(np.linalg.norm(values)), norm)
        case _:
            raise InvalidParameter(f"a client's whole update is clipped by Clamp, Scale, L2 or Dual, not {clip}")
    return values.astype(np.float32)


def _scaled(values: npt.NDArray[np.float64], size: float, bound: float) -> npt.NDArray[np.float64]:
    return values if size <= bound * _INSIDE else values * (bound * _INSIDE / size)
