"""What the noise leaves to be learnt: known from the plan before round 0, without a look at any data.

Key: d coordinates, T rounds, sigma the deviation of the noise in one coordinate of the mean over clients, G the longest
that the mean of clipped gradients can be.

A round's mean carries noise of length sqrt(d) sigma beside a signal of at most G. Over a run noise adds up like sqrt(T)
and a signal that keeps its direction like T, so sqrt(d / T) sigma / G is the least noise to signal that the run as a
whole can have. Above 1 the noise is longer than the longest signal, and a run learns next to nothing.

Of the moments of least squares the class sums alone make a classifier, so there d counts their coordinates.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from bqsgd._src.errors import BqsgdError, Infeasible
from bqsgd._src.mechanism.coarsening import noise_to_signal, variance_at_zero
from bqsgd._src.params import Mechanism
from bqsgd._src.planner.recipe import range_for_noise
from bqsgd._src.planner.search import shift_per_round
from bqsgd._src.release import Release, Scheme, Unit
from bqsgd._src.settings.client_plan import client_terms, release_in, sum_plan
from bqsgd._src.settings.config import Config

_DROWNED = 1.0
"""Noise to signal of a whole run above which it does not start."""
_NOISY = 0.3
_SUGGESTED = 3
_MOST_EPSILON = 100.0
"""A larger one is not worth suggesting."""
_AIM = 0.7
"""What is suggested aims at this share of _DROWNED, so that it is not refused for a rounding."""
_Progress = Callable[[int, int], None]
"""(plans made, plans to make)."""


class CannotLearn(Infeasible):
    """No client has a plan, or the noise is larger than anything that could be learnt; nothing was spent."""


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """What a run's plans say of its noise.

    dimension: coordinates of a message. learnt: those of them that the model is learnt from at least, d.
    noise, signal: sigma and G; noise is None when no client has a plan. without_plan: reason -> clients.
    """

    clients: int
    dimension: int
    learnt: int
    rounds: int
    noise: float | None
    signal: float
    without_plan: Mapping[str, int]

    @property
    def noise_length(self) -> float:
        """The expected length of the noise in a round's mean (its root mean square); infinite without a plan."""
        return math.inf if self.noise is None else self.noise * math.sqrt(self.learnt)

    @property
    def noise_to_signal(self) -> float:
        """Of the run as a whole, at least."""
        return self.noise_length / self.signal / math.sqrt(self.rounds)

    @property
    def hopeless(self) -> bool:
        """Whether nothing can be learnt."""
        return not self.noise_to_signal <= _DROWNED

    def lines(self) -> Iterator[str]:
        """What a person wants to know before the first round."""
        for reason, clients in self.without_plan.items():
            yield f"{clients} of {self.clients} clients have no plan and will send nothing: {reason}"
        if self.noise is None:
            return
        yield (
            f"the mean of a round carries noise of {self.noise:.2g} per coordinate, {self.noise_length:.2g} in length; "
            f"what a sample adds is at most {self.signal:.2g} long"
        )
        if self.hopeless or self.noise_to_signal > _NOISY:
            yield (
                f"over {self.rounds} rounds the noise is {self.noise_to_signal:.2g} times the longest signal: "
                + ("nothing can be learnt" if self.hopeless else "expect little accuracy")
            )


def foresee(
    config: Config,
    samples: Mapping[int, int],
    *,
    dimension: int,
    learnt: int | None = None,
    weights: Mapping[int, float] | None = None,
    progress: _Progress | None = None,
) -> Outlook:
    """Plan for every client that holds so many samples, and say what noise the mean of the first round will carry.

    learnt: coordinates that the model is learnt from, where they are fewer than those of a message.
    weights: of the clients in the mean; without them equal at one rate for all, and else the number of samples.
    """
    if weights is None:
        weights = samples if config.privacy.rate is None else dict.fromkeys(samples, 1.0)
    releases: dict[int, Release] = {}
    reasons: Counter[str] = Counter()
    for done, client in enumerate(samples):
        if progress is not None:
            progress(done, len(samples))
        terms = client_terms(config, dimension=dimension, dataset_size=samples[client])
        try:
            releases[client] = release_in(config, terms, client=client, round=0)
        except Infeasible as error:
            reasons[str(error)] += 1
    if not releases:
        variance = None
    elif config.secure.on:  # the clients share one noise
        variance = sum_plan(config, dimension=dimension).variance() * config.range**2
    else:
        total = sum(weights[client] for client in releases)
        variances = {mechanism: _variance(mechanism) for mechanism in {r.mechanism for r in releases.values()}}
        variance = sum(
            (weights[client] / total * config.range) ** 2 * variances[release.mechanism]
            for client, release in releases.items()
        )
        variance *= len(samples) / min(len(samples), config.clients.cohort or len(samples))  # a mean over fewer clients
    return Outlook(
        clients=len(samples),
        dimension=dimension,
        learnt=learnt or dimension,
        rounds=config.run.rounds,
        noise=None if variance is None else math.sqrt(variance),
        signal=_longest_signal(config, samples, dimension=dimension),
        without_plan=dict(reasons),
    )


def _variance(mechanism: Mechanism) -> float:
    """Of the noise, in squared ranges; where codes are coarsened, beside the share of the signal that is left."""
    if mechanism.coarsening is None:
        return variance_at_zero(mechanism) / mechanism.levels**2
    return noise_to_signal(mechanism)


