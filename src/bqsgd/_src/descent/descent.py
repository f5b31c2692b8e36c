"""The steps of a run: from what a round's messages add up to, to the next model.

The server takes these steps. Where all clients of a round send the same coordinates, a client can repeat them from the
aggregate alone: it is sent the aggregates since the model that it holds (`wire.model_steps`), and has the server's
model bit for bit, because both run this code.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bqsgd._src.descent.centre import Centre
from bqsgd._src.descent.optimizers import Adam, Sgd, State, optimizer_of, schedule
from bqsgd._src.errors import ModelMessageError, ModelNotHeld, NonFiniteInput
from bqsgd._src.planner.sums import SumPlan
from bqsgd._src.settings.config import Config
from bqsgd._src.subset import Subsets
from bqsgd._src.wire.model_message import Memory, ModelMessage, read_model
from bqsgd._src.wire.model_steps import (
    Aggregate,
    StepKind,
    is_steps,
    part_bytes,
    read_aggregate,
    read_steps,
    state_digest,
)

_Array = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Descent:
    """How a run turns aggregates into models.

    dimension: of the model. subsets: the coordinates that messages carry; None for all. sums: the plan of the run's
    secure sums, if it has them. centre: of the features, in a centred run.
    """

    config: Config
    dimension: int
    subsets: Subsets | None
    sums: SumPlan | None
    centre: Centre | None = None

    def measures(self, round: int) -> bool:
        """Whether the messages of a round measure the centre, and carry no subset of a gradient."""
        return self.centre is not None and self.centre.measured_in(round)

    @property
    def optimizer(self) -> Sgd | Adam:
        """The server's optimizer."""
        return optimizer_of(self.config.server)

    @property
    def kind(self) -> StepKind:
        """What the aggregates of the run are."""
        return StepKind.ESTIMATES if self.sums is None else StepKind.SUMS

    @property
    def kept(self) -> int:
        """Numbers of an aggregate."""
        return self.config.kept(self.dimension)

    @property
    def step_bytes(self) -> int:
        """Bytes of one round's aggregate, in the widest modulus that a sum may have."""
        return part_bytes(self.kept, width=None if self.sums is None else self.sums.width)

    @property
    def memory_size(self) -> int:
        """How many numbers the optimizer remembers."""
        return self.optimizer.memory_size(self.dimension)

    def memory(self, state: State) -> Memory:
        """The optimizer's state as one flat vector."""
        return np.concatenate([np.empty(0), *state.values()])

    def _state(self, memory: Memory) -> State:
        first = self.optimizer.init(self.dimension)
        ends = np.cumsum([array.size for array in first.values()])
        return dict(zip(first, np.split(memory, ends[:-1]), strict=True)) if first else {}

    def whole(self, values: _Array, *, round: int) -> _Array:
        """The estimate of a round's gradient from the coordinates that all clients have sent."""
        if self.subsets is None or self.measures(round):
            return values
        return self.subsets.drawn(round=round, client=None).estimate(values)

    def gradient(self, aggregate: Aggregate, *, round: int) -> tuple[_Array, float]:
        """The estimate of the gradient in `round`, and the variance of the noise in one of its coordinates."""
        assert aggregate.numbers is not None
        if self.sums is None:
            values, variance = aggregate.numbers.astype(np.float64), aggregate.variance
        else:
            survivors = aggregate.messages
            values = self.sums.mean(aggregate.numbers, survivors=survivors, width=aggregate.width)
            # A kept coordinate is multiplied by one_in, and one in one_in is kept.
            share = 1 if self.measures(round) else self.config.clients.one_in
            variance = self.sums.variance(survivors) * self.config.range**2 * share
        return self.whole(values * self.config.range, round=round), variance

    def step(
        self, state: State, gradient: _Array, *, model: npt.NDArray[np.float32], variance: float, round: int
    ) -> tuple[State, _Array]:
        """The optimizer's next state, and the step to subtract from the model of `round`."""
        if self.centre is not None and self.measures(round):
            return state, self.centre.first_step(model, gradient, variance=variance)
        settings = self.config.server
        rate = settings.learning_rate * schedule(settings.schedule, round=round, rounds=self.config.run.rounds)
        state, step = self.optimizer.update(state, gradient, learning_rate=rate, noise_variance=variance)
        return state, step if self.centre is None else self.centre.step(model, step)

    def receive(self, message: bytes | bytearray | memoryview, *, held: ModelMessage | None) -> ModelMessage:
        """The model of a round with what the optimizer remembers, from a whole model or by repeating steps.

        Raises:
            ModelNotHeld: the steps do not start from, or do not lead to, what the server has; ask for the whole model.
            ModelMessageError: the message is not valid.
        """
        view = memoryview(message).cast("B")
        if is_steps(view):
            return self._repeated(view, held)
        received = read_model(view, dimension=self.dimension, memory=self.memory_size)
        if received.memory is None and (received.round == 0 or self.memory_size == 0):
            # Before its first step every optimizer remembers the same.
            memory = self.memory(self.optimizer.init(self.dimension))
            return ModelMessage(round=received.round, model=received.model, memory=memory)
        return received

    def _repeated(self, view: memoryview, held: ModelMessage | None) -> ModelMessage:
        message = read_steps(view, kind=self.kind, one_in=self.config.clients.one_in, dimension=self.dimension)
        if message.round > self.config.run.rounds:
            raise ModelMessageError(f"round {message.round} is beyond the {self.config.run.rounds} rounds of the run")
        first = message.round - len(message.parts)
        if held is None or held.memory is None or not first <= held.round <= message.round:
            has = "none" if held is None or held.memory is None else f"that of round {held.round}"
            raise ModelNotHeld(f"the steps lead on from the model of round {first}, this client holds {has}")
        model, state = held.model, self._state(held.memory)
        # A client whose reply was lost is further than the server knows: it leaves out the steps that it has taken.
        for round in range(held.round, message.round):
            model, state = self._stepped(model, state, message.parts[round - first], round)
        memory = self.memory(state)
        if not bool(np.isfinite(model).all() and np.isfinite(memory).all()):
            raise ModelMessageError("the steps lead to a model with NaN or infinity")
        if state_digest(model, memory) != message.digest:
            raise ModelNotHeld(f"the steps lead to another model of round {message.round} than the server has")
        return ModelMessage(round=message.round, model=model, memory=memory)

    def _stepped(
        self, model: npt.NDArray[np.float32], state: State, part: memoryview, round: int
    ) -> tuple[npt.NDArray[np.float32], State]:
        aggregate = read_aggregate(part, kept=self.kept)
        if aggregate.messages == 0:
            return model, state
        if self.sums is not None and not self.sums.rule.fewest <= aggregate.messages <= self.sums.rule.clients:
            raise ModelMessageError(
                f"a sum is over {self.sums.rule.fewest} to {self.sums.rule.clients} clients, got {aggregate.messages}"
            )
        gradient, variance = self.gradient(aggregate, round=round)
        try:
            # A hostile server's memory may overflow; the caller looks at the result.
            with np.errstate(all="ignore"):
                state, step = self.step(state, gradient, model=model, variance=variance, round=round)
                return moved(model, step), state
        except NonFiniteInput as error:
            raise ModelMessageError("the steps lead to a gradient with NaN or infinity") from error


def moved(model: npt.NDArray[np.float32], step: _Array) -> npt.NDArray[np.float32]:
    """The model after a step: the difference in float64, rounded to float32."""
    return (model - step).astype(np.float32)
