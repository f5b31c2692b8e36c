"""A study: a plan that outlasts a process, kept in a file beside the ledger that counts its messages.

In a federation a site often trains a few steps at a time, each time in a new process. If every process planned anew,
the first would plan the whole budget away, and the next would be left with almost none. A study is planned once, for
all its steps. Whoever opens it later, with the same settings, continues with the same noise at the step that the ledger
has not counted yet. The ledger stays the authority on what is spent: a study file that was changed can waste budget,
and cannot exceed it.
"""

from __future__ import annotations

import glob
import json
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

from bqsgd._src.errors import BudgetExhausted, InvalidParameter, LedgerError
from bqsgd._src.ledger import Ledger
from bqsgd._src.params import check_positive, short_repr
from bqsgd._src.planner.plan import Budget, Plan
from bqsgd._src.release import Terms
from bqsgd._src.storage import read_regular, write_atomic

_FORMAT = "bqsgd.study.v1"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_LIMIT = 1 << 16
"""Bytes of a study file; a plan takes about two thousand."""


class Study:
    """The plan of one study at one site.

    Args:
        ledger: the site's ledger; the study file lies beside it.
        name: of the study: 1 to 64 letters, digits and . _ -.

    Raises:
        InvalidParameter: the name is not a name, or the file is not a study.
        LedgerError: the ledger has counted steps of this study, but the study file is missing.
    """

    def __init__(self, ledger: Ledger, name: str) -> None:
        self.name, self.run = safe_name("study", name), f"study-{name}"
        self.path = ledger.path.with_name(f"{ledger.path.name}.{name}.study.json")
        self.taken = max(ledger.recorded(self.run), default=-1) + 1
        """Steps that the ledger has counted, by earlier processes."""
        self.plan: Plan | None = None
        self.range = 0.0
        self._read()
        if self.plan is None and self.taken:
            raise LedgerError(
                f"{ledger.path} has counted {self.taken} steps of the study {name!r}, but its plan, {self.path.name}, "
                "is missing: restore it from a backup. Another study has to plan for what is left of the budget"
            )

    def _read(self) -> None:
        try:
            content = read_regular(self.path, limit=_LIMIT)
            if content is None:
                return
            stored = json.loads(content)
            if stored["format"] != _FORMAT:
                raise InvalidParameter(f"its format is not {_FORMAT}")
            self.plan, self.range = Plan.from_dict(stored["plan"]), check_positive("range", stored["range"])
        except (KeyError, TypeError, ValueError, RecursionError, InvalidParameter) as error:
            raise InvalidParameter(f"{self.path} is not a study ({error}); restore it from a backup") from error

    def keep(self, plan: Plan, *, range: float) -> None:
        """Write the plan; from now on it is the study's. Nothing may be sent before this returns."""
        stored = {"format": _FORMAT, "study": self.name, "range": range, "plan": plan.to_dict()}
        write_atomic(self.path, json.dumps(stored, indent=1).encode())
        self.plan, self.range = plan, range

    def check_same(self, *, budget: Budget, rounds: int, terms: Terms) -> None:
        """Raise InvalidParameter, which says what differs, unless the study was planned for these settings."""
        assert self.plan is not None
        differing = differences(self.plan, budget=budget, rounds=rounds, terms=terms)
        if differing:
            raise InvalidParameter(
                f"the study {self.name!r} was planned with other settings ({self.path}): {'; '.join(differing)}. Give "
                "it the same settings, or give other settings another study, which gets what is left of the budget"
            )

    def check_left(self, step: int) -> None:
        """Raise BudgetExhausted if all planned steps have been taken."""
        assert self.plan is not None
        if step >= self.plan.rounds:
            raise BudgetExhausted(f"the study {self.name!r} was planned for {self.plan.rounds} steps; all are taken")


def safe_name(what: str, name: object) -> str:
    """A name that is safe as part of a file name."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidParameter(
            f"{what} must be 1 to 64 of A-Z a-z 0-9 . _ - and begin with a letter or digit, got {short_repr(name)}"
        )
    return name


def check_not_lost(ledger: Path) -> None:
    """Raise LedgerError if a ledger that is to be made new has left studies behind: its budget would be fresh again."""
    if any(ledger.parent.glob(f"{glob.escape(ledger.name)}.*.study.json")):
        raise LedgerError(
            f"{ledger} is missing, but plans of studies lie beside it: restore the ledger from a backup. A fresh one "
            "is right only for other data, under another name"
        )


def differences(plan: Plan, *, budget: Budget, rounds: int, terms: Terms) -> list[str]:
    """What differs between a plan and other settings, in words."""
    steps = [] if plan.rounds == rounds else [f"{plan.rounds} steps in all then, {rounds} now"]
    return [*_changed_fields(plan.budget, budget), *steps, *_changed_fields(plan.release.terms, terms)]


def _changed_fields(then: Budget | Terms, now: Budget | Terms) -> Iterator[str]:
    for name in (field.name for field in fields(then)):
        if getattr(then, name) != getattr(now, name):
            yield f"{name} {getattr(then, name)} then, {getattr(now, name)} now"
