"""Server optimizers (pure init/update pairs on flat float64 arrays), learning-rate schedules, and the model's average.

`init(d)` returns the first state; `update(state, gradient, ...)` returns the next state and the step to subtract from
the model. A state is a dictionary of arrays, so that a checkpoint can store it without pickling. Clients that repeat
the server's steps are sent its arrays one after another ("Memory" in docs/wire.md): `update` keeps the names and the
order of `init`, and `memory_size` is how many numbers they hold together.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bqsgd._src.errors import InvalidParameter
from bqsgd._src.params import check_finite, check_int, check_positive
from bqsgd._src.settings.groups import ServerSettings

_Array = npt.NDArray[np.float64]
State = dict[str, _Array]
# Those of torch.optim.Adam, and the least fraction of the noise that its correction leaves.
_BETA1, _BETA2, _STABILISER, _FLOOR = 0.9, 0.999, 1e-8, 0.1


def _checked(gradient: npt.ArrayLike, state: State, key: str | None) -> _Array:
    array = np.asarray(gradient, dtype=np.float64)
    if array.ndim != 1 or (key is not None and array.shape != state[key].shape):
        raise InvalidParameter(f"gradient must be flat and as long as the state, got shape {array.shape}")
    check_finite(array, "the aggregated gradient holds NaN or infinity; the model was not changed")
    return array


@dataclass(frozen=True, kw_only=True)
class Sgd:
    """w <- w - rate * v with v <- momentum * v + g (heavy ball; momentum 0 is the paper's Line 14)."""

    momentum: float = 0.0

    def init(self, dimension: int) -> State:
        """The velocity; without momentum there is no state."""
        return {"velocity": np.zeros(dimension)} if self.momentum else {}

    def memory_size(self, dimension: int) -> int:
        """Numbers in the state."""
        return dimension if self.momentum else 0

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
    sqrt(max(v_hat - Phi, _FLOOR * Phi)) (Tang and Lecuyer 2023); the floor keeps a fraction of Phi, because v_hat is an
    estimate. Phi follows from the public parameters of the mechanism and not from data, so it costs no privacy.
    """

    subtract_noise: bool = False

    def init(self, dimension: int) -> State:
        """Both moments and the number of steps taken."""
        return {"mean": np.zeros(dimension), "square": np.zeros(dimension), "steps": np.zeros(1)}

    def memory_size(self, dimension: int) -> int:
        """Numbers in the state."""
        return 2 * dimension + 1

    def update(
        self, state: State, gradient: npt.ArrayLike, *, learning_rate: float, noise_variance: float | _Array = 0.0
    ) -> tuple[State, _Array]:
        """The next state and the step to subtract; `noise_variance` is Phi, the noise's in the mean gradient."""
        g = _checked(gradient, state, "mean")
        t = state["steps"] + 1
        mean = _BETA1 * state["mean"] + (1 - _BETA1) * g
        square = _BETA2 * state["square"] + (1 - _BETA2) * g * g
        v_hat = square / (1 - _BETA2 ** t[0])
        if self.subtract_noise:
            phi = np.asarray(noise_variance, dtype=np.float64)
            if not bool(np.isfinite(phi).all() and (phi >= 0).all()):
                raise InvalidParameter("noise_variance must be finite and >= 0")
            v_hat = np.maximum(v_hat - phi, _FLOOR * phi)
        rate = check_positive("learning_rate", learning_rate) / (1 - _BETA1 ** t[0])
        return {"mean": mean, "square": square, "steps": t}, rate * mean / (np.sqrt(v_hat) + _STABILISER)


def optimizer_of(settings: ServerSettings) -> Sgd | Adam:
    """The optimizer that the settings name; every word of `ServerSettings.optimizer` has a case here."""
    match settings.optimizer:
        case "sgd":
            return Sgd(momentum=settings.momentum)
        case "adam":
            return Adam(subtract_noise=settings.subtract_noise)
        case name:
            raise InvalidParameter(f"optimizer {name!r} has no class; use sgd or adam")


def schedule(name: str, *, round: int, rounds: int) -> float:
    """The factor on the learning rate in `round` of 0..rounds-1. It starts at 1; all but "constant" fall towards 0.

    >>> [schedule("linear", round=t, rounds=4) for t in range(4)]
    [1.0, 0.75, 0.5, 0.25]
    """
    check_int("rounds", rounds, 1, 2**53)
    check_int("round", round, 0, rounds - 1)
    done = round / rounds
    return {"constant": 1.0, "linear": 1 - done, "cosine": 0.5 * (1 + math.cos(math.pi * done))}[name]


def average(previous: _Array, model: npt.ArrayLike, *, decay: float, round: int) -> _Array:
    """Exponential moving average of the model after `round` (0-based). It is a post-processing and costs no privacy.

    The decay in round t is min(decay, (1 + t) / (10 + t)): low at first, so that the random first models are forgotten.
    """
    decay = min(decay, (1 + round) / (10 + round))
    return decay * previous + (1 - decay) * np.asarray(model, dtype=np.float64)
