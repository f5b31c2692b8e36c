"""Private estimators for tables, with scikit-learn's interface: they work in pipelines, and every fit spends."""

from bqsgd._src.private.tables import PrivateClassifier, PrivateRegressor

__all__ = ["PrivateClassifier", "PrivateRegressor"]
