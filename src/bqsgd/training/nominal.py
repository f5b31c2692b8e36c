"""The paper's nominal epsilon of a run, to be shown beside the exact one: as published; not a guarantee."""

from __future__ import annotations

from collections.abc import Callable

from bqsgd.errors import BqsgdError
from bqsgd.privacy.nominal import NominalPrivacy, NominalSetting
from bqsgd.release import Scheme, Unit
from bqsgd.training.config import Config
from bqsgd.training.plans import Situation, release_in


def nominal_epsilon_after(config: Config, situation: Situation) -> Callable[[int], float | None]:
    """rounds -> Theorem 1's total of client 0, or None where the paper's formulas do not speak of such a run.

    They assume a per-coordinate clip at the encoder's range, samples as the unit, and one budget throughout.
    """
    spoken_of = config.clip in ("clamp", "scale", "batch-mean") and config.encoder_range == config.clip_bound
    if not spoken_of or situation.unit is not Unit.SAMPLE or situation.scheme is Scheme.FULL or config.budgets:
        return lambda rounds: None
    try:
        mechanism = release_in(config, situation, client=0, round=0).mechanism
    except BqsgdError:
        return lambda rounds: None
    if mechanism.trials == 0:
        return lambda rounds: None
    setting = NominalSetting(
        dimension=situation.dimension,
        batch_size=situation.batch_size,
        dataset_size=situation.dataset_size,
        delta=config.delta,
    )
    return lambda rounds: NominalPrivacy.of(mechanism, setting, rounds=rounds).epsilon_total
