"""What the tests of private loops share: a loss, two mechanisms, and a look into a ledger."""

from torch import nn

import bqsgd

LOSS = nn.CrossEntropyLoss(reduction="none")
QUIET = bqsgd.Mechanism(levels=1, trials=2000)
EXACT = bqsgd.Mechanism(levels=1000, trials=0)
"""Without noise: what is left is the rounding to a thousandth of the range."""


def recorded(path):
    """Rounds that the ledger file counts, once it is closed."""
    with bqsgd.Ledger(path) as ledger:
        return ledger.spent_rounds
