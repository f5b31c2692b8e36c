"""The audit stays below the proven figure for the real encoder, and catches clients that are not what they claim.

False alarms: every audit here runs at confidence 0.999 or more with a fixed seed, so it is the same runs each time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from bqsgd._src.audit.bound import AuditResult, audit
from bqsgd._src.audit.encoder import (
    CANARY_SIZE,
    Encode,
    EncoderRuns,
    Inputs,
    code_laws,
    loss_tables,
    uniforms,
    worst_case_inputs,
)
from bqsgd._src.errors import InvalidParameter
from bqsgd._src.mechanism.encoder import encode as encode_values
from bqsgd._src.noise import NoiseSource, privacy_rng, seeded_rng
from bqsgd._src.params import Coarsening, Mechanism
from bqsgd._src.privacy.accountant import Accountant
from bqsgd._src.release import Relation, Release, Sampling, Scheme, Sensitivity, Terms

Values = npt.NDArray[np.float64]
BATCH, DIMENSION = 16, 256
CONFIDENCE = 0.999


def release_of(*, levels: int = 4, trials: int = 60, dimension: int = DIMENSION, rate: float = 1.0) -> Release:
    """A per-sample clamp at 1 and a mean over the public batch size: linf = 1 / BATCH."""
    return Release(
        mechanism=Mechanism(levels=levels, trials=trials),
        terms=Terms(
            dimension=dimension,
            sensitivity=Sensitivity(linf=1 / BATCH),
            sampling=Sampling(scheme=Scheme.POISSON, rate=rate) if rate < 1 else Sampling(scheme=Scheme.NONE),
        ),
    )


RELEASE = release_of()


def audit_encoder(
    release: Release,
    *,
    seed: int,
    samples: int,
    rounds: int = 1,
    delta: float = 1e-3,
    inputs: Inputs | None = None,
    encode: Encode | None = None,
) -> AuditResult:
    source = EncoderRuns(release, rng=seeded_rng(seed=seed), rounds=rounds, inputs=inputs, encode=encode)
    return audit(source, claim=release, samples=samples, delta=delta, confidence=CONFIDENCE)


def canary_inputs(mean: Callable[[Values], Values], *, background: Values | None = None) -> Inputs:
    """The encoder's inputs that a client's code `mean` makes of the background without and with a canary record."""
    records = np.empty((0, DIMENSION)) if background is None else background
    canary = np.full((1, DIMENSION), CANARY_SIZE)
    return Inputs(without=mean(records), with_record=mean(np.concatenate([records, canary])))


# Clients: from per-sample gradients (records, dimension) to the encoder's input, clip 1.


def honest(gradients: Values) -> Values:
    return np.clip(np.clip(gradients, -1, 1).sum(axis=0) / BATCH, -1, 1)


def no_clip(gradients: Values) -> Values:
    return np.clip(gradients.sum(axis=0) / BATCH, -1, 1)  # the encoder's range is not a clip a sample


def batch_mean_clip(gradients: Values) -> Values:
    mean = gradients.sum(axis=0) / BATCH
    return mean / max(1.0, float(np.abs(mean).max()))


def realised_batch(gradients: Values) -> Values:
    return np.clip(np.clip(gradients, -1, 1).sum(axis=0) / max(1, len(gradients)), -1, 1)


def encoder(mechanism: Mechanism) -> Encode:
    def encode(values: Values, *, rng: NoiseSource) -> npt.NDArray[np.unsignedinteger]:
        return encode_values(values, mechanism, range=1.0, rng=rng)

    return encode


def half_the_variance(values: Values, *, rng: NoiseSource) -> npt.NDArray[np.unsignedinteger]:
    claimed, real = RELEASE.mechanism, Mechanism(levels=RELEASE.mechanism.levels, trials=RELEASE.mechanism.trials // 2)
    return encoder(real)(values, rng=rng) + (claimed.trials - real.trials) // 2


@pytest.mark.parametrize(
    ("release", "rounds", "samples"),
    [
        (RELEASE, 1, 20_000),
        (release_of(levels=1, trials=251, dimension=61_706), 1, 500),
        (release_of(levels=1, trials=20, dimension=1), 1, 20_000),
        (release_of(rate=0.1), 1, 20_000),
        (release_of(rate=0.25, dimension=64), 10, 4_000),
    ],
)
def test_the_real_encoder_stays_below_the_exact_figure(release: Release, rounds: int, samples: int) -> None:
    result = audit_encoder(release, rounds=rounds, samples=samples, seed=1)
    assert not result.violated
    assert result.lower.epsilon < result.claimed.epsilon
    assert "proves nothing" in result.verdict


def test_the_bound_has_power() -> None:
    """With noise to spare the audit would be silent about everything; here it must see a good part of epsilon."""
    result = audit_encoder(RELEASE, samples=20_000, delta=1e-2, seed=2)
    assert 0.6 * result.claimed.epsilon < result.lower.epsilon <= result.claimed.epsilon


def test_half_the_variance_is_caught() -> None:
    result = audit_encoder(RELEASE, samples=4_000, seed=3, encode=half_the_variance)
    assert result.violated
    assert "VIOLATION" in result.verdict


FULL_BATCH = np.full((BATCH, DIMENSION), -1.0)


@pytest.mark.parametrize("background", [None, FULL_BATCH], ids=["alone", "in a full batch"])
@pytest.mark.parametrize(
    ("client", "caught"),
    [(honest, False), (no_clip, True), (batch_mean_clip, True), (realised_batch, True)],
)
def test_planted_client_faults_are_caught(
    client: Callable[[Values], Values], caught: bool, background: Values | None
) -> None:
    pair = canary_inputs(client, background=background)
    result = audit_encoder(RELEASE, samples=4_000, seed=4, inputs=pair)
    assert result.violated == caught


def test_faults_are_caught_through_sampling_and_rounds() -> None:
    release = release_of(rate=0.25)
    pair = canary_inputs(batch_mean_clip)
    result = audit_encoder(release, rounds=4, samples=2_000, seed=5, inputs=pair)
    assert result.violated


def test_a_batch_mean_clip_accounted_as_such_passes() -> None:
    release = Release(
        mechanism=Mechanism(levels=1, trials=60),
        terms=Terms(
            dimension=1,
            sensitivity=Sensitivity(linf=2.0, relation=Relation.REPLACE),
            sampling=Sampling(scheme=Scheme.NONE),
        ),
    )
    result = audit_encoder(release, samples=20_000, seed=6)
    assert not result.violated
    assert result.lower.epsilon > 0.4 * result.claimed.epsilon


def test_the_worst_case_pair_attains_the_shift() -> None:
    pair = worst_case_inputs(RELEASE)
    assert np.all(pair.with_record - pair.without == 1 / BATCH)
    wide = Release(
        mechanism=RELEASE.mechanism,
        terms=Terms(dimension=9, sensitivity=Sensitivity(linf=1.5, l2=3.0), sampling=Sampling(scheme=Scheme.NONE)),
    )
    pair = worst_case_inputs(wide)
    assert (pair.with_record - pair.without).tolist() == [1.5] * 4 + [0.0] * 5
    assert np.abs(pair.with_record).max() <= 1


def test_the_code_law_is_the_encoders_law() -> None:
    mechanism, count = Mechanism(levels=3, trials=20), 400_000
    for value in (-1.0, 0.0, 0.21, 1.0):
        codes = encoder(mechanism)(np.full(count, value), rng=seeded_rng(seed=7))
        (law,) = code_laws(mechanism, [value])
        assert law.sum() == pytest.approx(1, abs=1e-12)
        seen = np.bincount(codes, minlength=mechanism.code_count) / count
        # 5 standard errors for each of 4 x 27 codes: false alarm below 1e-4.
        assert np.all(np.abs(seen - law) <= 5 * np.sqrt(law * (1 - law) / count) + 1e-5)


def test_scores_are_log_likelihood_ratios() -> None:
    """E[e^score] = 1 without the record: the ratio's law, and the sampling rate, are as stated."""
    release = release_of(dimension=8, levels=4, trials=12, rate=0.3)
    source = EncoderRuns(release, rng=seeded_rng(seed=12), rounds=2)
    found = {present: source.scores(50_000, present=present) for present in (True, False)}
    ratio = np.exp(found[False])
    assert abs(ratio.mean() - 1) < 5 * ratio.std() / math.sqrt(ratio.size)
    back = np.exp(-found[True])
    assert abs(back.mean() - 1) < 5 * back.std() / math.sqrt(back.size)
    assert found[True].mean() > found[False].mean()


