"""The ledger: what one client has spent of its privacy budget, recorded durably before each message leaves."""

from bqsgd._src.errors import LedgerError
from bqsgd._src.ledger._budget import PrivacyBudget
from bqsgd._src.ledger.ledger import Ledger
from bqsgd._src.ledger.register import Register

__all__ = ["Ledger", "LedgerError", "PrivacyBudget", "Register"]
