"""Google's `dp_accounting`: our messages in its accountants, and its events in our ledger."""

from bqsgd._src.integrations.dp_accounting import (
    PLDAccountant,
    ReleaseDpEvent,
    outside_release,
    privacy_loss_distribution,
)

__all__ = ["PLDAccountant", "ReleaseDpEvent", "outside_release", "privacy_loss_distribution"]
