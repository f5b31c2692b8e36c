"""The thresholds of a secure sum: what every client insists on, whatever the server says.

n clients; at most f of them are missing from a sum, at most t collude with the server. Every pair of clients shares a
mask (the full graph of Bonawitz et al., 2017), and everybody holds a share of everybody else's secrets.

quorum: T = floor((n + t) / 2) + 1 signatures on a list of survivors. Two lists that both have so many have more than t
signers in common, so an honest client signed both, which none does: there is one list L. A client signs it only if it
shares a mask with every other client on it, and if at most f are missing.

share threshold: T - 1 of the others open a secret, and a client wants that many partners.

What is opened is the sum over all honest clients of L, never over fewer. Let S be the honest clients whose vectors the
server adds up. A mask between two clients of L cannot be removed unless both vectors are in the sum, since their mask
keys stay secret (t < T - 1). If S holds a client that signed, all honest clients of L are its partners, so S is all of
them. If it holds none, S and the T - t or more honest signers are apart, so a client of S has at most n + t - T - 1
partners among S, the colluders and those missing from L: fewer than the T - 1 that it wants.

A sparse graph (Bell et al., 2020) would be cheaper for many clients. There a client cannot vouch for survivors that it
shares no mask with: a server could list clients that it had cut off, and be shown noise that is needed.
"""

from __future__ import annotations

from dataclasses import dataclass

from bqsgd.errors import Infeasible
from bqsgd.params import check_int
from bqsgd.secure.roster import MAX_CLIENTS


@dataclass(frozen=True, kw_only=True)
class Thresholds:
    """The numbers that every client of a sum insists on; `thresholds` checks them."""

    clients: int
    dropouts: int
    colluders: int

    @property
    def quorum(self) -> int:
        """Signatures on one list of survivors: more than half of all clients and colluders together."""
        return (self.clients + self.colluders) // 2 + 1

    @property
    def share_threshold(self) -> int:
        """Shares that open a secret, and partners that a client wants."""
        return self.quorum - 1

    @property
    def fewest(self) -> int:
        """Fewest clients in a sum."""
        return self.clients - self.dropouts

    @property
    def honest(self) -> int:
        """Clients that surely are in the sum and tell nobody their noise: n - f - t."""
        return self.clients - self.dropouts - self.colluders


def thresholds(*, clients: int, dropouts: int, colluders: int) -> Thresholds:
    """The thresholds for n, f and t.

    Raises:
        Infeasible: no list of n - f survivors could have a quorum, or only one client would be honest for sure.

    >>> found = thresholds(clients=10, dropouts=2, colluders=2)
    >>> found.share_threshold, found.quorum, found.fewest
    (6, 7, 8)
    """
    n, f, t = clients, dropouts, colluders
    check_int("clients", n, 2, MAX_CLIENTS)
    check_int("dropouts", f, 0, n - 1)
    check_int("colluders", t, 0, n - 1)
    rule = Thresholds(clients=n, dropouts=f, colluders=t)
    if n - f < rule.quorum:
        raise Infeasible(
            f"{n} clients of which {t} may collude need {rule.quorum} survivors, so that no two lists of survivors are "
            f"signed; {f} dropouts leave {n - f}. With {t} colluders at most {n - rule.quorum} dropouts are possible"
            + (f", with {f} dropouts at most {n - 2 * f - 1} colluders" if n - 2 * f - 1 > 0 else "")
        )
    if rule.honest < 2:
        raise Infeasible(
            f"{n} clients with {f} dropouts and {t} colluders leave {n - f - t} that is surely there and honest: its "
            f"vector would be all there is to hide in; at most {n - f - 2} colluders are possible"
        )
    return rule
