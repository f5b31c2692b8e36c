"""bqsgd: private, compressed distributed learning.

Ask first, without data: `account` and `plan`. Train with a loop of your own: `make_private`. Train across clients:
`Task`, `Config`, `Run` and `train`. The parts: `Mechanism`, `encode_frame`, `decode_frame`, `Guarantee`, `Ledger`.

>>> import bqsgd
>>> bqsgd.Mechanism(levels=2, trials=251).bits_per_coordinate
8.0

The public API is the names of this module and of `bqsgd.clips`, `bqsgd.data`, `bqsgd.distributed`, `bqsgd.flower`,
`bqsgd.laws`, `bqsgd.tables` and the modules of `bqsgd.integrations`.
Everything in `bqsgd._src` is internal and may change in any release. A name is loaded when it is first used: importing
bqsgd loads neither torch nor Flower.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from bqsgd._src.errors import (
    AccountingError,
    BqsgdError,
    BudgetExhausted,
    DataUnavailable,
    FolderInUse,
    FrameError,
    Infeasible,
    InvalidParameter,
    LedgerError,
    NonFiniteInput,
    NotWritten,
    OutOfRange,
    SecureSumError,
    UnsafeFile,
)

if TYPE_CHECKING:
    from bqsgd._src.answers import account, plan, plan_secure
    from bqsgd._src.codec import Accumulator, decode_frame, encode_frame
    from bqsgd._src.ledger import Ledger
    from bqsgd._src.noise import privacy_rng, seeded_rng
    from bqsgd._src.params import Mechanism
    from bqsgd._src.planner.plan import Budget, Plan
    from bqsgd._src.planner.search import PlanningTooLong
    from bqsgd._src.planner.statements import AccountAnswer, PlanAnswer, SumPlanAnswer
    from bqsgd._src.privacy.accountant import Accountant
    from bqsgd._src.privacy.guarantee import Guarantee
    from bqsgd._src.private import PoissonLoader, Private, SecureRanks, make_private
    from bqsgd._src.private.gate import UpdateGate, open_update, thin_update
    from bqsgd._src.records.checkpoint import CheckpointError
    from bqsgd._src.records.record import RunFolderError
    from bqsgd._src.release import Release, Terms
    from bqsgd._src.run import Run, train
    from bqsgd._src.settings.config import Config
    from bqsgd._src.settings.outlook import CannotLearn
    from bqsgd._src.settings.sites import SitesAnswer, plan_sites
    from bqsgd._src.tasks.named import NamedTask
    from bqsgd._src.tasks.task import Task

__version__ = "0.2.0.dev0"
__all__ = [
    "AccountAnswer",
    "Accountant",
    "AccountingError",
    "Accumulator",
    "BqsgdError",
    "Budget",
    "BudgetExhausted",
    "CannotLearn",
    "CheckpointError",
    "Config",
    "DataUnavailable",
    "FolderInUse",
    "FrameError",
    "Guarantee",
    "Infeasible",
    "InvalidParameter",
    "Ledger",
    "LedgerError",
    "Mechanism",
    "NamedTask",
    "NonFiniteInput",
    "NotWritten",
    "OutOfRange",
    "Plan",
    "PlanAnswer",
    "PlanningTooLong",
    "PoissonLoader",
    "Private",
    "Release",
    "Run",
    "RunFolderError",
    "SecureRanks",
    "SecureSumError",
    "SitesAnswer",
    "SumPlanAnswer",
    "Task",
    "Terms",
    "UnsafeFile",
    "UpdateGate",
    "account",
    "decode_frame",
    "encode_frame",
    "make_private",
    "open_update",
    "plan",
    "plan_secure",
    "plan_sites",
    "privacy_rng",
    "seeded_rng",
    "thin_update",
    "train",
]

_HOMES = {
    "bqsgd._src.answers": ("account", "plan", "plan_secure"),
    "bqsgd._src.codec": ("Accumulator", "decode_frame", "encode_frame"),
    "bqsgd._src.ledger": ("Ledger",),
    "bqsgd._src.noise": ("privacy_rng", "seeded_rng"),
    "bqsgd._src.params": ("Mechanism",),
    "bqsgd._src.planner.plan": ("Budget", "Plan"),
    "bqsgd._src.planner.search": ("PlanningTooLong",),
    "bqsgd._src.planner.statements": ("AccountAnswer", "PlanAnswer", "SumPlanAnswer"),
    "bqsgd._src.privacy.accountant": ("Accountant",),
    "bqsgd._src.privacy.guarantee": ("Guarantee",),
    "bqsgd._src.private": ("PoissonLoader", "Private", "SecureRanks", "make_private"),
    "bqsgd._src.private.gate": ("UpdateGate", "open_update", "thin_update"),
    "bqsgd._src.records.checkpoint": ("CheckpointError",),
    "bqsgd._src.records.record": ("RunFolderError",),
    "bqsgd._src.release": ("Release", "Terms"),
    "bqsgd._src.run": ("Run", "train"),
    "bqsgd._src.settings.config": ("Config",),
    "bqsgd._src.settings.outlook": ("CannotLearn",),
    "bqsgd._src.settings.sites": ("SitesAnswer", "plan_sites"),
    "bqsgd._src.tasks.named": ("NamedTask",),
    "bqsgd._src.tasks.task": ("Task",),
}
"""Module -> the names that are loaded from it on first use. Errors are cheap, so they are imported above."""
_MODULES = ("clips", "data", "distributed", "flower", "integrations", "laws", "tables")
"""The other public modules; each is imported when it is first used."""


def __getattr__(name: str) -> Any:
    # `import bqsgd` alone makes `bqsgd.data` work, without loading torch for those who do not use it.
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    for home, names in _HOMES.items():
        if name in names:
            # Stored as a global, so that the next access does not come here.
            value = globals()[name] = getattr(importlib.import_module(home), name)
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})
