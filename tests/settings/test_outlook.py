"""What a run's plans say of its noise before round 0, and the settings that are offered where it would drown."""

from __future__ import annotations

import math

import numpy as np
import pytest

from bqsgd._src.client.draws import draw_batch
from bqsgd._src.errors import InvalidParameter
from bqsgd._src.noise import seeded_rng
from bqsgd._src.release import Scheme
from bqsgd._src.settings.client_plan import client_terms, release_in
from bqsgd._src.settings.config import Config
from bqsgd._src.settings.fit import Sizes, fit
from bqsgd._src.settings.outlook import (
    CannotLearn,
    Outlook,
    check_outlook,
    foresee,
    nearest_settings,
    with_gaussian_noise,
)

EVEN = dict.fromkeys(range(4), 300)
UNEVEN = {0: 3, 1: 40, 2: 500, 3: 657}


def run_of(samples=EVEN, dimension=50, **given):
    return fitted({"clients": len(samples)} | given, samples=sum(samples.values()), dimension=dimension)


def fitted(settings, *, samples, dimension):
    return fit(settings, Sizes(samples=samples, dimension=dimension, parameters=dimension))


def test_the_noise_foreseen_is_the_noise_of_decoded_frames(make_client, settings):
    """Three clients encode zeros: a learning rate of 0 in all but name. What the mean carries is what was foreseen."""
    from bqsgd._src.codec import decode_frame, encode_frame

    config = settings(levels=5, trials=60, clip="dual", clip_norm=1.0, range=0.2)
    outlook = foresee(config, {0: 60, 1: 60, 2: 60}, dimension=20_000)
    zeros = np.zeros(20_000)
    frames = [
        encode_frame(zeros, config.privacy.mechanism, range=0.2, rng=seeded_rng(seed=client), client=client, round=0)
        for client in range(3)
    ]
    mean = np.mean([decode_frame(frame, range=0.2) for frame in frames], axis=0)
    assert outlook.noise == pytest.approx(mean.std(), rel=0.03)
    assert outlook.forecast.noise_length == pytest.approx(np.linalg.norm(mean), rel=0.03)


def test_with_subsets_the_noise_foreseen_is_that_of_the_whole_estimate(settings):
    """Two clients send one in three coordinates: the estimate of the model's 6,000 carries the noise foreseen."""
    from bqsgd._src.codec import Accumulator, encode_frame
    from bqsgd._src.subset import Subsets

    config = settings(levels=5, trials=60, clip="dual", clip_norm=1.0, range=0.2, one_in=3)
    outlook = foresee(config, {0: 60, 1: 60}, dimension=2000, learnt=6000)
    subsets = Subsets(shapes=((60, 100),), one_in=3, rotated=True)
    total = Accumulator(6000)
    for client in range(2):
        subset, rng = subsets.drawn(round=0, client=client), seeded_rng(seed=client)
        frame = encode_frame(
            subset.keep(np.zeros(6000)), config.privacy.mechanism, range=0.2, rng=rng, client=client, round=0,
            kept=subsets.header,
        )  # fmt: skip
        total.add(frame, range=0.2, subset=subset)
    assert outlook.forecast.noise_length == pytest.approx(np.linalg.norm(total.mean()), rel=0.03)
    assert outlook.noise == pytest.approx(subsets.rotated_back(total.mean(), round=0).std(), rel=0.03)


def test_weights_decide_how_much_noise_the_mean_carries():
    config = Config.of(clients=4, batch_size=100, levels=5, trials=60)
    one_large = foresee(config, {0: 10**6, 1: 300, 2: 300, 3: 300}, dimension=50)
    even = foresee(config, EVEN, dimension=50)
    assert one_large.noise == pytest.approx(2 * even.noise, rel=1e-2), "one client's own noise, not that of four"
    at_one_rate = foresee(config.but(rate=0.1), {0: 10**6, 1: 300, 2: 300, 3: 300}, dimension=50)
    assert at_one_rate.noise == pytest.approx(even.noise)


def test_clients_of_all_sizes_share_one_plan_at_a_common_rate():
    config = run_of(UNEVEN)
    releases = {
        release_in(config, client_terms(config, dimension=50, dataset_size=n), client=client, round=0)
        for client, n in UNEVEN.items()
    }
    assert len(releases) == 1
    assert next(iter(releases)).terms.sampling.rate == config.privacy.rate


def test_a_client_with_fewer_samples_than_the_batch_takes_part_with_all_of_them(settings, make_client):
    config = settings(batch_size=20)
    client = make_client(config, samples=7)
    assert client.terms.sampling.rate == 1.0
    assert len(client._drawn(client.sources.at("batch", 0))) == 7
    assert isinstance(client.update(np.zeros(6, np.float32), 0).frame, bytearray)


