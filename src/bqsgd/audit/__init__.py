"""An empirical lower bound on epsilon from the real encoder. Passing proves nothing; failing proves a fault."""

from bqsgd.audit.bound import LowerBound, epsilon_lower_bound
from bqsgd.audit.inputs import Inputs, canary_inputs, worst_case_inputs
from bqsgd.audit.run import AuditResult, audit

__all__ = ["AuditResult", "Inputs", "LowerBound", "audit", "canary_inputs", "epsilon_lower_bound", "worst_case_inputs"]
