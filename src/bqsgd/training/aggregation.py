"""Aggregation rules: pure functions from the clients' decoded updates (n, d) to one update (d).

The mean weighs client i by p_i (paper Line 13). The robust rules tolerate clients that send whatever they like; they
count each client once (a weight would be one more thing to lie about) and need every single update, so they keep n
updates in memory and exclude secure aggregation. Every rule refuses NaN and infinity.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from bqsgd.errors import InvalidParameter, NonFiniteInput
from bqsgd.params import check_int

_Array = npt.NDArray[np.float64]


def _checked(updates: npt.ArrayLike) -> _Array:
    array = np.asarray(updates, dtype=np.float64)
    if array.ndim != 2 or 0 in array.shape:
        raise InvalidParameter(f"updates must be (clients, dimension), neither of them 0, got {array.shape}")
    if not bool(np.isfinite(array).all()):
        raise NonFiniteInput("updates hold NaN or infinity; refuse that client's frame before aggregating")
    return array


def weighted_mean(updates: npt.ArrayLike, *, weights: Sequence[float] | None = None) -> _Array:
    """sum_i p_i u_i with p_i = weights_i / sum(weights); equal weights when none are given.

    >>> weighted_mean([[0.0], [4.0]], weights=[3, 1]).tolist()
    [1.0]
    """
    array = _checked(updates)
    if weights is None:
        return np.asarray(array.mean(axis=0), dtype=np.float64)
    share = np.asarray(weights, dtype=np.float64)
    if share.shape != (len(array),) or not bool(np.isfinite(share).all()) or share.min() < 0 or share.sum() <= 0:
        raise InvalidParameter(f"weights must be {len(array)} finite numbers >= 0, not all 0, got {list(weights)}")
    return np.asarray((share / share.sum()) @ array, dtype=np.float64)


def median(updates: npt.ArrayLike) -> _Array:
    """Coordinate-wise median; an outlier in fewer than half of the clients moves it only among honest values.

    >>> median([[0.0], [1.0], [1e9]]).tolist()
    [1.0]
    """
    return np.asarray(np.median(_checked(updates), axis=0), dtype=np.float64)


def trimmed_mean(updates: npt.ArrayLike, *, byzantine: int) -> _Array:
    """Coordinate-wise mean without the `byzantine` largest and smallest values; needs n > 2 f.

    >>> trimmed_mean([[0.0], [1.0], [2.0], [3.0], [1e9]], byzantine=1).tolist()
    [2.0]
    """
    array = _checked(updates)
    f = check_int("byzantine", byzantine, 0, 2**31)
    if len(array) <= 2 * f:
        raise InvalidParameter(f"trimmed mean with byzantine={f} needs at least {2 * f + 1} updates, got {len(array)}")
    if f:
        array = np.partition(array, (f, len(array) - f - 1), axis=0)[f : len(array) - f]
    return np.asarray(array.mean(axis=0), dtype=np.float64)


def _krum_scores(array: _Array, f: int) -> _Array:
    """Sum of squared distances to the n - f - 2 nearest others (Blanchard et al. 2017)."""
    n = len(array)
    if n < 2 * f + 3:
        raise InvalidParameter(f"Krum with byzantine={f} needs at least {2 * f + 3} updates, got {n}")
    squared = np.zeros((n, n))
    for i in range(n - 1):  # differences, not the Gram matrix: no cancellation between close updates
        difference = array[i + 1 :] - array[i]
        squared[i, i + 1 :] = squared[i + 1 :, i] = np.einsum("ij,ij->i", difference, difference)
    if not bool(np.isfinite(squared).all()):
        raise NonFiniteInput("updates are so large that their squared distances overflow")
    np.fill_diagonal(squared, np.inf)
    return np.asarray(np.sort(squared, axis=1)[:, : n - f - 2].sum(axis=1), dtype=np.float64)


def krum(updates: npt.ArrayLike, *, byzantine: int) -> _Array:
    """The one update closest to its n - f - 2 nearest others; needs n >= 2 f + 3. The first wins a tie."""
    array = _checked(updates)
    f = check_int("byzantine", byzantine, 0, 2**31)
    return np.array(array[int(np.argmin(_krum_scores(array, f)))])


def multi_krum(updates: npt.ArrayLike, *, byzantine: int, keep: int | None = None) -> _Array:
    """Mean of the `keep` updates with the best Krum scores; keep is at most, and by default, n - f - 2."""
    array = _checked(updates)
    f = check_int("byzantine", byzantine, 0, 2**31)
    scores = _krum_scores(array, f)
    most = len(array) - f - 2
    kept = most if keep is None else check_int("keep", keep, 1, most)
    return np.asarray(array[np.sort(np.argsort(scores, kind="stable")[:kept])].mean(axis=0), dtype=np.float64)


RULES = ("mean", "median", "trimmed-mean", "krum", "multi-krum")
"""Names for the command line and the configuration; only "mean" can be computed from a running sum."""


def smallest_quorum(rule: str, *, byzantine: int) -> int:
    """The fewest updates the rule may be given."""
    if rule not in RULES:
        raise InvalidParameter(f"aggregation must be one of {', '.join(RULES)}, got {rule!r}")
    f = check_int("byzantine", byzantine, 0, 2**31)
    if f and rule == "mean":
        raise InvalidParameter(f"the mean tolerates no adversary, got byzantine={f}; choose a robust rule or 0")
    return {"mean": 1, "median": 2 * f + 1, "trimmed-mean": 2 * f + 1}.get(rule, 2 * f + 3)


def aggregate(rule: str, updates: npt.ArrayLike, *, weights: Sequence[float] | None, byzantine: int) -> _Array:
    """Apply the rule called `rule`; only the mean reads the weights."""
    smallest_quorum(rule, byzantine=byzantine)
    if rule == "mean":
        return weighted_mean(updates, weights=weights)
    if rule == "median":
        return median(updates)
    if rule == "trimmed-mean":
        return trimmed_mean(updates, byzantine=byzantine)
    return (krum if rule == "krum" else multi_krum)(updates, byzantine=byzantine)