def test_batches_are_drawn_at_the_rate_that_is_accounted(settings, make_client):
    config = settings(rate=0.25, batch_size=500)
    client = make_client(config, samples=60)
    assert client.terms.sampling.rate == 0.25
    sizes = [len(client._drawn(client.sources.at("batch", round))) for round in range(400)]
    assert np.mean(sizes) == pytest.approx(15, abs=5 * math.sqrt(60 * 0.25 * 0.75 / 400))
    rows = draw_batch(Scheme.POISSON, batch_size=1, dataset_size=10**6, rng=seeded_rng(seed=1), rate=2.0**-12)
    assert len(rows) == pytest.approx(10**6 / 4096, abs=80)


@pytest.mark.parametrize("wrong", [{"rate": 1.5}, {"rate": 0.5, "sampling": "fixed"}, {"rate": 0.0}])
def test_a_rate_is_a_chance_of_poisson_batches(wrong):
    with pytest.raises(InvalidParameter, match="rate"):
        Config.of(**wrong)


@pytest.mark.slow
def test_a_hopeless_run_is_refused_with_settings_that_work():
    config = run_of(EVEN, dimension=40_000, epsilon=0.2)
    outlook = foresee(config, EVEN, dimension=40_000)
    assert outlook.hopeless
    with pytest.raises(
        CannotLearn, match=r"the model not learn .*Settings that learn something: .*--epsilon .*--force"
    ):
        check_outlook(outlook)
    offered = list(nearest_settings(outlook))
    assert offered
    for changes in offered:
        given = {"epsilon": 0.2, "clients": 4} | changes
        clients = int(given["clients"])
        samples = dict.fromkeys(range(clients), 1200 // clients)
        assert not foresee(run_of(samples, 40_000, **given), samples, dimension=40_000).hopeless, changes


def test_without_any_plan_a_run_is_refused_and_says_why():
    config = run_of(EVEN, epsilon=0.01, range=1e-6)
    outlook = foresee(config, EVEN, dimension=50)
    assert outlook.noise is None
    assert outlook.hopeless
    with pytest.raises(CannotLearn, match=r"4 of 4 clients have no plan .*20 bits reach no less.*plan and also learn"):
        check_outlook(outlook)


@pytest.mark.slow
def test_a_guarantee_for_whole_clients_drowns_unless_they_are_very_many():
    settings = {"unit": "client", "local_steps": 5, "clients": 4, "batch_size": 100}
    config = Config.of(**settings)
    outlook = foresee(config, EVEN, dimension=500)
    assert outlook.hopeless
    with pytest.raises(CannotLearn, match="--unit sample"):
        check_outlook(outlook)


def test_progress_is_told_for_every_client():
    told = []
    foresee(run_of(), EVEN, dimension=50, progress=lambda done, total: told.append((done, total)))
    assert told == [(0, 4), (1, 4), (2, 4), (3, 4)]


@pytest.mark.parametrize("clients", [1, 4, 20, 100, 1000])
def test_defaults_follow_the_federation_and_leave_little_noise(clients):
    """60,000 samples and 26,010 coordinates, as MNIST and its default model; Gaussian noise stands for the plan's."""
    config = fitted({"clients": clients}, samples=60_000, dimension=26_010)
    assert config.privacy.rate == pytest.approx(config.privacy.batch_size * clients / 60_000)
    assert config.privacy.batch_size <= 60_000 // clients
    samples = dict.fromkeys(range(clients), 60_000 // clients)
    outlook = Outlook(config=config, samples=samples, dimension=26_010, learnt=26_010)
    assert with_gaussian_noise(outlook).forecast.noise_to_signal < 0.15


def test_what_is_given_is_kept_and_what_cannot_be_is_refused_at_once():
    given = {"clients": 4, "batch_size": 77, "rounds": 9, "range": 0.5, "learning_rate": 0.01}
    kept = fitted(given, samples=4000, dimension=10)
    assert {name: kept.flat()[name] for name in given} == given
    assert kept.privacy.rate == 77 / 1000
    with pytest.raises(InvalidParameter, match=r"more than the 600 samples .* --batch-size 600"):
        fitted({"clients": 100, "batch_size": 1024}, samples=60_000, dimension=10)
    with pytest.raises(InvalidParameter, match="clients"):
        fitted({"clients": 5}, samples=4, dimension=10)


@pytest.mark.parametrize("samples", [1, 2, 7])
@pytest.mark.parametrize("epsilon", [0.01, 50.0, 1e6])
@pytest.mark.parametrize("rounds", [1, 300])
def test_odd_federations_have_settings(samples, epsilon, rounds):
    config = fitted({"clients": 1, "epsilon": epsilon, "rounds": rounds}, samples=samples, dimension=3)
    assert 1 <= config.privacy.batch_size <= samples
    assert 0 < config.privacy.rate <= 1
    assert config.range > 0
