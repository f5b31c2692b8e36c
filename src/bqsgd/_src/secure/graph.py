"""Neighbours in a secure sum, and the thresholds that every client insists on, whatever the server says.

There are n clients. At most f of them are missing from a sum, and at most t collude with the server. With up to
`FULL_GRAPH` clients, every pair shares a mask and each client holds shares of all other clients' secrets (Bonawitz et
al., 2017). With more clients, each has a few neighbours (Bell et al., 2020; `sparse`).

*One list.* On the full graph the quorum is T = floor((n + t) / 2) + 1 signatures on a list of survivors. Two lists with
a quorum each would have more than t signers in common, so an honest client would have signed both, and honest clients
sign one. Hence there is one list L. A client signs it only if it shares a mask with every other client on it and at
most f clients are missing. A client needs T - 1 partners. As many other clients open a secret, but at least t + f + 1:
what is opened for the clients missing from L, and what colluders know, then says nothing about the masks of the others
(Claim 12 in docs/accounting.md).

*One sum.* What is opened is the sum over all honest clients of L, never over fewer. Let S be the honest clients whose
vectors the server adds up. A mask between two clients of L is removed only if both vectors are in the sum, since their
mask seeds stay secret (t < T - 1). If S contains a client that signed, all honest clients of L are its partners, so S
is all of them. If it contains none, S is disjoint from the T - t or more honest signers. Then a client of S has at most
n + t - T - 1 partners among S, the colluders and the clients missing from L, which is fewer than the T - 1 it needs.

The sparse graph reaches the same in another way, except with a probability that is computed (Claim 12 in
docs/accounting.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from bqsgd._src.errors import Infeasible, InvalidParameter
from bqsgd._src.params import check_int
from bqsgd._src.secure.masks import derive, keystream
from bqsgd._src.secure.roster import MAX_CLIENTS, Roster
from bqsgd._src.secure.sparse import Sparse, sparse_numbers

FULL_GRAPH = 200
"""Up to this many clients, all clients are neighbours of each other."""


@dataclass(frozen=True, kw_only=True)
class Thresholds:
    """The numbers that every client of a sum insists on; made and checked by `thresholds`.

    sparse: the numbers of a sparse graph; None on the full graph.
    """

    clients: int
    dropouts: int
    colluders: int
    sparse: Sparse | None = None

    @property
    def quorum(self) -> int:
        """Signatures that a list of survivors needs: on the full graph, more than half of clients plus colluders."""
        return (self.clients + self.colluders) // 2 + 1 if self.sparse is None else self.sparse.quorum

    @property
    def partners(self) -> int:
        """Partners that a client needs."""
        return self.quorum - 1 if self.sparse is None else self.sparse.threshold

    @property
    def share_threshold(self) -> int:
        """Shares that open a secret, or all of them if it has fewer holders."""
        if self.sparse is not None:
            return self.sparse.threshold
        return max(self.quorum - 1, self.dropouts + self.colluders + 1)

    @property
    def liars(self) -> int:
        """Most clients that are taken to lie about secrets: the colluders, and one even if none is expected."""
        return max(1, self.colluders)

    @property
    def fewest(self) -> int:
        """Fewest clients in a sum."""
        return self.clients - self.dropouts

    @property
    def honest(self) -> int:
        """Clients that are certainly in the sum and keep their noise secret: n - f - t."""
        return self.clients - self.dropouts - self.colluders

    @property
    def failure(self) -> float:
        """Bound on the probability that a round is unsafe although the cryptography holds; 0 on the full graph."""
        return 0.0 if self.sparse is None else self.sparse.failure


def thresholds(*, clients: int, dropouts: int, colluders: int) -> Thresholds:
    """The thresholds for n, f and t.

    Raises:
        Infeasible: n - f survivors are not enough for a quorum, or fewer than two clients are certainly honest.

    >>> rule = thresholds(clients=10, dropouts=2, colluders=2)
    >>> rule.share_threshold, rule.quorum, rule.fewest
    (6, 7, 8)
    """
    n, f, t = clients, dropouts, colluders
    check_int("clients", n, 2, MAX_CLIENTS)
    check_int("dropouts", f, 0, n - 1)
    check_int("colluders", t, 0, n - 1)
    if n > FULL_GRAPH:
        return Thresholds(clients=n, dropouts=f, colluders=t, sparse=sparse_numbers(n, f, t))
    rule = Thresholds(clients=n, dropouts=f, colluders=t)
    if n - f < rule.quorum:
        raise Infeasible(
            f"{n} clients with {t} colluders need {rule.quorum} survivors, so that two lists of survivors cannot both "
            f"be signed, but {f} dropouts leave {n - f}. With {t} colluders at most {n - rule.quorum} dropouts are "
            "possible" + (f", with {f} dropouts at most {n - 2 * f - 1} colluders" if n - 2 * f - 1 > 0 else "")
        )
    # With a single honest client, the sum without what the colluders know would be its vector alone.
    if rule.honest < 2:
        raise Infeasible(
            f"{n} clients with {f} dropouts and {t} colluders leave {n - f - t} certainly present and honest, so a sum "
            f"could be the vector of a single client; at most {n - f - 2} colluders are possible"
        )
    return rule


class Graph:
    """The neighbours of every client of a sum.

    Raises:
        InvalidParameter: a sparse graph from a roster without a seed.
    """

    def __init__(self, roster: Roster, rule: Thresholds) -> None:
        self._roster, self._sparse = roster, rule.sparse
        self._masks: dict[int, tuple[int, ...]] = {}
        self._holders: dict[int, tuple[int, ...]] = {}
        if rule.sparse is not None and not roster.seed:
            raise InvalidParameter(
                f"a sum over {rule.clients} clients needs a roster with a seed: make it with `bqsgd secure roster`"
            )

    def masks(self, client: int) -> tuple[int, ...]:
        """The clients with which a client shares masks, ascending."""
        if self._sparse is None:
            return self.holders(client)
        return self._kept(self._masks, client, self._sparse.masks)

    def holders(self, client: int) -> tuple[int, ...]:
        """The clients that hold shares of a client's secrets, ascending."""
        return self._kept(self._holders, client, 0 if self._sparse is None else self._sparse.holders)

    def points(self, client: int) -> dict[int, int]:
        """Holder -> the point of its shares of a client's secrets.

        On the full graph a holder has the same point for every client, its place counted from 1: the proof that the
        masks of pairs stay secret needs this. On a sparse graph it is its position among the holders, from 1.
        """
        if self._sparse is None:
            return {holder: 1 + self._roster.place[holder] for holder in self.holders(client)}
        return {holder: 1 + index for index, holder in enumerate(self.holders(client))}

    def _kept(self, known: dict[int, tuple[int, ...]], client: int, slots: int) -> tuple[int, ...]:
        if client not in known:
            clients, place = self._roster.clients, self._roster.place[client]
            near = clients if self._sparse is None else (clients[other] for other in self._slots[:slots, place])
            known[client] = tuple(sorted(set(near) - {client}))
        return known[client]

    @cached_property
    def committee(self) -> tuple[int, ...]:
        """The clients that sign lists of survivors, ascending; all of them on the full graph."""
        clients = self._roster.clients
        if self._sparse is None:
            return clients
        chosen = self._order(self._sparse.holders // 2)[: self._sparse.committee]
        return tuple(clients[place] for place in np.sort(chosen))

    def too_far_away(self, survivors: tuple[int, ...]) -> tuple[int, ...]:
        """The survivors with too many mask neighbours missing from the list; none on the full graph."""
        if self._sparse is None:
            return ()
        listed = np.zeros(len(self._roster.clients), dtype=np.bool_)
        places = np.array([self._roster.place[client] for client in survivors])
        listed[places] = True
        # Slots are counted, not clients: a neighbour in two orders counts twice, as in the bound of `sparse`.
        missing = (~listed[self._slots[: self._sparse.masks]]).sum(axis=0)
        return tuple(survivors[index] for index in np.flatnonzero(missing[places] > self._sparse.away))

    @cached_property
    def _slots(self) -> npt.NDArray[np.int32]:
        """Rows 2a and 2a + 1: the successor and the predecessor of each client in order a; columns as in the roster."""
        assert self._sparse is not None
        count = len(self._roster.clients)
        slots = np.empty((self._sparse.holders, count), dtype=np.int32)
        for index in range(self._sparse.holders // 2):
            order = self._order(index)
            slots[2 * index, order] = np.roll(order, -1)
            slots[2 * index + 1, order] = np.roll(order, 1)
        return slots

    def _order(self, index: int) -> npt.NDArray[np.int64]:
        """A random cyclic order of all places in the roster, which follows from the roster's seed."""
        key = derive(self._roster.seed, "graph", self._roster.digest, index)
        words = np.frombuffer(keystream(key[:16], 8 * len(self._roster.clients)), dtype="<u8")
        # Stable: all parties must break a tie in the same way.
        return np.argsort(words, kind="stable")
