"""Aggregation rules: pure functions from the clients' decoded updates (n, d) to one update (d).

The mean weighs client i by p_i (paper Line 13). A weight is never a client's own word: it is the operator's, from data
of their own (a simulation) or from their list of sizes, and equal otherwise. The robust rules tolerate clients that
send whatever they like; they count each client once and need every single update, so they keep n updates in memory and
exclude secure aggregation. Every rule refuses NaN and infinity.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bqsgd.errors import InvalidParameter, NonFiniteInput
from bqsgd.params import check_int, shown
from bqsgd.planner.sums import SumPlan
from bqsgd.storage import read_toml

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


WEIGHTS = ("equal", "size")
_MAX_SAMPLES = 2**40
_MAX_SIZES_BYTES = 4 << 20


def read_sizes(path: str | Path) -> dict[int, int]:
    """Client -> samples, as the server's operator has written it down: a TOML file with the table [samples].

    Raises:
        InvalidParameter: no such file, or not a table of client numbers and sizes.
    """
    found = read_toml(path, limit=_MAX_SIZES_BYTES, kind="list of sizes")
    listed = found.get("samples")
    if set(found) != {"samples"} or not isinstance(listed, dict) or not listed:
        raise InvalidParameter(f"{path} must hold one table, [samples], with a line for each client: 0 = 1200")
    sizes: dict[int, int] = {}
    for client, samples in listed.items():
        if not (client.isascii() and client.isdecimal() and len(client) <= 18):
            raise InvalidParameter(f"{path}: a client is named by its number, got {shown(client)}")
        sizes[int(client)] = check_int(f"samples of client {client}", samples, 1, _MAX_SAMPLES)
    return sizes


def client_weights(
    choice: str | None, samples: Mapping[int, int], *, claimed: bool, sizes: Mapping[int, int] | None
) -> dict[int, float]:
    """Client -> its weight in the mean.

    choice: "equal", "size", or None for size where the sizes are known and equal where they are claims.
    claimed: whether `samples` is what the clients say of themselves; that never decides a weight. sizes: the sizes as
    the operator has them.

    >>> client_weights(None, {0: 10, 1: 2**40}, claimed=True, sizes=None)
    {0: 1.0, 1: 1.0}
    >>> client_weights("size", {0: 10, 1: 2**40}, claimed=True, sizes={0: 10, 1: 30})
    {0: 10.0, 1: 30.0}

    Raises:
        InvalidParameter: "size" where only the clients know their sizes, or a client that is not on the list of sizes.
    """
    if sizes is not None:
        absent = sorted(set(samples) - set(sizes))
        if absent:
            raise InvalidParameter(f"clients {absent[:20]} are not on the list of sizes")
    if choice == "size" and claimed and sizes is None:
        raise InvalidParameter(
            "weights = 'size' needs a list of sizes: clients say themselves how many samples they hold, and one could "
            "take the whole mean; give a file of sizes, or leave the weights equal"
        )
    if choice == "equal" or (claimed and sizes is None):
        return dict.fromkeys(samples, 1.0)
    return {client: float((sizes or samples)[client]) for client in samples}


def one_liar_moves(
    rule: str, *, weights: Sequence[float], fewest_frames: int, byzantine: int, reach: float
) -> tuple[float, float] | None:
    """The furthest that one lying client can move a coordinate, in units of the range R.

    With all clients, and in a round with only the fewest frames that count. A lie is any code, worth up to `reach`; the
    truth it takes the place of lies in [-1, 1], but for noise of mean 0. None where one liar cannot take the result
    beyond what honest clients sent (median, trimmed mean), or only as far as honest updates lie from each other (Krum).

    >>> one_liar_moves("mean", weights=[1.0] * 4, fewest_frames=2, byzantine=0, reach=127.5)
    (32.125, 64.25)
    """
    order = sorted(weights)
    if rule in ("krum", "multi-krum"):
        return None
    if rule == "mean":
        largest = order[-1]
        present = largest + sum(order[: min(fewest_frames, len(order)) - 1])
        shares = largest / sum(order), largest / present
    else:
        counts = len(order), min(fewest_frames, len(order))
        withstands = all(count >= 3 for count in counts) and (rule == "median" or byzantine >= 1)
        if withstands:
            return None
        shares = 1 / counts[0], 1 / counts[1]
    return (1 + reach) * shares[0], (1 + reach) * shares[1]


def one_liar_words(moves: tuple[float, float] | None, *, rule: str, clients: int, fewest_frames: int) -> str:
    """What `one_liar_moves` found, in a sentence for reports."""
    if moves is None and rule in ("krum", "multi-krum"):
        return f"One lying client moves the {rule} no further than honest updates lie from each other."
    if moves is None:
        return f"One lying client cannot take a coordinate of the {rule} beyond what honest clients sent."
    fewer = "" if fewest_frames >= clients else f", {_up(moves[1])} R if only {fewest_frames} of them"
    return (
        f"One lying client can move a coordinate of the {rule} by up to {_up(moves[0])} R when all {clients} clients "
        f"answer{fewer}; R is the encoder's range."
    )


def one_liar_in_sum(plan: SumPlan) -> str:
    """How far one lying client can move a secure sum: under a mask any vector looks alike."""
    moves = 2.0 ** (plan.width - 1) / plan.levels
    all_clients, fewest = plan.rule.clients, plan.rule.fewest
    fewer = "" if fewest == all_clients else f", {_up(moves / fewest)} R if only {fewest} of them are in the sum"
    return (
        f"One lying client can move a coordinate of the mean by up to {_up(moves / all_clients)} R when all "
        f"{all_clients} clients answer{fewer}; R is the encoder's range."
    )


def _up(value: float) -> str:
    """Three significant digits, never below the value."""
    digits = 2 - int(np.floor(np.log10(value)))
    return f"{np.ceil(value * 10.0**digits - 1e-9) / 10.0**digits:,.{max(0, digits)}f}"
