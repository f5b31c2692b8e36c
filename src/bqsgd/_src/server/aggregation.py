"""Robust aggregation rules (pure functions from n updates to one), the weights of the mean, and what a liar can do.

The robust rules tolerate clients that send anything. They count each client once and need every single update, so the
server keeps n updates in memory, and they cannot be used with secure sums. Every rule refuses NaN and infinity.

The mean (paper Line 13, `codec.Accumulator`) weighs client i by p_i. A client never decides its own weight: weights
come from the operator, who knows the data (in a simulation) or has a list of sizes; otherwise all weights are equal.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bqsgd._src.errors import InvalidParameter
from bqsgd._src.params import check_finite, check_int, short_repr
from bqsgd._src.planner.sums import SumPlan
from bqsgd._src.storage import read_toml

_Array = npt.NDArray[np.float64]


def _checked(updates: npt.ArrayLike) -> _Array:
    array = np.asarray(updates, dtype=np.float64)
    if array.ndim != 2 or 0 in array.shape:
        raise InvalidParameter(f"updates must have shape (clients, dimension), neither of them 0, got {array.shape}")
    check_finite(array, "an update holds NaN or infinity; refuse that client's frame before aggregating")
    return array


def median(updates: npt.ArrayLike) -> _Array:
    """Coordinate-wise median. While fewer than half of the clients lie, it stays between honest values.

    >>> median([[0.0], [1.0], [1e9]]).tolist()
    [1.0]
    """
    return np.asarray(np.median(_checked(updates), axis=0), dtype=np.float64)


def trimmed_mean(updates: npt.ArrayLike, *, byzantine: int) -> _Array:
    """Coordinate-wise mean without the f = `byzantine` largest and the f smallest values; needs n > 2 f.

    >>> trimmed_mean([[0.0], [1.0], [2.0], [3.0], [1e9]], byzantine=1).tolist()
    [2.0]
    """
    array = _checked(updates)
    f = byzantine
    if len(array) <= 2 * f:
        raise InvalidParameter(f"trimmed mean with byzantine={f} needs at least {2 * f + 1} updates, got {len(array)}")
    if f:
        array = np.partition(array, (f, len(array) - f - 1), axis=0)[f : len(array) - f]
    return np.asarray(array.mean(axis=0), dtype=np.float64)


def _krum_scores(array: _Array, f: int) -> _Array:
    """For each update, the sum of squared distances to its n - f - 2 nearest others (Blanchard et al. 2017)."""
    n = len(array)
    if n < 2 * f + 3:
        raise InvalidParameter(f"Krum with byzantine={f} needs at least {2 * f + 3} updates, got {n}")
    squared = np.zeros((n, n))
    for i in range(n - 1):  # Differences rather than the Gram matrix, in which close updates cancel.
        difference = array[i + 1 :] - array[i]
        squared[i, i + 1 :] = squared[i + 1 :, i] = np.einsum("ij,ij->i", difference, difference)
    check_finite(squared, "updates are so large that their squared distances overflow")
    np.fill_diagonal(squared, np.inf)
    return np.asarray(np.sort(squared, axis=1)[:, : n - f - 2].sum(axis=1), dtype=np.float64)


def krum(updates: npt.ArrayLike, *, byzantine: int) -> _Array:
    """The update closest to its n - f - 2 nearest others; needs n >= 2 f + 3. The first wins a tie."""
    array = _checked(updates)
    return np.array(array[int(np.argmin(_krum_scores(array, byzantine)))])


def multi_krum(updates: npt.ArrayLike, *, byzantine: int) -> _Array:
    """Mean of the n - f - 2 updates with the best Krum scores."""
    array = _checked(updates)
    best = np.argsort(_krum_scores(array, byzantine), kind="stable")[: len(array) - byzantine - 2]
    # Sorted back into the clients' order, so that the sum's rounding does not depend on the scores.
    return np.asarray(array[np.sort(best)].mean(axis=0), dtype=np.float64)


def aggregate(rule: str, updates: npt.ArrayLike, *, byzantine: int) -> _Array:
    """Apply the robust rule with this name. The mean is a running sum over frames, `codec.Accumulator`."""
    if rule == "median":
        return median(updates)
    robust = {"trimmed-mean": trimmed_mean, "krum": krum, "multi-krum": multi_krum}
    return robust[rule](updates, byzantine=check_int("byzantine", byzantine, 0, 2**31))


_MAX_SAMPLES = 2**40
_MAX_SIZES_BYTES = 4 << 20


def read_sizes(path: str | Path) -> dict[int, int]:
    """Read the operator's list of sizes, a TOML file with the table [samples]: client -> number of samples.

    Raises:
        InvalidParameter: the file is missing, or does not hold one table of client numbers and sizes.
    """
    tables = read_toml(path, limit=_MAX_SIZES_BYTES, kind="list of sizes")
    listed = tables.get("samples")
    if set(tables) != {"samples"} or not isinstance(listed, dict) or not listed:
        raise InvalidParameter(
            f"{path} must contain one table, [samples], with a line such as 0 = 1200 for each client"
        )
    sizes: dict[int, int] = {}
    for client, samples in listed.items():
        if not (client.isascii() and client.isdecimal() and len(client) <= 18):
            raise InvalidParameter(f"{path}: clients are listed by their numbers, got {short_repr(client)}")
        sizes[int(client)] = check_int(f"samples of client {client}", samples, 1, _MAX_SAMPLES)
    return sizes


def client_weights(
    choice: str | None, samples: Mapping[int, int], *, claimed: bool, sizes: Mapping[int, int] | None
) -> dict[int, float]:
    """Client -> its weight in the mean, not yet divided by their sum.

    choice: "equal", "size", or None: by size if the operator knows the sizes, equal if the clients only claim them.
    claimed: whether `samples` is only what the clients claim; a claim never decides a weight. sizes: the operator's
    list of sizes, if there is one.

    >>> client_weights(None, {0: 10, 1: 2**40}, claimed=True, sizes=None)
    {0: 1.0, 1: 1.0}
    >>> client_weights("size", {0: 10, 1: 2**40}, claimed=True, sizes={0: 10, 1: 30})
    {0: 10.0, 1: 30.0}

    Raises:
        InvalidParameter: "size" although the clients only claim their sizes, or a client missing on the list of sizes.
    """
    unlisted = [] if sizes is None else sorted(set(samples) - set(sizes))
    if unlisted:
        raise InvalidParameter(f"clients {unlisted[:20]} are not on the list of sizes; add a line for each of them")
    if choice == "size" and claimed and sizes is None:
        raise InvalidParameter(
            "weights = 'size' needs a list of sizes: here each client claims its own size, and one that lies could "
            "determine the whole mean. Give a file of sizes, or leave the weights equal"
        )
    if choice == "equal" or (claimed and sizes is None):
        return dict.fromkeys(samples, 1.0)
    return {client: float((sizes or samples)[client]) for client in samples}


def one_liar_moves(
    rule: str, *, weights: Sequence[float], fewest_frames: int, byzantine: int, reach: float
) -> tuple[float, float] | None:
    """How far one lying client can move a coordinate of the result, in units of the range R.

    Two figures: with all clients, and in a round with only `fewest_frames` frames. A lie is any code, worth up to
    `reach`; the true value that it replaces lies in [-1, 1], apart from noise of mean 0. None if one liar cannot move
    the result beyond what honest clients sent (median, trimmed mean), or no further than honest updates differ (Krum).

    >>> one_liar_moves("mean", weights=[1.0] * 4, fewest_frames=2, byzantine=0, reach=127.5)
    (32.125, 64.25)
    """
    order = sorted(weights)
    if rule in ("krum", "multi-krum"):
        return None
    if rule == "mean":
        largest = order[-1]
        # The worst small round: the heaviest client lies, and all others in it are the lightest.
        present = largest + sum(order[: min(fewest_frames, len(order)) - 1])
        fractions = largest / sum(order), largest / present
    else:
        counts = len(order), min(fewest_frames, len(order))
        if min(counts) >= 3 and (rule == "median" or byzantine >= 1):
            return None
        fractions = 1 / counts[0], 1 / counts[1]
    return (1 + reach) * fractions[0], (1 + reach) * fractions[1]


def one_liar_words(moves: tuple[float, float] | None, *, rule: str, clients: int, fewest_frames: int) -> str:
    """The result of `one_liar_moves` as a sentence for reports."""
    if moves is None and rule in ("krum", "multi-krum"):
        return f"One lying client moves the {rule} no further than honest updates lie from each other."
    if moves is None:
        return f"One lying client cannot take a coordinate of the {rule} beyond what honest clients sent."
    fewer = "" if fewest_frames >= clients else f", {_up(moves[1])} R if only {fewest_frames} of them"
    return (
        f"One lying client can move a coordinate of the {rule} by up to {_up(moves[0])} R when all {clients} clients "
        f"answer{fewer}; R is the encoder's range."
    )


def one_liar_in_sum(plans: Sequence[SumPlan], *, rule: str = "mean", byzantine: int = 0, width: int = 0) -> str:
    """The same for a secure sum: a liar may send any vector, since the server cannot look under the mask.

    It moves each coordinate of the sum over its group of clients, by half the modulus at most. plans: of all groups.
    width: of the sums of the last round; 0 if there were none.
    """
    plan, robust = max(plans, key=lambda plan: 2.0**plan.width / plan.rule.fewest), rule != "mean"
    # In a mean the other groups dilute the lie. A robust rule compares the means of the groups.
    others = 0 if robust else sum(other.rule.clients for other in plans) - plan.rule.clients
    clients, fewest = plan.rule.clients + others, plan.rule.fewest
    moves = 2.0 ** (plan.width - 1) / plan.levels
    whole = "mean of its group" if robust else "mean"
    words = one_liar_words((moves / clients, moves / fewest), rule=whole, clients=clients, fewest_frames=fewest)
    if plan.trials:
        deviation = math.sqrt(plan.noise.in_sum(plan.rule.clients)) / 2
        most, last = (_up(2.0 ** (bits - 1) / deviation) for bits in (plan.width, width or plan.width))
        narrow = f", and {last} in the {width} bits of the last round" if 0 < width < plan.width else ""
        words += (
            f" That is half the modulus of {plan.width} bits: {most} standard deviations of the noise in a sum{narrow}."
        )
    krum = rule in ("krum", "multi-krum")
    needed = max(3, 2 * byzantine + (3 if krum else 1))
    if robust and len(plans) >= needed and (byzantine or rule != "trimmed-mean"):
        limit = "no further than they differ" if krum else "not beyond those of the other groups"
        words += f" In a round with sums of {needed} groups or more, the {rule} of their means follows it {limit}."
    return words


def _up(value: float) -> str:
    """Three significant digits, rounded up because the figure is an upper bound; 1e-9 absorbs floating-point error."""
    digits = 2 - int(np.floor(np.log10(value)))
    return f"{np.ceil(value * 10.0**digits - 1e-9) / 10.0**digits:,.{max(0, digits)}f}"
