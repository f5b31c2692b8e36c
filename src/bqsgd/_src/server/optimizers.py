"""Server optimizers (pure init/update pairs on flat float64 arrays), learning-rate schedules, and the model's average.

`init(d)` returns the first state; `update(state, gradient, ...)` returns the next state and the step to subtract from
the model. A state is a dictionary of arrays, so that a checkpoint can store it without pickling.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bqsgd._src.errors import InvalidParameter, NonFiniteInput
from bqsgd._src.params import check_int, check_positive
from bqsgd._src.settings.config import SCHEDULES, ServerSettings

_Array = npt.NDArray[np.float64]
State = dict[str, _Array]


def _checked(gradient: npt.ArrayLike, state: State, key: str | None) -> _Array:
    array = np.asarray(gradient, dtype=np.float64)
    if array.ndim != 1 or (key is not None and array.shape != state[key].shape):
        raise InvalidParameter(f"gradient must be flat and as long as the state, got shape {array.shape}")
    if not bool(np.isfinite(array).all()):
        raise NonFiniteInput("the aggregated gradient holds NaN or infinity; the model was not changed")
    return array


def _fraction(name: str, value: float) -> float:
    if not (isinstance(value, (int, float)) and 0 <= value < 1):
        raise InvalidParameter(f"{name} must lie in [0, 1), got {value!r}")
    return float(value)


@dataclass(frozen=True, kw_only=True)
class Sgd:
    """w <- w - rate * v with v <- momentum * v + g (heavy ball; momentum 0 is the paper's Line 14)."""

    momentum: float = 0.0

    def __post_init__(self) -> None:
        _fraction("momentum", self.momentum)

    def init(self, dimension: int) -> State:
        """The velocity; without momentum there is no state."""
        return {"velocity": np.zeros(dimension)} if self.momentum else {}

    def update(
        self, state: State, gradient: npt.ArrayLike, *, learning_rate: float, noise_variance: float | _Array = 0.0
    ) -> tuple[State, _Array]:
        """The next state and the step to subtract from the model."""
        g = _checked(gradient, state, "velocity" if self.momentum else None)
        rate = check_positive("learning_rate", learning_rate)
        if not self.momentum:
            return {}, rate * g
        velocity = self.momentum * state["velocity"] + g
        return {"velocity": velocity}, rate * velocity


@dataclass(frozen=True, kw_only=True)
class Adam:
    """Adam; `subtract_noise` subtracts the known variance of the noise from the second moment.

    The noise adds its variance Phi to every squared gradient, which flattens Adam's scaling. Step = rate * m_hat /
    sqrt(max(v_hat - Phi, floor * Phi)) (Tang and Lecuyer 2023); floor keeps a fraction of Phi, because v_hat is only an
    estimate. Phi follows from the public parameters of the mechanism and not from data, so it costs no privacy.
    """

    beta1: float = 0.9
    beta2: float = 0.999
    stabiliser: float = 1e-8
    subtract_noise: bool = False
    floor: float = 0.1

    def __post_init__(self) -> None:
        _fraction("beta1", self.beta1)
        _fraction("beta2", self.beta2)
        check_positive("stabiliser", self.stabiliser)
        check_positive("floor", self.floor)

    def init(self, dimension: int) -> State:
        """Both moments and the number of steps taken."""
        return {"mean": np.zeros(dimension), "square": np.zeros(dimension), "steps": np.zeros(1)}

    def update(
        self, state: State, gradient: npt.ArrayLike, *, learning_rate: float, noise_variance: float | _Array = 0.0
    ) -> tuple[State, _Array]:
        """The next state and the step to subtract; `noise_variance` is Phi, the noise's in the mean gradient."""
        g = _checked(gradient, state, "mean")
        t = state["steps"] + 1
        mean = self.beta1 * state["mean"] + (1 - self.beta1) * g
        square = self.beta2 * state["square"] + (1 - self.beta2) * g * g
        v_hat = square / (1 - self.beta2 ** t[0])
        if self.subtract_noise:
            phi = np.asarray(noise_variance, dtype=np.float64)
            if not bool(np.isfinite(phi).all() and (phi >= 0).all()):
                raise InvalidParameter("noise_variance must be finite and >= 0")
            v_hat = np.maximum(v_hat - phi, self.floor * phi)
        rate = check_positive("learning_rate", learning_rate) / (1 - self.beta1 ** t[0])
        return {"mean": mean, "square": square, "steps": t}, rate * mean / (np.sqrt(v_hat) + self.stabiliser)


def optimizer_of(settings: ServerSettings) -> Sgd | Adam:
    """The optimizer that the settings name."""
    if settings.optimizer == "sgd":
        return Sgd(momentum=settings.momentum)
    if settings.optimizer == "adam":
        return Adam(subtract_noise=settings.subtract_noise)
    raise InvalidParameter(f"optimizer {settings.optimizer!r} is a setting that `optimizer_of` does not make")


def schedule(name: str, *, round: int, rounds: int) -> float:
    """The factor on the learning rate in `round` of 0..rounds-1. It starts at 1; all but "constant" fall towards 0.

    >>> [schedule("linear", round=t, rounds=4) for t in range(4)]
    [1.0, 0.75, 0.5, 0.25]
    """
    check_int("rounds", rounds, 1, 2**53)
    check_int("round", round, 0, rounds - 1)
    if name == "constant":
        return 1.0
    if name == "linear":
        return 1 - round / rounds
    if name == "cosine":
        return 0.5 * (1 + math.cos(math.pi * round / rounds))
    raise InvalidParameter(f"schedule must be one of {', '.join(SCHEDULES)}, got {name!r}")


def average(previous: _Array, model: npt.ArrayLike, *, decay: float, round: int) -> _Array:
    """Exponential moving average of the model after `round` (0-based). It is a post-processing and costs no privacy.

    The decay in round t is min(decay, (1 + t) / (10 + t)): low at first, so that the random first models are forgotten.
    """
    decay = min(_fraction("decay", decay), (1 + round) / (10 + round))
    return decay * previous + (1 - decay) * np.asarray(model, dtype=np.float64)
