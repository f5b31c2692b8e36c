"""Settings that fit the data: the recipe (`planner.recipe`) for every setting that was not given."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bqsgd._src.planner.recipe import Federation, fitting_range, rounds_for
from bqsgd._src.release import Scheme, Unit
from bqsgd._src.settings.config import LEAST_SQUARES, Config


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How large the data and the model are.

    samples: of all clients together. dimension: coordinates of a message. parameters: of the model, which are fewer
    than the coordinates of a message where the message holds moments (least squares).
    """

    samples: int
    dimension: int
    parameters: int


def fit(settings: Mapping[str, Any], sizes: Sizes) -> Config:
    """The configuration of a run over data of these sizes: `settings` as they are, and the recipe for the rest.

    Raises:
        InvalidParameter: a setting is invalid or unknown, or the batch size is more than a client holds.
    """
    defaults: dict[str, Any] = {"rounds": rounds_for(sizes.samples)}
    if settings.get("method") == LEAST_SQUARES:
        defaults = {"rounds": 1} | ({"rate": 1.0} if settings.get("sampling", "poisson") == "poisson" else {})
    config = Config.of(**defaults | dict(settings))
    federation = Federation(
        samples=sizes.samples,
        clients=config.clients.count,
        dimension=sizes.dimension,
        cohort=config.clients.cohort,
        shares_noise=config.secure.on,
    )
    return config.but(**_fitted(config, federation, settings))


def _fitted(config: Config, federation: Federation, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Batch size, rate, range and learning rate, as far as they are not among `settings`."""
    privacy, clip = config.privacy, config.clip
    if "batch_size" in settings and privacy.rate is None:
        federation.check_batch_size(privacy.batch_size)
    if privacy.unit != Unit.SAMPLE or privacy.scheme is not Scheme.POISSON:
        most = math.floor(federation.samples_per_client)
        return {} if "batch_size" in settings else {"batch_size": min(privacy.batch_size, most)}
    budget = privacy.budget(client=0, round=0)
    batch_size, rate = privacy.batch_size, privacy.rate
    if "batch_size" not in settings:
        if rate is None:
            batch_size = federation.batch_size(budget, messages=config.turns)
        else:
            batch_size = max(1, round(rate * federation.samples_per_client))
    if rate is None:
        rate = federation.rate(batch_size)
    fitted: dict[str, Any] = {"batch_size": batch_size, "rate": rate}
    if privacy.mechanism is not None:  # the noise is fixed, and so is what fits it
        return fitted
    if clip.range is None and clip.rule in ("l2", "dual"):
        fitted["range"] = fitting_range(
            budget, clip_norm=clip.norm, batch_size=batch_size, rate=rate, messages=config.turns
        )
    if "learning_rate" not in settings:
        fitted["learning_rate"] = federation.learning_rate(budget)
    return fitted
