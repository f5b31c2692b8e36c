"""The client as a source of observations, from end to end: data, sampling, clip, encoder, frame, codes."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor, nn

from bqsgd.audit.bound import Scores
from bqsgd.audit.encoder import CANARY_SIZE, Inputs, LikelihoodRatio
from bqsgd.codec import codes_of, decode_frame
from bqsgd.errors import InvalidParameter
from bqsgd.params import check_int
from bqsgd.training.client import Client, Declined
from bqsgd.training.settings import Config
from bqsgd.wire.frame import read_frame

Data = tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]
"""A client's inputs and targets, a row per sample."""
MakeClient = Callable[[Config, Data], Client]
_MOST_ROUNDS = 2**40
FINEST_LEVELS = 2**20


@dataclass(frozen=True, kw_only=True)
class Neighbours:
    """Two data sets that differ in one record."""

    without: Data
    with_record: Data


class ClientRuns:
    """Runs of `rounds` messages of real clients on two neighbouring data sets.

    Every message is made by `Client.update`: it draws its batch, clips, encodes and frames. The frame's bytes are read
    back as a server reads them, and their codes are scored. The server that attacks knows both data sets and the model
    it sent, but neither the batch nor the noise.

    Args:
        make: the client for given settings and data.
        config: the settings; levels and trials must be fixed. Without a seed `make` must give the client a ledger.
        neighbours: the data of the two worlds.
        model: what the server sends in every round.
    """

    def __init__(
        self,
        make: MakeClient,
        config: Config,
        *,
        neighbours: Neighbours,
        model: npt.NDArray[np.float32],
        rounds: int = 1,
    ) -> None:
        if config.privacy.mechanism is None:
            raise InvalidParameter("an audit of a client needs fixed levels and trials: a plan depends on the rounds")
        self.model, self.rounds = model, check_int("rounds", rounds, 1, 2**31)
        mechanism, config = config.privacy.mechanism, config.but(rounds=_MOST_ROUNDS)
        self.clients = {present: make(config, data) for present, data in _worlds(neighbours)}
        self.release = self.clients[True].setting.release(mechanism)
        """What the client itself states for one message. The claim to audit may be another: see `audit`."""
        self.inputs = full_batch_inputs(make, config, neighbours=neighbours, model=model)
        self.score = LikelihoodRatio(self.inputs, self.release.mechanism, rate=self.release.sampling.rate)
        self._made = {True: 0, False: 0}

    @property
    def seeded(self) -> bool:
        """Whether the clients' noise was seeded."""
        return any(client.sources.seeded for client in self.clients.values())

    def scores(self, runs: int, *, present: bool) -> Scores:
        """The score of each run, the sum over its messages, in the world where the record is `present` or not."""
        client, first, total = self.clients[present], self._made[present], runs * self.rounds
        self._made[present] += total
        codes = [self._codes(client, 2 * (first + i) + present) for i in range(total)]  # no round in both worlds
        totals: Scores = self.score(np.stack(codes)).reshape(runs, self.rounds).sum(axis=1)
        return totals

    def _codes(self, client: Client, round: int) -> npt.NDArray[np.unsignedinteger]:
        return codes_of(
            read_frame(
                bytes(_frame(client, self.model, round)),
                dimension=self.release.dimension,
                mechanism=self.release.mechanism,
                range=client.range,
                client=client.client,
                round=round,
            )
        )


def full_batch_inputs(
    make: MakeClient, config: Config, *, neighbours: Neighbours, model: npt.NDArray[np.float32]
) -> Inputs:
    """What reaches the encoder when every record takes part: the same clients' frames, without noise.

    It tells a server where to look. The finest quantiser leaves 1e-6 of the range.
    """
    plain = config.but(sampling="none", levels=FINEST_LEVELS, trials=0)
    found = {}
    for present, data in _worlds(neighbours):
        client = make(plain, data)
        reach = client.range
        found[present] = decode_frame(bytes(_frame(client, model, 0)), range=reach) / reach
    return Inputs(without=found[False], with_record=found[True])


def _worlds(neighbours: Neighbours) -> tuple[tuple[bool, Data], tuple[bool, Data]]:
    return (False, neighbours.without), (True, neighbours.with_record)


def _frame(client: Client, model: npt.NDArray[np.float32], round: int) -> bytearray:
    answer = client.update(model, round)
    if isinstance(answer, Declined):
        raise InvalidParameter(f"the audited client sends nothing: {answer.reason}")
    return answer


# The task that the command line audits: a linear model without a bias, on which a record's gradient is its input.


def linear_client(config: Config, data: Data) -> Client:
    """A client with one linear output and the logistic loss: at the zero model a record x has the gradient -x / 2."""
    features = data[0].shape[1]
    return Client(
        client=0,
        model=nn.Linear(features, 1, bias=False),
        loss=_logistic,
        samples=data,
        config=config,
        ledger=None,
    )


def _logistic(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.binary_cross_entropy_with_logits(outputs[:, 0], targets, reduction="none")


def canary_neighbours(config: Config, *, dimension: int, dataset_size: int) -> Neighbours:
    """A canary whose gradient is CANARY_SIZE in every coordinate, among records that make it show most.

    No sampling: it comes after a full batch of records at the lower end of the encoder's range. Poisson: it replaces a
    record without a gradient, among others like that. Fixed size: it replaces its own opposite.
    """
    check_int("dataset_size", dataset_size, config.privacy.batch_size, 2**31)
    canary, nothing = np.full((1, dimension), -2 * CANARY_SIZE, np.float32), np.zeros((1, dimension), np.float32)
    if config.privacy.sampling == "none":
        rest = nothing.repeat(dataset_size, axis=0)
        rest[: config.privacy.batch_size] = 2 * config.range
        return _neighbours(rest, np.concatenate([rest, canary]))
    rest = nothing.repeat(dataset_size - 1, axis=0)
    instead = -canary if config.privacy.sampling == "fixed" else nothing
    return _neighbours(np.concatenate([instead, rest]), np.concatenate([canary, rest]))


def _neighbours(without: npt.NDArray[np.float32], with_record: npt.NDArray[np.float32]) -> Neighbours:
    labelled = [(inputs, np.ones(len(inputs), np.float32)) for inputs in (without, with_record)]
    return Neighbours(without=labelled[0], with_record=labelled[1])


def canary_runs(
    config: Config, *, dimension: int, dataset_size: int, rounds: int = 1, make: MakeClient = linear_client
) -> ClientRuns:
    """Runs of the linear client on `canary_neighbours`.

    Without a seed the noise is keyed by one that the operating system draws for this audit: it is as random, and unlike
    a client without a seed it needs no ledger with room for thousands of messages.
    """
    if config.privacy.seed is None:
        config = config.but(seed=secrets.randbits(63))
    return ClientRuns(
        make,
        config,
        neighbours=canary_neighbours(config, dimension=dimension, dataset_size=dataset_size),
        model=np.zeros(dimension, np.float32),
        rounds=rounds,
    )
