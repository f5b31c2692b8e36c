"""An empirical lower bound on epsilon, measured on the real code. Passing proves nothing; failing proves a fault.

A source of observations runs two worlds that differ in one record. It runs the encoder alone (`EncoderRuns`), clients
from their data to their frames (`ClientRuns`, which imports torch on first use), or secure sums (`audit.sums`). `audit`
compares what it observes with a claim.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bqsgd._src.audit.bound import AuditResult, LowerBound, Source, audit, epsilon_lower_bound
from bqsgd._src.audit.encoder import EncoderRuns, Inputs, canary_inputs, worst_case_inputs

if TYPE_CHECKING:
    from bqsgd._src.audit.client import ClientRuns, Neighbours, canary_runs

__all__ = [
    "AuditResult",
    "ClientRuns",
    "EncoderRuns",
    "Inputs",
    "LowerBound",
    "Neighbours",
    "Source",
    "audit",
    "canary_inputs",
    "canary_runs",
    "epsilon_lower_bound",
    "worst_case_inputs",
]


def __getattr__(name: str) -> Any:
    if name in ("ClientRuns", "Neighbours", "canary_runs"):
        from bqsgd._src.audit import client

        return getattr(client, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