def check_outlook(outlook: Outlook, config: Config, samples: Mapping[int, int]) -> None:
    """Raise where nothing can be learnt, naming the nearest settings that work.

    Raises:
        CannotLearn: nothing was spent.
    """
    if not outlook.hopeless:
        return
    nearest = [
        " ".join(f"--{name.replace('_', '-')} {value:g}" for name, value in changes.items())
        for changes in nearest_settings(config, samples, dimension=outlook.dimension, learnt=outlook.learnt)
    ]
    if config.privacy.unit == Unit.CLIENT:
        nearest.append("--unit sample, whose noise is divided by the batch size")
    advice = "Use more data, a smaller model or a larger epsilon."
    if nearest:
        advice = f"Settings that work: {'; or '.join(nearest)}."
    raise CannotLearn(f"{'; '.join(outlook.lines())}. {advice} --force runs it anyway.")


def _longest_signal(config: Config, samples: Mapping[int, int], *, dimension: int) -> float:
    """G: clipped gradients that all point the same way, as many as a batch holds on average; clamped to the range."""
    clip, privacy = config.clip, config.privacy
    every_coordinate = math.sqrt(dimension)
    longest = clip.norm if clip.rule in ("l2", "dual") else clip.bound * every_coordinate
    if privacy.unit == Unit.SAMPLE and privacy.scheme is Scheme.POISSON and clip.rule != "batch-mean":
        mean = sum(samples.values()) / len(samples)
        drawn = mean * min(1.0, privacy.batch_size / mean if privacy.rate is None else privacy.rate)
        longest *= drawn / privacy.batch_size
    return min(longest, config.range * every_coordinate)


def _expected_noise(config: Config, *, samples: int, dimension: int) -> float:
    """The deviation of the noise that a client of so many samples adds to a coordinate, if it were Gaussian."""
    terms = client_terms(config, dimension=dimension, dataset_size=samples)
    moved = terms.sensitivity
    length = (moved.linf * config.range * math.sqrt(dimension)) if moved.l2 is None else moved.l2 * config.range
    budget = config.privacy.budget(client=0, round=0)
    return length / shift_per_round(budget, rate=terms.sampling.rate, rounds=config.turns)


def nearest_settings(
    config: Config, samples: Mapping[int, int], *, dimension: int, learnt: int | None = None
) -> Iterator[dict[str, float | int]]:
    """Changes to one or two settings that would let the run learn, each with a plan to prove it; three at most."""
    suggested = 0
    for changes, changed, held in _changes(config, samples, dimension=dimension, learnt=learnt):
        if suggested < _SUGGESTED and not foresee(changed, held, dimension=dimension, learnt=learnt).hopeless:
            suggested += 1
            yield changes


def _changes(
    config: Config, samples: Mapping[int, int], *, dimension: int, learnt: int | None
) -> Iterator[tuple[dict[str, float | int], Config, Mapping[int, int]]]:
    """Candidates: for each setting the nearest value at which Gaussian noise would leave something to be learnt."""
    total, count = sum(samples.values()), len(samples)
    whole = config.privacy.unit == Unit.CLIENT

    def tries(name: str) -> Iterator[float | int]:
        now = config.flat()[name]
        for step in range(1, 40):
            if name == "epsilon":
                if now * 1.25**step <= _MOST_EPSILON:
                    yield float(f"{now * 1.25**step:.2g}")
            elif name == "batch_size" and now < total // count:
                yield min(total // count, round(now * 1.5**step))
            elif name == "rounds" and now > 1:
                yield max(1, round(now / 1.5**step))
            elif name == "clients" and (whole or now > 1):
                yield min(100_000, now * 2**step) if whole else max(1, now // 2**step)

    def changed(name: str, value: float | int) -> tuple[dict[str, float | int], Config, Mapping[int, int]]:
        held = samples
        if name == "clients":
            held = dict.fromkeys(range(int(value)), max(1, total // (count if whole else int(value))))
        changes: dict[str, float | int] = {name: value}
        new = config.but(**changes)
        if config.privacy.rate is not None and name in ("batch_size", "clients"):
            batch = new.privacy.batch_size * (count / len(held) if name == "clients" else 1)
            new = new.but(batch_size=round(batch), rate=min(1.0, round(batch) * len(held) / total))
        if config.clip.range is not None and not whole and config.clip.rule in ("l2", "dual"):
            changes["range"] = range_for_noise(
                _expected_noise(new, samples=sum(held.values()) // len(held), dimension=dimension)
            )
            new = new.but(range=changes["range"])
        return changes, new, held

    if config.clip.range is not None and not whole and config.clip.rule in ("l2", "dual"):
        yield changed("rounds", config.run.rounds)
    for name in ("batch_size", "rounds", "epsilon", "clients"):
        for value in tries(name):
            try:
                candidate = changed(name, value)
            except BqsgdError:
                break
            expected = _expected_outlook(candidate[1], candidate[2], dimension=dimension, learnt=learnt)
            if expected.noise_to_signal <= _AIM * _DROWNED:
                yield candidate
                break


def _expected_outlook(
    config: Config, samples: Mapping[int, int], *, dimension: int, learnt: int | None = None
) -> Outlook:
    """The outlook with Gaussian noise for the mechanism's: in no time, and nearly the same."""
    noise = _expected_noise(config, samples=round(sum(samples.values()) / len(samples)), dimension=dimension)
    together = min(len(samples), config.clients.cohort or len(samples))
    return Outlook(
        clients=len(samples),
        dimension=dimension,
        learnt=learnt or dimension,
        rounds=config.run.rounds,
        noise=noise / (together if config.secure.on else math.sqrt(together)),
        signal=_longest_signal(config, samples, dimension=dimension),
        without_plan={},
    )
