"""The ledger: what one client has spent of its privacy budget, recorded durably before each message leaves."""

from bqsgd.errors import LedgerError
from bqsgd.ledger._budget import PrivacyBudget
from bqsgd.ledger.ledger import Ledger
from bqsgd.ledger.register import Register

__all__ = ["Ledger", "LedgerError", "PrivacyBudget", "Register"]
