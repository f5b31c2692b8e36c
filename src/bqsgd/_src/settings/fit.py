"""Settings that fit the data: the recipe (`planner.recipe`) fills in every setting that the user left open."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bqsgd._src.planner.recipe import Federation, fitting_range, rounds_for
from bqsgd._src.release import Scheme, Unit
from bqsgd._src.settings.config import Config
from bqsgd._src.settings.groups import LEAST_SQUARES


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How large the data and the model are.

    samples: of all clients together. dimension: coordinates of a message. parameters: of the model. Both are equal if a
    message holds a gradient; with least squares it holds moments, which are more than the parameters.
    """

    samples: int
    dimension: int
    parameters: int


def fit(settings: Mapping[str, Any], sizes: Sizes) -> Config:
    """The configuration of a run over data of these sizes: `settings` as they are, the recipe for all others.

    Raises:
        InvalidParameter: a setting is invalid or unknown, or clients hold fewer samples than the batch size.
    """
    config = Config.of(**{"rounds": rounds_for(sizes.samples)} | implied(settings) | dict(settings))
    federation = Federation(
        samples=sizes.samples,
        clients=config.clients.count,
        dimension=sizes.dimension,
        cohort=config.clients.cohort,
        sums=config.secure.groups if config.secure.on else 0,
    )
    return config.but(**_fitted(config, federation, settings))


def implied(settings: Mapping[str, Any]) -> dict[str, Any]:
    """What others decide: several groups have a median, and least squares takes one round, of every sample once."""
    if settings.get("method") != LEAST_SQUARES:
        return {} if settings.get("groups", 1) == 1 else {"aggregation": "median"}
    return {"rounds": 1} | ({"rate": 1.0} if settings.get("sampling", "poisson") == "poisson" else {})


def _fitted(config: Config, federation: Federation, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Batch size, rate, range, subset and learning rate, unless they are among `settings`."""
    privacy, clip = config.privacy, config.clip
    # With a rate, the batch size is only a divisor, and may be larger than the data of a client.
    if "batch_size" in settings and privacy.rate is None:
        federation.check_batch_size(privacy.batch_size)
    # The recipe is for Poisson batches of samples; for others only the batch size must not exceed the data.
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
    if privacy.mechanism is not None:
        return fitted  # levels and trials are fixed, and with them the noise that the rest would be fitted to
    if "one_in" not in settings and clip.scales and config.run.method == "sgd":
        fitted["one_in"] = federation.one_in(budget, rounds=config.run.rounds)
    # The modulus of sums follows what was released, so their range need not be narrow; least squares has one round.
    if clip.range is None and clip.scales and (not config.secure.on or config.run.method == LEAST_SQUARES):
        # The clip of a message, and so its noise, shrink with the share of the coordinates that it carries.
        norm = clip.norm / math.sqrt(fitted.get("one_in", config.clients.one_in))
        fitted["range"] = fitting_range(budget, clip_norm=norm, batch_size=batch_size, rate=rate, messages=config.turns)
    if "learning_rate" not in settings:
        fitted["learning_rate"] = federation.learning_rate(budget)
    return fitted
