"""Server optimisers as pure init/update pairs on flat float64 arrays, learning-rate schedules, and the model's average.

`init(d)` gives the state, `update(state, gradient, ...)` the next state and the step to subtract from the model. A
state is a dictionary of arrays, so that a checkpoint holds it without pickling.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bqsgd.errors import InvalidParameter, NonFiniteInput
from bqsgd.params import check_int, check_positive

_Array = npt.NDArray[np.float64]
State = dict[str, _Array]
OPTIMISERS = ("sgd", "adam")
SCHEDULES = ("constant", "linear", "cosine")


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
        """No state without momentum."""
        return {"velocity": np.zeros(dimension)} if self.momentum else {}

    def update(
        self, state: State, gradient: npt.ArrayLike, *, learning_rate: float, noise_variance: float | _Array = 0.0
    ) -> tuple[State, _Array]:
        """The next state and the step to subtract from the model."""
        g = _checked(gradient, state, "velocity" if self.momentum else None)
        if not self.momentum:
            return {}, check_positive("learning_rate", learning_rate) * g
        velocity = self.momentum * state["velocity"] + g
        return {"velocity": velocity}, check_positive("learning_rate", learning_rate) * velocity


@dataclass(frozen=True, kw_only=True)
class Adam:
    """Adam; with `subtract_noise` the known noise variance is taken out of the second moment.

    The noise adds a variance Phi to every squared gradient, which flattens Adam's scaling. Step = rate * m_hat /
    sqrt(max(v_hat - Phi, floor * Phi)) (Tang and Lecuyer 2023); floor keeps a fraction of Phi, because v_hat itself
    is only an estimate. Phi comes from the public parameters of the mechanism, not from data: no privacy cost.
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
        """The next state and the step to subtract from the model; `noise_variance` is Phi, of the mean gradient."""
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


def optimiser(name: str, *, momentum: float = 0.0, subtract_noise: bool = False) -> Sgd | Adam:
    """The optimiser called `name`; an option that it does not have is refused rather than ignored."""
    if name == "sgd" and not subtract_noise:
        return Sgd(momentum=momentum)
    if name == "adam" and not momentum:
        return Adam(subtract_noise=subtract_noise)
    if name in OPTIMISERS:
        raise InvalidParameter("momentum is for sgd (adam has beta1), subtract_noise is for adam")
    raise InvalidParameter(f"optimiser must be one of {', '.join(OPTIMISERS)}, got {name!r}")


def schedule(name: str, *, round: int, rounds: int) -> float:
    """The factor on the learning rate in `round` of 0..rounds-1: starts at 1 and, but for "constant", falls towards 0.

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
    """Exponential moving average of the model after `round` (0-based): a post-processing, so it costs no privacy.

    The decay starts low, min(decay, (1 + t) / (10 + t)), so that the random first models are forgotten.
    """
    kept = min(_fraction("decay", decay), (1 + round) / (10 + round))
    return kept * previous + (1 - kept) * np.asarray(model, dtype=np.float64)
