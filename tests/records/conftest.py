"""A synthetic run folder for the tests of this folder."""

from synthetic_run import stated_guarantee, synthetic_run

__all__ = ["stated_guarantee", "synthetic_run"]
