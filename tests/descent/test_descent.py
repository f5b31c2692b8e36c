"""Clients that repeat the server's steps: the same bits, or a reason to ask for the whole model."""

from dataclasses import replace

import numpy as np
import pytest

from bqsgd._src.descent.descent import Descent, moved
from bqsgd._src.errors import ModelMessageError, ModelNotHeld
from bqsgd._src.settings.client_plan import sum_plan
from bqsgd._src.settings.config import Config
from bqsgd._src.subset import Subsets
from bqsgd._src.wire.model_message import ModelMessage, write_model
from bqsgd._src.wire.model_steps import Aggregate, StepKind, write_steps

SHAPES = ((40, 7), (40,))
DIMENSION = 320
SUMS = {
    "clients": 5, "secure": True, "dropouts": 1, "levels": 20, "trials": 120, "rounds": 30, "one_in": 3, "range": 0.5,
    "learning_rate": 0.1,
}  # fmt: skip
OPTIMIZERS = {
    "sgd": {"momentum": 0.0, "schedule": "constant"},
    "momentum": {"momentum": 0.9, "schedule": "cosine"},
    "adam": {"optimizer": "adam", "subtract_noise": True, "schedule": "linear"},
}


def descent_of(**changes):
    config = Config.of(**{**SUMS, **changes})
    one_in = config.clients.one_in
    subsets = Subsets(shapes=SHAPES, one_in=one_in, rotated=config.rotates) if one_in > 1 else None
    plan = sum_plan(config, dimension=config.kept(DIMENSION)) if config.secure.on else None
    return Descent(config=config, dimension=DIMENSION, subsets=subsets, sums=plan)


class Sender:
    """A server: its model, what its optimizer remembers, and the aggregates of all rounds."""

    def __init__(self, descent, seed=0):
        self.descent, self.rng = descent, np.random.default_rng(seed)
        self.model = self.rng.normal(size=DIMENSION).astype(np.float32)
        self.state, self.round, self.parts = descent.optimizer.init(DIMENSION), 0, []

    def aggregate(self):
        kept = self.descent.kept
        if self.descent.sums is None:
            return Aggregate.estimate(self.rng.normal(size=kept), messages=4, variance=0.01)
        width = int(self.rng.integers(6, self.descent.sums.width + 1))  # the width of a sum may differ by round
        numbers = self.rng.integers(0, 1 << width, kept).astype(np.uint32)
        return Aggregate(messages=int(self.rng.integers(4, 6)), width=width, numbers=numbers)

    def step(self, count=1, aggregate=None):
        for _ in range(count):
            one = aggregate or self.aggregate()
            if one.messages:
                gradient, variance = self.descent.gradient(one, round=self.round)
                self.state, step = self.descent.step(
                    self.state, gradient, model=self.model, variance=variance, round=self.round
                )
                self.model = moved(self.model, step)
            self.parts.append(one.part())
            self.round += 1
        return self

    def message(self, count, **changes):
        fields = {
            "kind": self.descent.kind, "one_in": self.descent.config.clients.one_in, "model": self.model,
            "memory": self.descent.memory(self.state), "round": self.round,
        }  # fmt: skip
        return write_steps(self.parts[len(self.parts) - count :], **{**fields, **changes})

    def whole(self):
        return write_model(self.model, round=self.round, memory=self.descent.memory(self.state))


def same(held, sender):
    assert held.round == sender.round
    assert held.model.tobytes() == sender.model.tobytes()
    assert held.memory.tobytes() == sender.descent.memory(sender.state).tobytes()


@pytest.mark.parametrize("one_in", [1, 3])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("secure", [True, False], ids=["sums", "estimates"])
def test_a_client_has_the_bits_of_the_server(one_in, optimizer, secure):
    robust = {} if secure else {"secure": False, "dropouts": None, "aggregation": "median"}
    descent = descent_of(one_in=one_in, **OPTIMIZERS[optimizer], **robust)
    assert descent.kind is (StepKind.SUMS if secure else StepKind.ESTIMATES)
    sender = Sender(descent)
    held = descent.receive(write_model(sender.model, round=0), held=None)
    same(held, sender)
    for count in (1, 3, 2):
        first = held.model
        sender.step(count - 1).step(aggregate=Aggregate(messages=0) if count == 3 else None)
        held = descent.receive(sender.message(count), held=held)
        same(held, sender)
        assert not np.array_equal(held.model, first)
    late = descent.receive(sender.whole(), held=None)  # joins now, and follows from here
    same(late, sender)
    sender.step()
    same(descent.receive(sender.message(1), held=late), sender)