def test_a_code_that_only_one_side_gives_decides_the_run() -> None:
    (table,) = loss_tables(Mechanism(levels=1, trials=2), without=[0.0], with_record=[0.5])
    assert table.tolist() == pytest.approx([0.0, math.log(0.5), math.log(0.75), math.log(1.5), 60.0][: table.size])


def test_uniforms_fill_the_unit_interval() -> None:
    drawn = uniforms(100_001, rng=seeded_rng(seed=1))
    assert drawn.shape == (100_001,)
    assert 0 <= drawn.min() < 1e-3
    assert 0.999 < drawn.max() < 1
    assert abs(drawn.mean() - 0.5) < 5 * math.sqrt(1 / 12 / drawn.size)


def test_the_record_says_whether_the_noise_was_seeded_and_what_was_audited() -> None:
    claim = release_of(dimension=4)
    fields = audit(EncoderRuns(claim, rng=privacy_rng()), claim=claim, samples=50, delta=1e-3).to_dict()
    assert fields["seeded"] is False
    assert fields["audited_dimension"] == 4
    assert "proves nothing" in fields["note"]
    assert fields["claimed"]["epsilon"] == Accountant().compose(claim).epsilon(1e-3)


@pytest.mark.parametrize("wrong", [{"samples": 3}, {"confidence": 1.0}, {"confidence": 0.0}])
def test_bad_arguments_are_refused(wrong: dict[str, object]) -> None:
    arguments: dict[str, object] = {"claim": RELEASE, "samples": 100, "delta": 1e-3, **wrong}
    with pytest.raises(InvalidParameter):
        audit(EncoderRuns(RELEASE, rng=privacy_rng()), **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [{"rounds": 0}, {"inputs": Inputs(without=np.zeros(3), with_record=np.ones(3))}])
