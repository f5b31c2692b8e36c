"""The outlook of a run: how much noise it will carry beside how much signal, known from the plans before round 0.

It is computed from the settings and the clients' sizes; no data are read.

Key: d coordinates, T rounds, sigma the standard deviation of the noise in one coordinate of the mean over clients, G
the length of the longest mean of clipped gradients.

The mean of a round carries noise of length sqrt(d) sigma beside a signal of at most G. Over a run, noise adds up like
sqrt(T), and a signal that keeps its direction like T. So the noise to signal of the whole run is at least
sqrt(d / T) sigma / G. What runs learn at a given noise to signal was measured (experiments/assurance/outlook.py, the
table is in docs/training.md): a verdict in words follows from it.

With least squares, d counts the coordinates of the class sums only: they alone make a classifier, without the moments.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import islice

from bqsgd._src.errors import BqsgdError, Infeasible
from bqsgd._src.mechanism.coarsening import noise_to_signal, variance_at_zero
from bqsgd._src.params import Mechanism
from bqsgd._src.planner.recipe import range_for_noise
from bqsgd._src.planner.search import shift_per_round
from bqsgd._src.planner.sums import variance_of_groups
from bqsgd._src.privacy.guarantee import rounded_up
from bqsgd._src.release import Scheme, Unit
from bqsgd._src.settings.client_plan import client_terms, release_in, sum_plans
from bqsgd._src.settings.config import Config

WELL, NOTHING = 0.15, 1.0
"""A run with at most the first noise to signal learns well; one with more than the second learns next to nothing."""
_FEW_ROUNDS = 20
"""The verdict is about noise; its table comes from runs of 60 rounds and more."""
_MOST_SUGGESTIONS = 3
_MOST_EPSILON = 20.0
"""A larger epsilon is not worth suggesting: it protects next to nothing."""
_AIM = 0.7
"""Suggestions aim at this fraction of NOTHING, so that a small difference to the plan does not make them useless."""
_STEPS = range(1, 40)
"""How many values of each setting are tried, from near the present value to far from it."""


class CannotLearn(Infeasible):
    """No client has a plan, or the noise is larger than anything that could be learnt; nothing was spent."""


class Verdict(StrEnum):
    """What a run will learn, in words."""

    WELL = "learns well"
    SOMETHING = "learns something"
    NOTHING = "will not learn"


def verdict_of(noise_to_signal: float) -> Verdict:
    """What runs with this noise to signal have learnt."""
    if noise_to_signal <= WELL:
        return Verdict.WELL
    # Not `>`, which is false for NaN: a run whose outlook cannot be computed must not start.
    return Verdict.SOMETHING if noise_to_signal <= NOTHING else Verdict.NOTHING


def figure(value: float) -> str:
    """A length or a ratio to two digits, large ones in full.

    >>> figure(0.0123), figure(231.7), figure(2.0)
    ('0.012', '232', '2')
    """
    return f"{value:,.0f}" if 100 <= value < 1e9 else f"{value:.2g}"


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """The noise and the signal of the mean of a round, and the number of rounds.

    noise: sigma, of one coordinate. learnt: d. signal: G.

    >>> Forecast(noise=0.1, learnt=100, signal=1.0, rounds=100).verdict
    <Verdict.WELL: 'learns well'>
    """

    noise: float
    learnt: int
    signal: float
    rounds: int

    @property
    def noise_length(self) -> float:
        """The root mean square length of the noise in the mean of a round."""
        return self.noise * math.sqrt(self.learnt)

    @property
    def noise_to_signal(self) -> float:
        """A lower bound on the noise to signal of the whole run."""
        return self.noise_length / self.signal / math.sqrt(self.rounds)

    @property
    def verdict(self) -> Verdict:
        """What the run will learn."""
        return verdict_of(self.noise_to_signal)

    def lines(self) -> Iterator[str]:
        """The figures and the verdict in sentences."""
        yield (
            f"the mean of a round carries noise of {figure(self.noise)} per coordinate, {figure(self.noise_length)} in "
            f"length; the signal is at most {figure(self.signal)} long"
        )
        yield (
            f"over {self.rounds} rounds the noise is {figure(self.noise_to_signal)} times the longest signal: the "
            f"model {self.verdict} (well up to {WELL:g}, next to nothing above {NOTHING:g})"
        )
        if self.rounds < _FEW_ROUNDS and self.verdict is not Verdict.NOTHING:
            yield f"{self.rounds} rounds are few: the model may learn little for want of steps, whatever the noise"


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """How much noise a run will carry beside its signal.

    samples: client -> how many samples it holds. dimension: coordinates of a message. learnt: d, the coordinates that
    the model is learnt from: all of the model, of which a message may carry a subset. noise: sigma, None when no client
    has a plan. without_plan: reason -> clients.
    """

    config: Config
    samples: Mapping[int, int]
    dimension: int
    learnt: int
    noise: float | None = None
    without_plan: Mapping[str, int] = field(default_factory=dict)

    @property
    def together(self) -> int:
        """How many clients a round averages over."""
        return min(len(self.samples), self.config.clients.cohort or len(self.samples))

    @property
    def signal(self) -> float:
        """G: the gradients of an average batch, clipped, all in one direction; then clamped to the range."""
        clip, privacy = self.config.clip, self.config.privacy
        every_coordinate = math.sqrt(self.dimension * self.config.clients.one_in)
        longest = clip.norm if clip.scales else clip.bound * every_coordinate
        # A client divides by L, however many samples it drew, so a smaller batch makes a shorter mean.
        if privacy.unit == Unit.SAMPLE and privacy.scheme is Scheme.POISSON and clip.rule != "batch-mean":
            mean = sum(self.samples.values()) / len(self.samples)
            drawn = mean * min(1.0, privacy.batch_size / mean if privacy.rate is None else privacy.rate)
            longest *= drawn / privacy.batch_size
        return min(longest, self.config.range * every_coordinate)

    @property
    def forecast(self) -> Forecast:
        """What the noise leaves of the signal; the noise is infinite without a plan."""
        noise = math.inf if self.noise is None else self.noise
        return Forecast(noise=noise, learnt=self.learnt, signal=self.signal, rounds=self.config.run.rounds)

    @property
    def hopeless(self) -> bool:
        """Whether nothing can be learnt."""
        return self.forecast.verdict is Verdict.NOTHING

    def lines(self) -> Iterator[str]:
        """Sentences for the user before the first round."""
        for reason, clients in self.without_plan.items():
            yield f"{clients} of {len(self.samples)} clients have no plan and will send nothing: {reason}"
        if self.noise is None:
            return
        yield from self.forecast.lines()
        if self.config.clients.one_in > 1:
            yield (
                f"a message carries one in {self.config.clients.one_in} coordinates of the gradient: beside this noise "
                "the others are not worth their bits"
            )


def foresee(
    config: Config,
    samples: Mapping[int, int],
    *,
    dimension: int,
    learnt: int | None = None,
    weights: Mapping[int, float] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Outlook:
    """Plan for every client, and compute the noise that the mean of the first round will carry.

    learnt: coordinates that the model is learnt from; by default those that the messages stand for. weights: of the
    clients in the mean; by default equal if all clients have one rate, and the numbers of samples otherwise. progress:
    called with the number of plans made and to make.
    """
    if weights is None:
        weights = samples if config.privacy.rate is None else dict.fromkeys(samples, 1.0)
    mechanisms: dict[int, Mechanism] = {}
    reasons: Counter[str] = Counter()
    for done, client in enumerate(samples):
        if progress is not None:
            progress(done, len(samples))
        terms = client_terms(config, dimension=dimension, dataset_size=samples[client])
        try:
            mechanisms[client] = release_in(config, terms, client=client, round=0).mechanism
        except Infeasible as error:
            reasons[str(error)] += 1
    outlook = Outlook(
        config=config,
        samples=samples,
        dimension=dimension,
        learnt=learnt or dimension * config.clients.one_in,
        without_plan=dict(reasons),
    )
    if not mechanisms:
        return outlook
    if config.secure.on:  # the clients of a group share one noise
        variance = variance_of_groups(sum_plans(config, dimension=dimension)) * config.range**2
    else:
        total = sum(weights[client] for client in mechanisms)
        # Once per mechanism: most clients have the same, and with coarsened codes its variance takes long to compute.
        variances = {mechanism: variance_of_message(mechanism) for mechanism in set(mechanisms.values())}
        variance = sum(
            (weights[client] / total * config.range) ** 2 * variances[mechanism]
            for client, mechanism in mechanisms.items()
        )
        variance *= len(samples) / outlook.together  # a cohort averages over fewer clients
    # A kept coordinate is multiplied by one_in, and one in one_in is kept.
    variance *= config.clients.one_in
    return replace(outlook, noise=math.sqrt(variance))


def variance_of_message(mechanism: Mechanism) -> float:
    """The variance of the noise, in squared ranges; if codes are coarsened, relative to the signal that is left."""
    if mechanism.coarsening is None:
        return variance_at_zero(mechanism) / mechanism.levels**2
    return noise_to_signal(mechanism)


def check_outlook(outlook: Outlook) -> None:
    """Raise if nothing can be learnt; the message names the nearest settings that learn something.

    Raises:
        CannotLearn: nothing was spent.
    """
    if not outlook.hopeless:
        return
    nearest = [
        " ".join(f"--{name.replace('_', '-')} {value:g}" for name, value in changes.items())
        for changes in nearest_settings(outlook)
    ]
    if outlook.config.privacy.unit == Unit.CLIENT:
        nearest.append("--unit sample, whose noise is divided by the batch size")
    advice = "Use more data, a smaller model or a larger epsilon."
    if nearest:
        # The reason for no plan names the least epsilon that has one; that much is not enough to learn.
        what = "learn something" if outlook.noise is not None else "have a plan and also learn something"
        advice = f"Settings that {what}: {'; or '.join(nearest)}."
    raise CannotLearn(f"{'; '.join(outlook.lines())}. {advice} --force (in Python force=True) runs it anyway.")


def nearest_settings(outlook: Outlook) -> Iterator[dict[str, float | int]]:
    """Changes of one or two settings that let the run learn, at most three; plans have shown that each works."""
    working = (
        changes
        for changes, run in _candidates(outlook)
        if not foresee(run.config, run.samples, dimension=run.dimension, learnt=run.learnt).hopeless
    )
    return islice(working, _MOST_SUGGESTIONS)


def _candidates(outlook: Outlook) -> Iterator[tuple[dict[str, float | int], Outlook]]:
    """For each setting, the nearest value at which Gaussian noise would leave something to be learnt."""
    if _refits_range(outlook.config):
        yield _changed(outlook, "rounds", outlook.config.run.rounds)  # another range alone may do
    for name, values in _values(outlook).items():
        for value in values:
            try:
                changes, run = _changed(outlook, name, value)
            except BqsgdError:
                break  # the settings contradict each other, and values further away do so too
            if with_gaussian_noise(run).forecast.noise_to_signal <= _AIM * NOTHING:
                yield changes, run
                break


def _values(outlook: Outlook) -> dict[str, list[float | int]]:
    """Values to try for each setting, the nearest first."""
    config = outlook.config
    batch, rounds, clients = config.privacy.batch_size, config.run.rounds, config.clients.count
    held = sum(outlook.samples.values()) // len(outlook.samples)
    epsilons = [config.privacy.epsilon * 1.25**step for step in _STEPS]
    values: dict[str, list[float | int]] = {
        "batch_size": [min(held, round(batch * 1.5**step)) for step in _STEPS] if batch < held else [],
        "rounds": [max(1, round(rounds / 1.5**step)) for step in _STEPS] if rounds > 1 else [],
        "epsilon": [float(rounded_up(epsilon, 2)) for epsilon in epsilons if epsilon <= _MOST_EPSILON],
    }
    if config.privacy.unit == Unit.CLIENT:  # more clients, each with as many samples as now
        values["clients"] = [min(100_000, clients * 2**step) for step in _STEPS]
    elif clients > 1:  # fewer clients, which share the same samples
        values["clients"] = [max(1, clients // 2**step) for step in _STEPS]
    return values


def _refits_range(config: Config) -> bool:
    """Whether the range was given and depends on the noise, so that other noise asks for another range."""
    return config.clip.range is not None and config.privacy.unit == Unit.SAMPLE and config.clip.scales


def _changed(outlook: Outlook, name: str, value: float | int) -> tuple[dict[str, float | int], Outlook]:
    """The run with another value of one setting, and with a rate and a range that fit it; its noise is not known."""
    config, samples = outlook.config, outlook.samples
    total, count = sum(samples.values()), len(samples)
    changes: dict[str, float | int] = {name: value}
    changed = config.but(**changes)
    if name == "clients":
        sharing = count if config.privacy.unit == Unit.CLIENT else int(value)
        samples = dict.fromkeys(range(int(value)), max(1, total // sharing))
    if config.privacy.rate is not None and name in ("batch_size", "clients"):
        # L follows the average batch of a client: fewer clients hold more samples each, and draw more at the same rate.
        batch = round(changed.privacy.batch_size * (count / len(samples) if name == "clients" else 1))
        changed = changed.but(batch_size=batch, rate=min(1.0, batch * len(samples) / total))
    run = replace(outlook, config=changed, samples=samples)
    if _refits_range(config):
        changes["range"] = range_for_noise(_gaussian_noise(run))
        run = replace(run, config=changed.but(range=changes["range"]))
    return changes, run


def with_gaussian_noise(outlook: Outlook) -> Outlook:
    """The outlook if the noise were Gaussian: quick to compute, because nothing is planned, and nearly the same."""
    secure = outlook.config.secure
    noises = secure.groups if secure.on else outlook.together  # the clients of a secure sum share one noise
    # A kept coordinate is multiplied by one_in, and one in one_in is kept.
    noises *= outlook.config.clients.one_in
    return replace(outlook, noise=_gaussian_noise(outlook) * math.sqrt(noises) / outlook.together)


def _gaussian_noise(outlook: Outlook) -> float:
    """The standard deviation of the noise that an average client would add to a coordinate of its message."""
    config, average = outlook.config, round(sum(outlook.samples.values()) / len(outlook.samples))
    terms = client_terms(config, dimension=outlook.dimension, dataset_size=average)
    # In units of the range. A clip without a norm bounds every coordinate, so all of them can move at once.
    linf, l2 = terms.sensitivity.linf, terms.sensitivity.l2
    length = linf * math.sqrt(outlook.dimension) if l2 is None else l2
    budget = config.privacy.budget(client=0, round=0)
    return length * config.range / shift_per_round(budget, rate=terms.sampling.rate, rounds=config.turns)