def test_a_client_that_is_further_than_the_server_knows_leaves_out_what_it_has():
    descent = descent_of(momentum=0.9)
    sender = Sender(descent)
    held = descent.receive(write_model(sender.model, round=0), held=None)
    sender.step()
    held = descent.receive(sender.message(1), held=held)
    same(descent.receive(sender.message(1), held=held), sender)  # the same round again
    sender.step(2)
    same(descent.receive(sender.message(3), held=held), sender)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_whoever_holds_something_else_asks_for_the_whole_model(optimizer):
    descent = descent_of(**OPTIMIZERS[optimizer])
    sender = Sender(descent).step(4)
    held = descent.receive(sender.whole(), held=None)
    sender.step(2)
    message = sender.message(2)
    other_model = held.model.copy()
    other_model[17] += np.float32(1e-3)
    others = [None, replace(held, round=3), replace(held, round=7), replace(held, model=other_model)]
    if descent.memory_size:
        memory = held.memory.copy()
        memory[5] += 1e-3
        bare = descent.receive(write_model(held.model, round=4), held=None)  # a model without the memory
        others += [replace(held, memory=memory), bare]
    for other in others:
        with pytest.raises(ModelNotHeld):
            descent.receive(message, held=other)
    same(descent.receive(message, held=held), sender)


def test_sums_that_no_run_has_are_refused():
    descent = descent_of()
    sender = Sender(descent)
    held = descent.receive(write_model(sender.model, round=0), held=None)
    numbers = np.zeros(descent.kept, np.uint32)
    for messages in (1, 3, 6, 2**32 - 1):
        part = Aggregate(messages=messages, width=9, numbers=numbers).part()
        sender.parts, sender.round = [part], 1
        with pytest.raises(ModelMessageError, match="over 4 to 5 clients"):
            descent.receive(sender.message(1), held=held)


def test_no_step_beyond_the_last_round():
    descent = descent_of()
    sender = Sender(descent).step(30)
    held = descent.receive(sender.whole(), held=None)
    sender.parts.append(sender.aggregate().part())
    sender.round += 1
    with pytest.raises(ModelMessageError, match="beyond the 30 rounds"):
        descent.receive(sender.message(1), held=held)


@pytest.mark.parametrize(
    "memory",
    [
        lambda memory: np.full_like(memory, 1e308),
        lambda memory: np.full_like(memory, -1e308),
        lambda memory: np.append(memory[:-1], -1.0),
        lambda memory: -memory,
    ],
)
@pytest.mark.filterwarnings("error")
def test_a_hostile_memory_leads_to_a_refusal_or_to_a_finite_model(memory):
    """The server chooses the model anyway; what counts is that nothing else is raised and nothing infinite trained."""
    for optimizer in ("momentum", "adam"):
        descent = descent_of(**OPTIMIZERS[optimizer], learning_rate=1e3)
        sender = Sender(descent).step(2)
        hostile = write_model(sender.model, round=2, memory=memory(descent.memory(sender.state)))
        held = descent.receive(hostile, held=None)
        sender.step()
        try:
            received = descent.receive(sender.message(1), held=held)
        except ModelMessageError:
            continue
        assert np.isfinite(received.model).all()


def test_memory_is_checked_against_the_optimizer_of_the_run():
    sender = Sender(descent_of(**OPTIMIZERS["adam"])).step()
    with pytest.raises(ModelMessageError):
        descent_of(**OPTIMIZERS["momentum"]).receive(sender.whole(), held=None)
    with pytest.raises(ModelMessageError):
        descent_of(**OPTIMIZERS["sgd"]).receive(sender.whole(), held=None)


def test_changes_are_refused_where_steps_are_expected():
    held = ModelMessage(round=0, model=np.zeros(DIMENSION, np.float32), memory=np.zeros(DIMENSION))
    with pytest.raises(ModelMessageError):
        descent_of().receive(b"BQSC" + bytes(100), held=held)
