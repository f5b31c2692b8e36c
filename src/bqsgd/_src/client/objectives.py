"""Which objective a method has, and what its messages look like."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import nn

from bqsgd._src.client.centred import Centred
from bqsgd._src.client.least_squares import LeastSquares, Moments
from bqsgd._src.client.objective import Objective
from bqsgd._src.models import dimension_of, trainable
from bqsgd._src.persample.program import Forward, LossFunction
from bqsgd._src.release import Unit
from bqsgd._src.settings.config import Config
from bqsgd._src.settings.groups import CENTRED, LEAST_SQUARES
from bqsgd._src.subset import Subsets


def message_dimension(config: Config, model: nn.Module) -> int:
    """Coordinates of what a client sends: those of the model, a subset of them, or the moments of its inputs."""
    if config.run.method == LEAST_SQUARES:
        return LeastSquares.of(model).dimension
    return config.kept(dimension_of(model))


def subsets_of(config: Config, model: nn.Module) -> Subsets | None:
    """Which coordinates messages carry; None if all."""
    return Subsets.of(trainable(model), one_in=config.clients.one_in, rotated=config.rotates)


def objective_of(config: Config, model: nn.Module, loss_fn: LossFunction, forward: Forward | None = None) -> Objective:
    """What a sample adds to a client's message: its clipped gradient, its features in a round, or its moments."""
    kinds: dict[str, Callable[..., Objective]] = {LEAST_SQUARES: Moments, CENTRED: partial(Centred, config=config)}
    return kinds.get(config.run.method, Objective)(
        model,
        loss_fn,
        clip=config.message_clip,
        batch_size=config.privacy.batch_size,
        forward=forward,
        unit=Unit(config.privacy.unit),
        packed=config.clients.packed_rows,
        subsets=subsets_of(config, model),
    )
