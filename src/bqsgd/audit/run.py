"""One audit: run the encoder, bound epsilon from below, put the exact figure beside it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from bqsgd.audit.bound import CurveCheck, LowerBound, check_curve, epsilon_lower_bound
from bqsgd.audit.inputs import Inputs, worst_case_inputs
from bqsgd.audit.scores import Encode, scores
from bqsgd.errors import InvalidParameter
from bqsgd.mechanism import encoder
from bqsgd.noise import NoiseSource
from bqsgd.params import check_int
from bqsgd.privacy.accountant import Accountant
from bqsgd.privacy.guarantee import Guarantee
from bqsgd.release import Release

PROVES_NOTHING = (
    "Passing proves nothing: an audit finds faults in what it runs, on the inputs it tries. "
    "The guarantee rests on the accountant's proof."
)
CURVE_FRACTIONS = (0.0, 0.1, 0.25, 0.5, 1.0)
"""Where the claimed curve is checked, as fractions of the claimed epsilon."""


@dataclass(frozen=True, kw_only=True)
class AuditResult:
    """What the runs showed, beside what is claimed. Both statements hold together with `confidence`."""

    release: Release
    rounds: int
    samples: int
    confidence: float
    lower: LowerBound
    curve: CurveCheck
    claimed: Guarantee
    seeded: bool

    @property
    def violated(self) -> bool:
        """The runs contradict the claim (wrongly with probability at most 1 - confidence)."""
        return self.lower.epsilon > self.claimed.epsilon or self.curve.broken

    @property
    def verdict(self) -> str:
        """One line for people."""
        if self.violated:
            return "VIOLATION: the audited client is less private than claimed"
        return f"no violation found. {PROVES_NOTHING}"

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {
            "verdict": "violation" if self.violated else "no violation found",
            "note": PROVES_NOTHING,
            "epsilon_lower": self.lower.epsilon,
            "confidence": self.confidence,
            "claimed": self.claimed.to_dict(),
            "curve": {
                "epsilon": self.curve.epsilon,
                "delta_lower": self.curve.delta_lower,
                "claimed_delta": self.curve.claimed_delta,
                "broken": self.curve.broken,
            },
            "samples": self.samples,
            "rounds": self.rounds,
            "audited_dimension": self.release.dimension,
            "seeded": self.seeded,
            "release": self.release.to_dict(),
        }


def audit(
    release: Release,
    *,
    rounds: int = 1,
    samples: int,
    delta: float,
    confidence: float = 0.99,
    rng: NoiseSource,
    inputs: Inputs | None = None,
    encode: Encode | None = None,
) -> AuditResult:
    """Audit `rounds` rounds of `release` with `samples` runs with the record and as many without.

    By default the real encoder is run on the accountant's worst-case inputs. Give `inputs` (see `canary_inputs`) to
    audit what a client does before the encoder, and `encode` to audit another encoder; the claim stays that of the
    release. The highest epsilon that n runs can show is about log(n / 12): a low figure may only mean few runs.

    Raises:
        InvalidParameter: too few runs, a confidence outside (0, 1), inputs of another dimension.
    """
    check_int("samples", samples, 4, 2**31)
    check_int("rounds", rounds, 1, 2**31)
    if not 0 < confidence < 1:
        raise InvalidParameter(f"confidence must lie strictly between 0 and 1, got {confidence}")
    pair = worst_case_inputs(release) if inputs is None else inputs
    if pair.without.size != release.dimension:
        raise InvalidParameter(f"inputs have {pair.without.size} coordinates, the release has {release.dimension}")

    def real(values: npt.NDArray[np.float64], *, rng: NoiseSource) -> npt.NDArray[np.unsignedinteger]:
        return encoder.encode(values, release.mechanism, range=1.0, rng=rng, clamp=True)

    accountant = Accountant().compose(release, rounds)
    claimed = accountant.guarantee(delta=delta)
    with_record, without = (
        scores(
            pair,
            release.mechanism,
            encode=real if encode is None else encode,
            rate=release.sampling.rate,
            rounds=rounds,
            samples=samples,
            present=present,
            rng=rng,
        )
        for present in (True, False)
    )
    points = {x: accountant.delta(x) for x in {min(claimed.epsilon, 50.0) * share for share in CURVE_FRACTIONS}}
    each = 1 - (1 - confidence) / 2
    return AuditResult(
        release=release,
        rounds=rounds,
        samples=samples,
        confidence=confidence,
        lower=epsilon_lower_bound(with_record, without, delta=delta, confidence=each),
        curve=check_curve(with_record, without, claimed=points, confidence=each),
        claimed=claimed,
        seeded=rng.seeded,
    )
