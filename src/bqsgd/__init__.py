"""bqsgd: private, compressed distributed learning.

Ask first, without data: `account` and `plan`. Train with a loop of your own: `make_private`. Train across clients:
`Task`, `Config`, `Run` and `train`. The parts: `Mechanism`, `Guarantee`, `Ledger`, `encode_frame`, `decode_frame`.

>>> import bqsgd
>>> bqsgd.Mechanism(levels=2, trials=251).bits_per_coordinate
8.0

Every name is loaded when it is first used: importing bqsgd loads neither torch nor Flower.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bqsgd.answers import account, plan, plan_secure
    from bqsgd.codec import decode_frame, encode_frame
    from bqsgd.errors import BudgetExhausted
    from bqsgd.ledger import Ledger
    from bqsgd.noise import privacy_rng
    from bqsgd.params import Mechanism
    from bqsgd.privacy.guarantee import Guarantee
    from bqsgd.private import make_private
    from bqsgd.run import Run, train
    from bqsgd.training.settings import Config
    from bqsgd.training.task import Task

__version__ = "0.2.0"
__all__ = [
    "BudgetExhausted",
    "Config",
    "Guarantee",
    "Ledger",
    "Mechanism",
    "Run",
    "Task",
    "account",
    "decode_frame",
    "encode_frame",
    "make_private",
    "plan",
    "plan_secure",
    "privacy_rng",
    "train",
]

_HOMES = {
    "BudgetExhausted": "bqsgd.errors",
    "Config": "bqsgd.training.settings",
    "Guarantee": "bqsgd.privacy.guarantee",
    "Ledger": "bqsgd.ledger",
    "Mechanism": "bqsgd.params",
    "Run": "bqsgd.run",
    "Task": "bqsgd.training.task",
    "account": "bqsgd.answers",
    "decode_frame": "bqsgd.codec",
    "encode_frame": "bqsgd.codec",
    "make_private": "bqsgd.private",
    "plan": "bqsgd.answers",
    "plan_secure": "bqsgd.answers",
    "privacy_rng": "bqsgd.noise",
    "train": "bqsgd.run",
}
"""Name -> the module it is loaded from."""


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(importlib.import_module(home), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
