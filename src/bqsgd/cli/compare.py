"""`bqsgd compare`: BQ-SGD beside plain SGD, QSGD, cpSGD and Gaussian DP-SGD on the same axes."""

from __future__ import annotations

from bqsgd.cli.output import Json
from bqsgd.cli.reproduce import Finished, Quick, Seeds, Workers, gather


def compare(
    quick: Quick = False, seeds: Seeds = 3, workers: Workers = 1, finished_only: Finished = False, json: Json = False
) -> None:
    """Accuracy, exact epsilon and measured bytes of BQ-SGD and its baselines on MNIST: one table, one figure.

    Example: bqsgd compare --seeds 1
    """
    gather(("compare",), quick=quick, seeds=seeds, workers=workers, train=not finished_only, json=json)
