"""The recipe: defaults for the rounds, batch size, sampling rate, range and learning rate that the user leaves open.

`bqsgd train`, `Task.config`, `bqsgd plan` and the Flower template all ask here, so that the same data get the same
settings everywhere. A recipe is a starting point without a guarantee; the plan that is made from it has one.

Key: N samples of all K clients, d coordinates of a message, L the batch size that a client divides by, q the sampling
rate, T messages of a client, C the clip norm, mu the total shift that the budget allows (`total_shift`).

The ratio of noise to signal of a run with T rounds (`settings.outlook`) is sqrt(d K) / (mu N) * sqrt(x / log(1 + x)),
x = mu^2 / (q^2 T). A larger rate lowers it, with less and less effect, and costs work. So the recipe takes the smallest
rate that either wastes little of the budget or leaves little noise, and at which all clients together draw at least
about a thousand samples per round. L is a client's batch on average, the range is twice the noise of a message (wider
or narrower made no difference: docs/frontier.md), and the learning rate gets smaller as the noise grows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from bqsgd._src.errors import InvalidParameter
from bqsgd._src.ledger import PrivacyBudget
from bqsgd._src.params import check_int
from bqsgd._src.planner.plan import Budget
from bqsgd._src.planner.search import shift_per_round, total_shift

_AnyBudget = Budget | PrivacyBudget
CLIENTS = 4
ROUNDS = 300
"""Twice as many made no difference; half as many cost about as much as a change of seed (docs/frontier.md)."""
CLIP_NORM, CLIP_BOUND = 0.5, 0.1
"""The dual clip: bounds on the Euclidean norm of a sample's gradient, and on the magnitude of its coordinates."""
BATCH_SIZE, LEARNING_RATE = 512, 0.5
"""For settings without data, and for batches that are not Poisson samples: then there is nothing to fit to."""
_FEW_SAMPLES, _ROUNDS_OF_FEW = 10_000, 60
"""Data sets with fewer samples in all are learnt in fewer rounds, at LEARNING_RATE; chosen on the data set `digits`."""
_WASTE = 0.7
"""x at which sqrt(x / log(1 + x)) is 1.15: a seventh of the noise could be saved, at more than twice the work."""
_LITTLE_NOISE = 0.01
"""A noise to signal that is not worth more work."""
_LEAST_DRAWN = 1024
"""Samples that all clients together draw in a round, at least."""
_LARGEST_STEP, _STEP_TIMES_NOISE = 2.0, 0.018
"""The largest learning rate, and its product with the noise to signal if there is more noise; chosen on samples held
out of MNIST's training data, with 4 and with 100 clients."""
_RANGE_TO_NOISE = 2.0
_ROUNDS_PER_SHARE = 100
"""Messages with noises of their own, over a whole run, for each coordinate that a kept one stands for."""
_MUCH_NOISE = 0.005
"""A noise to signal from which on the gradient is lost in the noise of a round; below, less is left out."""
_MOST_ONE_IN, _FEWEST_KEPT = 100, 1000
"""Fewer coordinates than this are not worth leaving out: headers and keys then weigh more than they do."""


def rounds_for(samples: int) -> int:
    """How many rounds to train, for this many samples of all clients together."""
    return _ROUNDS_OF_FEW if samples < _FEW_SAMPLES else ROUNDS


