"""Server optimisers against torch.optim, the noise correction against its formula, schedules and the average."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from bqsgd._src.descent import optimizers
from bqsgd._src.errors import InvalidParameter, NonFiniteInput
from bqsgd._src.settings.groups import SCHEDULES, ServerSettings

GRADIENTS = np.random.default_rng(0).normal(size=(20, 7))


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (optimizers.Sgd(), lambda p: torch.optim.SGD(p, lr=0.1)),
        (optimizers.Sgd(momentum=0.9), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
        (optimizers.Adam(), lambda p: torch.optim.Adam(p, lr=0.1)),
    ],
)
def test_same_trajectory_as_torch(ours, theirs):
    model, state = np.zeros(7), ours.init(7)
    parameter = torch.zeros(7, dtype=torch.float64, requires_grad=True)
    reference = theirs([parameter])
    for gradient in GRADIENTS:
        state, step = ours.update(state, torch.tensor(gradient), learning_rate=0.1)
        model = model - step
        parameter.grad = torch.tensor(gradient)
        reference.step()
    np.testing.assert_allclose(model, parameter.detach().numpy(), rtol=1e-6, atol=1e-9)


def test_update_is_pure():
    for each in (optimizers.Sgd(momentum=0.5), optimizers.Adam()):
        state = each.init(7)
        before = {key: value.copy() for key, value in state.items()}
        first = each.update(state, GRADIENTS[0], learning_rate=0.1)[1]
        second = each.update(state, GRADIENTS[0], learning_rate=0.1)[1]
        np.testing.assert_array_equal(first, second)
        for key in state:
            np.testing.assert_array_equal(state[key], before[key])


def test_noise_correction_by_hand():
    adam = optimizers.Adam(subtract_noise=True)
    _, step = adam.update(adam.init(3), [2.0, 1.0, 0.5], learning_rate=1.0, noise_variance=0.9)
    # First step: m_hat = g, v_hat = g^2; denominators sqrt(4 - .9), sqrt(1 - .9), sqrt(floor * .9).
    np.testing.assert_allclose(step, [2 / np.sqrt(3.1), 1 / np.sqrt(0.1), 0.5 / 0.3], rtol=1e-6)


def test_noise_correction_restores_the_scale_of_a_buried_signal():
    rng = np.random.default_rng(1)
    plain, corrected = optimizers.Adam(), optimizers.Adam(subtract_noise=True)
    states = [plain.init(200), corrected.init(200)]
    for _ in range(3000):
        gradient = 1.0 + rng.normal(0, 2.0, 200)
        outcomes = [
            each.update(state, gradient, learning_rate=1.0, noise_variance=4.0)
            for each, state in zip((plain, corrected), states, strict=True)
        ]
        states = [outcome[0] for outcome in outcomes]
    # m_hat is about 1; plain divides by sqrt(1 + 4), corrected by sqrt(1).
    assert abs(np.mean(outcomes[0][1]) - 1 / np.sqrt(5)) < 0.1
    assert abs(np.mean(outcomes[1][1]) - 1) < 0.2


def test_schedules():
    for name in SCHEDULES:
        factors = [optimizers.schedule(name, round=t, rounds=10) for t in range(10)]
        assert factors[0] == 1
        assert all(a >= b > 0 for a, b in pairwise(factors))
    assert optimizers.schedule("cosine", round=5, rounds=10) == pytest.approx(0.5)
    with pytest.raises(InvalidParameter, match="schedule"):
        ServerSettings(schedule="step")
    with pytest.raises(InvalidParameter, match="round"):
        optimizers.schedule("linear", round=10, rounds=10)


def test_average_tracks_a_constant_and_smooths_noise():
    average = np.array([100.0])
    for t in range(300):
        average = optimizers.average(average, [1.0], decay=0.9, round=t)
    assert average[0] == pytest.approx(1.0, abs=1e-6)
    assert optimizers.average(np.zeros(1), [1.0], decay=0.999, round=0)[0] == pytest.approx(0.9)


def test_refusals():
    with pytest.raises(NonFiniteInput, match="not changed"):
        optimizers.Sgd().update({}, [np.inf], learning_rate=1.0)
    with pytest.raises(InvalidParameter, match="as long as the state"):
        optimizers.Adam().update(optimizers.Adam().init(3), [1.0], learning_rate=1.0)
    with pytest.raises(InvalidParameter, match="learning_rate"):
        optimizers.Sgd().update({}, [1.0], learning_rate=0.0)
    adam = optimizers.Adam(subtract_noise=True)
    with pytest.raises(InvalidParameter, match="noise_variance"):
        adam.update(adam.init(1), [1.0], learning_rate=1.0, noise_variance=-1.0)
    with pytest.raises(InvalidParameter, match="momentum"):
        ServerSettings(momentum=1.0)
    with pytest.raises(InvalidParameter, match="average"):
        ServerSettings(average=1.0)
    with pytest.raises(InvalidParameter, match="for adam"):
        ServerSettings(optimizer="sgd", subtract_noise=True)
    with pytest.raises(InvalidParameter, match="one of"):
        ServerSettings(optimizer="lion")
    adam = optimizers.optimizer_of(ServerSettings(optimizer="adam", subtract_noise=True))
    assert adam == optimizers.Adam(subtract_noise=True)


def test_every_word_has_an_optimizer_of_its_own():
    made = [optimizers.optimizer_of(ServerSettings(optimizer=word)) for word in ("sgd", "adam")]
    assert [type(each).__name__ for each in made] == ["Sgd", "Adam"]
    settings = ServerSettings()
    object.__setattr__(settings, "optimizer", "adagrad")  # a word that was added to the settings alone
    with pytest.raises(InvalidParameter, match="adagrad"):
        optimizers.optimizer_of(settings)
