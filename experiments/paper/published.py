"""The paper's Tables 1 to 3 as printed, with those rows marked that its own formulas contradict. The only copy."""

from __future__ import annotations

from dataclasses import dataclass

from bqsgd._src.paper.nominal import NominalSetting
from bqsgd._src.params import Mechanism
from bqsgd._src.planner.plan import Budget


@dataclass(frozen=True, kw_only=True)
class PublishedSetting:
    """One column of Table 1. nominal_dimension is the d_P of its footnote, not the number of parameters."""

    dataset: str
    model: str
    nominal_dimension: int
    clip: float
    learning_rate: float
    batch_size: int
    clients: int
    dataset_size: int
    rounds: int
    delta: float = 1e-4

    @property
    def nominal(self) -> NominalSetting:
        """What Lemma 1 needs of this column."""
        return NominalSetting(
            dimension=self.nominal_dimension,
            batch_size=self.batch_size,
            dataset_size=self.dataset_size,
            delta=self.delta,
        )


MNIST = PublishedSetting(
    dataset="MNIST",
    model="LeNet-5",
    nominal_dimension=3_000,
    clip=0.0015,
    learning_rate=0.006,
    batch_size=32,
    clients=4,
    dataset_size=15_000,
    rounds=1000,
)
FASHION_MNIST = PublishedSetting(
    dataset="Fashion-MNIST",
    model="AlexNet",
    nominal_dimension=30_000,
    clip=0.003,
    learning_rate=0.006,
    batch_size=32,
    clients=4,
    dataset_size=15_000,
    rounds=3000,
)


@dataclass(frozen=True)
class PublishedRow:
    """One row of Tables 2 and 3: the budget, the (s, m) printed, the (s, m) that the budget means, the accuracy.

    correction: what the printed budget means, where the printed (s, m) contradict it; None where they do not. note says
    how, also for rows that are only rounded differently. accuracy is in per cent.
    """

    tables: tuple[int, ...]
    setting: PublishedSetting
    bits: int
    epsilon: float
    printed: Mechanism
    accuracy: float
    correction: Mechanism | None = None
    note: str | None = None

    @property
    def misprint(self) -> bool:
        """Whether the printed (s, m) contradict the printed budget."""
        return self.correction is not None

    @property
    def corrected(self) -> Mechanism:
        """The (s, m) that the budget means."""
        return self.correction or self.printed

    @property
    def budget(self) -> Budget:
        """The row's constraints."""
        return Budget(bits=self.bits, epsilon=self.epsilon, delta=self.setting.delta)


def _bq(levels: int, trials: int) -> Mechanism:
    """The mechanism of these s and m."""
    return Mechanism(levels=levels, trials=trials)


ROWS: tuple[PublishedRow, ...] = (
    PublishedRow((2,), MNIST, 8, 1.72, _bq(1, 251), 94.20, note="Eqs. 19 and 20 give (1, 253); both print as 1.72"),
    PublishedRow((2, 3), MNIST, 8, 3.44, _bq(2, 251), 96.73),
    PublishedRow(
        (2,), MNIST, 8, 8.72, _bq(4, 247), 97.38, _bq(5, 245), note="(4, 247) has nominal epsilon 6.95, not 8.72"
    ),
    PublishedRow(
        (3,), MNIST, 10, 3.44, _bq(4, 1050), 96.91, _bq(4, 1015), note="(4, 1050) needs 1059 codes, above 2^10"
    ),
    PublishedRow(
        (3,),
        MNIST,
        12,
        3.44,
        _bq(6, 4079),
        96.99,
        _bq(8, 4079),
        note="(6, 4079) has nominal epsilon 2.57, not 3.44",
    ),
    PublishedRow((2,), FASHION_MNIST, 10, 86.22, _bq(10, 1003), 79.11),
    PublishedRow((2, 3), FASHION_MNIST, 10, 112.42, _bq(13, 997), 84.16),
    PublishedRow((2,), FASHION_MNIST, 10, 138.79, _bq(16, 991), 87.02),
    PublishedRow((3,), FASHION_MNIST, 12, 112.42, _bq(26, 4043), 84.71),
    PublishedRow(
        (3,),
        FASHION_MNIST,
        14,
        112.42,
        _bq(52, 16279),
        85.02,
        note="s = 52.53 was rounded down; the nearest is (53, 16277)",
    ),
)