@dataclass(frozen=True, kw_only=True)
class Federation:
    """What the recipe depends on; all of it is public.

    samples: of all clients together. dimension: coordinates of a message. cohort: how many clients a round asks (None:
    all). sums: secure sums of a round, whose clients share one noise each; 0 if each client adds its own noise.
    """

    samples: int
    clients: int
    dimension: int
    cohort: int | None = None
    sums: int = 0

    def __post_init__(self) -> None:
        check_int("dimension", self.dimension, 1, 2**53)
        check_int("samples", self.samples, 1, 2**53)
        if not 1 <= self.clients <= self.samples:
            raise InvalidParameter(
                f"clients={self.clients} for {self.samples} samples in all: every client needs a sample; use at most "
                f"{self.samples} clients"
            )

    @property
    def samples_per_client(self) -> float:
        """N / K."""
        return self.samples / self.clients

    def least_noise(self, budget: _AnyBudget) -> float:
        """The noise to signal of a run that wastes nothing of the budget (x = 0)."""
        noises = self.sums or self.clients
        return math.sqrt(self.dimension * noises) / (total_shift(budget) * self.samples)

    def batch_size(self, budget: _AnyBudget, *, messages: int) -> int:
        """L for Poisson batches, if every client sends this many messages."""
        # The larger x is, the smaller the rate: waste up to _WASTE, or more if little noise is left all the same.
        largest_waste = max(_WASTE, _excess(_LITTLE_NOISE / self.least_noise(budget)))
        rate = total_shift(budget) / math.sqrt(messages * largest_waste)
        least_rate = _LEAST_DRAWN / self.samples * self.clients / (self.cohort or self.clients)
        return max(1, round(min(1.0, max(rate, least_rate)) * self.samples_per_client))

    def check_batch_size(self, batch_size: int) -> None:
        """Raise InvalidParameter if clients hold fewer samples than this on average."""
        if batch_size > math.ceil(self.samples_per_client):
            most = math.floor(self.samples_per_client)
            raise InvalidParameter(
                f"batch_size={batch_size} is more than the {most} samples that each of {self.clients} clients holds on "
                f"average; use --batch-size {most} or fewer clients"
            )

    def rate(self, batch_size: int) -> float:
        """The q at which a client draws L samples on average."""
        return min(1.0, batch_size / self.samples_per_client)

    def one_in(self, budget: _AnyBudget, *, rounds: int) -> int:
        """N: a message carries one in N coordinates, 1 if leaving out coordinates does not pay.

        What is left out adds the variance (N - 1) |S|^2 to noise of energy E in a client's message, S being its mean
        gradient. Training makes S smaller until it is about as long as the noise that is left of all n T messages:
        |S|^2 was 3 to 6 times E / (n T) in runs on MNIST. N = 1 + n T / 100 therefore adds a few percent. With little
        noise a run ends before S is that small, so N shrinks in proportion.
        """
        if self.samples < _FEW_SAMPLES:
            return 1
        messages = rounds * (self.sums or self.cohort or self.clients)
        fitting = 1 + messages / _ROUNDS_PER_SHARE * min(1.0, self.least_noise(budget) / _MUCH_NOISE)
        return max(1, min(int(fitting), _MOST_ONE_IN, self.dimension // _FEWEST_KEPT))

    def learning_rate(self, budget: _AnyBudget) -> float:
        """The server's first learning rate, for the default clip."""
        if self.samples < _FEW_SAMPLES:
            return LEARNING_RATE
        # Two digits, as for the range below: people read these settings, and more digits would not train better.
        return float(f"{min(_LARGEST_STEP, _STEP_TIMES_NOISE / self.least_noise(budget)):.2g}")


def fitting_range(budget: _AnyBudget, *, clip_norm: float, batch_size: int, rate: float, messages: int) -> float:
    """The range for batch means of a client that sends this many messages, its samples drawn at `rate` and clipped."""
    return range_for_noise(clip_norm / batch_size / shift_per_round(budget, rate=rate, rounds=messages))


def range_for_noise(deviation: float) -> float:
    """The range for a client that adds noise of this standard deviation to a coordinate."""
    return float(f"{_RANGE_TO_NOISE * deviation:.2g}")


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """Settings of a run with the dual clip and Poisson batches, some of them proposed by the recipe."""

    clients: int
    batch_size: int
    rounds: int
    clip_norm: float
    clip_bound: float
    range: float
    one_in: int

    @property
    def l2(self) -> float:
        """The most that one sample can move the vector of a message, as a fraction of the range."""
        return self.clip_norm / (self.batch_size * self.range) / math.sqrt(self.one_in)

    @property
    def linf(self) -> float:
        """The most that one sample can move a coordinate, as a fraction of the range."""
        return min(self.clip_norm, self.clip_bound) / (self.batch_size * self.range) / math.sqrt(self.one_in)


def propose(
    budget: _AnyBudget, federation: Federation, *, batch_size: int | None = None, rounds: int | None = None
) -> Proposal:
    """The settings that `bqsgd train` would use with this budget; a `batch_size` or `rounds` that you pass is kept."""
    rounds = rounds_for(federation.samples) if rounds is None else check_int("rounds", rounds, 1, 2**53)
    if batch_size is None:
        batch_size = federation.batch_size(budget, messages=rounds)
    federation.check_batch_size(check_int("batch_size", batch_size, 1, 2**53))
    rate, one_in = federation.rate(batch_size), federation.one_in(budget, rounds=rounds)
    kept = 1 / math.sqrt(one_in)  # how much of the clip is left for what a message carries
    if federation.sums:
        range = min(CLIP_NORM, CLIP_BOUND) * kept  # the clip's: the modulus of sums follows what was released
    else:
        range = fitting_range(budget, clip_norm=CLIP_NORM * kept, batch_size=batch_size, rate=rate, messages=rounds)
    return Proposal(
        clients=federation.clients,
        batch_size=batch_size,
        rounds=rounds,
        clip_norm=CLIP_NORM,
        clip_bound=CLIP_BOUND,
        range=range,
        one_in=one_in,
    )


def _excess(factor: float) -> float:
    """The x with sqrt(x / log(1 + x)) = factor; 0 if factor is below 1, the function's least value."""
    from scipy.optimize import brentq  # imported here because it is slow to import

    if factor <= 1:
        return 0.0
    return float(brentq(lambda x: math.sqrt(x / math.log1p(x)) - factor, 1e-9, 1e18)) if factor < 1e6 else 1e18