def test_bad_sources_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(InvalidParameter):
        EncoderRuns(RELEASE, rng=privacy_rng(), **wrong)  # type: ignore[arg-type]


def test_worlds_that_do_not_differ_score_nothing() -> None:
    same = Inputs(without=np.zeros(DIMENSION), with_record=np.zeros(DIMENSION))
    result = audit_encoder(RELEASE, samples=100, seed=8, inputs=same)
    assert not result.violated
    assert result.lower.epsilon == 0


def test_an_honest_encoder_is_hardly_ever_accused() -> None:
    """100 audits at confidence 0.9: at most 10 % wrong, so 21 or more have probability below 0.001."""
    release = release_of(dimension=16, levels=8)
    accused = sum(
        audit(
            EncoderRuns(release, rng=seeded_rng(seed=seed)), claim=release, samples=400, delta=1e-3, confidence=0.9
        ).violated
        for seed in range(100)
    )
    assert accused < 21


def coarse_release(**changes: float) -> Release:
    release = release_of(**changes)  # type: ignore[arg-type]
    return replace(release, mechanism=replace(release.mechanism, coarsening=Coarsening(points=8, width=20)))


def test_coarse_codes_are_audited_with_their_own_law() -> None:
    release = coarse_release()
    (law,) = code_laws(release.mechanism, [0.3])
    assert law.size == 8
    assert law.sum() == pytest.approx(1)
    result = audit_encoder(release, samples=4000, seed=5)
    assert not result.violated
    assert result.lower.epsilon > 0.2 * result.claimed.epsilon, "coarse codes still tell something"


def test_a_client_that_coarsens_before_the_noise_is_caught() -> None:
    """Rounding to 8 points and adding noise of a few points' worth is not the claimed mechanism."""
    release = coarse_release()

    def too_little(values: Values, *, rng: NoiseSource) -> npt.NDArray[np.unsignedinteger]:
        codes = encode_values(values, Mechanism(levels=2, trials=3), range=1.0, rng=rng, clamp=True)
        assert codes.max() < release.mechanism.code_count
        return codes

    result = audit_encoder(release, samples=4000, seed=6, encode=too_little)
    assert result.violated
