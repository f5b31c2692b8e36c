"""The audit of clients runs what a client runs, and reads what a server reads."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from bqsgd._src.audit.bound import audit  # noqa: E402
from bqsgd._src.audit.client import (  # noqa: E402
    ClientRuns,
    canary_runs,
    canary_worlds,
    full_batch_inputs,
    linear_client,
)
from bqsgd._src.audit.encoder import EncoderRuns  # noqa: E402
from bqsgd._src.client.client import Client, client_sender  # noqa: E402
from bqsgd._src.errors import InvalidParameter  # noqa: E402
from bqsgd._src.ledger import Ledger  # noqa: E402
from bqsgd._src.noise import seeded_rng  # noqa: E402
from bqsgd._src.release import Scheme  # noqa: E402
from bqsgd._src.settings.config import Config  # noqa: E402

torch.set_num_threads(1)
CONFIG = Config.of(
    clients=1, sampling="none", batch_size=4, clip="clamp", clip_bound=0.5, levels=8, trials=40, seed=1, rounds=1
)
DIMENSION = 6


def runs_of(config: Config, **changes: int) -> ClientRuns:
    return canary_runs(config, **{"dimension": DIMENSION, "dataset_size": 8, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("clip", ["clamp", "scale", "l2", "dual"])
@pytest.mark.parametrize("sampling", ["none", "poisson", "fixed"])
def test_the_canary_moves_the_mean_as_far_as_the_clip_lets_it(sampling: str, clip: str) -> None:
    config = CONFIG.but(sampling=sampling, clip=clip, clip_norm=0.5, range=0.5)
    source = runs_of(config)
    move = source.inputs.with_record - source.inputs.without
    stated = source.release.terms.sensitivity
    if clip in ("clamp", "scale"):
        assert move == pytest.approx(stated.linf, rel=1e-3)
    else:
        assert stated.l2 is not None
        assert np.linalg.norm(move) == pytest.approx(stated.l2, rel=1e-3)


def test_the_client_states_the_claim() -> None:
    release = runs_of(CONFIG.but(sampling="poisson")).release
    assert release.mechanism == CONFIG.privacy.mechanism
    assert release.terms.dimension == DIMENSION
    assert (release.terms.sampling.scheme, release.terms.sampling.rate) == (Scheme.POISSON, 0.5)
    assert release.terms.sensitivity.linf == 0.25


def test_scores_are_those_of_the_encoder_on_the_same_inputs() -> None:
    """Without sampling the client is its encoder, so both sources have the same law.

    The means are within 5 standard errors, the standard deviations within 15 %, which is also 5 standard errors. Runs
    of the encoder cost next to nothing, so 30,000 of them leave the error of 750 runs of the client alone: together as
    sharp as 1,500 runs of each.
    """
    source = runs_of(CONFIG)
    encoder = EncoderRuns(source.release, rng=seeded_rng(seed=2), inputs=source.inputs)
    for present in (True, False):
        of_client, of_encoder = source.scores(750, present=present), encoder.scores(30_000, present=present)
        error = np.hypot(of_client.std() / 750**0.5, of_encoder.std() / 30_000**0.5)
        assert abs(of_client.mean() - of_encoder.mean()) < 5 * error
        assert of_client.std() == pytest.approx(of_encoder.std(), rel=0.15)


def test_runs_are_independent_and_no_round_is_asked_for_twice() -> None:
    source = runs_of(CONFIG, rounds=2)
    first, second, other = source.scores(40, present=True), source.scores(40, present=True), runs_of(CONFIG)
    assert len(np.unique(np.concatenate([first, second]))) > 70
    assert not np.array_equal(other.scores(40, present=True), other.scores(40, present=False))
    assert source.clients[True].spending.sent.total() == 160


def test_a_seed_repeats_the_audit_and_without_one_it_differs() -> None:
    again = [runs_of(CONFIG).scores(20, present=True) for _ in range(2)]
    assert np.array_equal(*again)
    fresh = [runs_of(CONFIG.but(seed=None)).scores(20, present=True) for _ in range(2)]
    assert not np.array_equal(*fresh)


def test_a_client_with_a_ledger_is_audited_with_the_noise_of_the_operating_system(tmp_path) -> None:
    config = CONFIG.but(seed=None, epsilon=1e3)
    made = []

    def make(settings: Config, data: object) -> Client:
        if not settings.privacy.trials:
            return linear_client(settings, data)  # type: ignore[arg-type]
        ledger = Ledger.open(
            tmp_path / str(len(made)), client=0, budget_epsilon=1e3, budget_delta=settings.privacy.delta
        )
        made.append(ledger)
        plain = linear_client(settings.but(seed=1), data)  # type: ignore[arg-type]
        return Client(settings, plain.objective, plain.samples, client_sender(settings, 0, ledger))

    worlds = canary_worlds(config, dimension=DIMENSION, dataset_size=4)
    source = ClientRuns(make, config, worlds=worlds, model=np.zeros(DIMENSION, np.float32))
    assert not source.seeded
    result = audit(source, claim=source.release, samples=10, delta=1e-3)
    assert not result.violated
    assert not result.to_dict()["seeded"]
    for ledger in made:
        assert ledger.spent_rounds >= 10
        ledger.close()


def test_what_reaches_the_encoder_is_read_from_frames() -> None:
    """Four records at the lower end of the range: -1 of it; with the canary's clip bound over L = 4 more, -3/4."""
    worlds = canary_worlds(CONFIG, dimension=DIMENSION, dataset_size=4)
    pair = full_batch_inputs(linear_client, CONFIG, worlds=worlds, model=np.zeros(DIMENSION, np.float32))
    assert pair.without == pytest.approx(-1, abs=1e-5)
    assert pair.with_record == pytest.approx(-0.75, abs=1e-5)


def test_unusable_clients_are_refused() -> None:
    planned = CONFIG.but(levels=None, trials=None)
    with pytest.raises(InvalidParameter, match="fixed levels and trials"):
        runs_of(planned)
    with pytest.raises(InvalidParameter, match="dataset_size"):
        runs_of(CONFIG, dataset_size=3)
    nothing = np.zeros((4, DIMENSION), np.float32), np.zeros(4, np.float32)
    with pytest.raises(InvalidParameter, match="needs a ledger"):
        ClientRuns(
            linear_client,
            CONFIG.but(seed=None),
            worlds={False: nothing, True: nothing},
            model=np.zeros(DIMENSION, np.float32),
        ).scores(4, present=True)
