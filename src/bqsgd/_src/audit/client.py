"""Real clients as a source of observations, from end to end: data, sampling, clip, encoder, frame, codes."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt
from torch import Tensor, nn

from bqsgd._src.audit.bound import Scores
from bqsgd._src.audit.encoder import CANARY_SIZE, Inputs, LikelihoodRatio
from bqsgd._src.client.client import Client, client_sender
from bqsgd._src.client.objectives import objective_of
from bqsgd._src.client.samples import reader_of
from bqsgd._src.codec import codes_of, decode_frame
from bqsgd._src.errors import InvalidParameter
from bqsgd._src.params import check_int
from bqsgd._src.release import Release
from bqsgd._src.settings.config import Config
from bqsgd._src.wire.frame import Buffer, read_frame

Data = tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]
"""A client's inputs and targets, one row for each sample."""
Worlds = Mapping[bool, Data]
"""Two neighbouring data sets: whether the record is present -> the data."""
MakeClient = Callable[[Config, Data], Client]
# The audited clients never reach their last round, whatever the number of runs.
_MOST_ROUNDS = 2**40
FINEST_LEVELS = 2**20


class ClientRuns:
    """Runs real clients on two neighbouring data sets; one run is `rounds` messages.

    `Client.update` makes every message: it draws a batch, clips, encodes and writes the frame. We read the frame's
    bytes as a server does and score its codes. The attacking server knows both data sets and the model it sent, but
    neither the batch nor the noise.

    Args:
        make: makes the client for given settings and data.
        config: the settings, with fixed levels and trials. Without a seed, `make` must give the client a ledger.
        worlds: the data of the two worlds.
        model: the model that the server sends in every round.
    """

    def __init__(
        self,
        make: MakeClient,
        config: Config,
        *,
        worlds: Worlds,
        model: npt.NDArray[np.float32],
        rounds: int = 1,
    ) -> None:
        if config.privacy.mechanism is None:
            raise InvalidParameter(
                "an audit of a client needs fixed levels and trials, because a plan depends on the rounds; set both"
            )
        self.model, self.rounds = model, check_int("rounds", rounds, 1, 2**31)
        mechanism, config = config.privacy.mechanism, config.but(rounds=_MOST_ROUNDS)
        self.clients = {present: make(config, data) for present, data in worlds.items()}
        self.release = Release(mechanism=mechanism, terms=self.clients[True].terms)
        """What the client states about one message. The claim under audit may differ from it; see `audit`."""
        self.inputs = full_batch_inputs(make, config, worlds=worlds, model=model)
        self.score = LikelihoodRatio(self.inputs, self.release.mechanism, rate=self.release.terms.sampling.rate)
        self._made = {True: 0, False: 0}

    @property
    def seeded(self) -> bool:
        """Whether the clients' noise was seeded."""
        return any(client.sources.seeded for client in self.clients.values())

    def scores(self, runs: int, *, present: bool) -> Scores:
        """The score of each run, the sum over its messages, in the world where the record is `present` or not."""
        client, first, total = self.clients[present], self._made[present], runs * self.rounds
        self._made[present] += total
        # Seeded noise depends on the round. The worlds use even and odd rounds, so that they never share noise.
        codes = [self._codes(client, 2 * (first + i) + present) for i in range(total)]
        totals: Scores = self.score(np.stack(codes)).reshape(runs, self.rounds).sum(axis=1)
        return totals

    def _codes(self, client: Client, round: int) -> npt.NDArray[np.unsignedinteger]:
        return codes_of(
            read_frame(
                bytes(_frame(client, self.model, round)),
                dimension=self.release.terms.dimension,
                mechanism=self.release.mechanism,
                range=client.range,
                client=client.client,
                round=round,
            )
        )


def full_batch_inputs(make: MakeClient, config: Config, *, worlds: Worlds, model: npt.NDArray[np.float32]) -> Inputs:
    """The encoder's input when every record takes part, read from frames that the same clients make without noise.

    An attacking server looks for this difference. With the finest quantiser it is exact to 1e-6 of the range.
    """
    plain = config.but(sampling="none", levels=FINEST_LEVELS, trials=0)
    inputs = {}
    for present, data in worlds.items():
        client = make(plain, data)
        inputs[present] = decode_frame(bytes(_frame(client, model, 0)), range=client.range) / client.range
    return Inputs(without=inputs[False], with_record=inputs[True])


def _frame(client: Client, model: npt.NDArray[np.float32], round: int) -> Buffer:
    reply = client.update(model, round)
    if reply.frame is None:
        raise InvalidParameter(f"the audited client sent no frame: {reply.reason}")
    return reply.frame


# The task that `bqsgd audit` uses: a linear model without a bias, where the gradient of a record is -1/2 of its input.


def linear_client(config: Config, data: Data) -> Client:
    """A client with one linear output and the logistic loss. At the zero model, a record x has the gradient -x / 2."""
    features = data[0].shape[1]
    objective = objective_of(config, nn.Linear(features, 1, bias=False), _logistic)
    return Client(config, objective, reader_of(data), client_sender(config, 0, None))


def _logistic(outputs: Tensor, targets: Tensor) -> Tensor:
    # Written out, because the compiled loops have no rule for `binary_cross_entropy_with_logits`. An audit sends
    # thousands of messages, and each would take six times as long.
    logits = outputs[:, 0]
    return nn.functional.softplus(logits) - targets * logits


def canary_worlds(config: Config, *, dimension: int, dataset_size: int) -> Worlds:
    """A canary whose gradient is CANARY_SIZE in every coordinate, among records that make it most visible.

    Without sampling, it is added to a full batch of records at the lower end of the encoder's range. With Poisson
    sampling, it replaces a record with a gradient of zero, and the others are zero too. With batches of fixed size, it
    replaces its opposite.
    """
    check_int("dataset_size", dataset_size, config.privacy.batch_size, 2**31)
    # At the zero model a record x has the gradient -x / 2, so the inputs are -2 times the wanted gradients.
    canary, nothing = np.full((1, dimension), -2 * CANARY_SIZE, np.float32), np.zeros((1, dimension), np.float32)
    if config.privacy.sampling == "none":
        without = nothing.repeat(dataset_size, axis=0)
        without[: config.privacy.batch_size] = 2 * config.range
        with_record = np.concatenate([without, canary])
    else:
        others = nothing.repeat(dataset_size - 1, axis=0)
        replaced = -canary if config.privacy.sampling == "fixed" else nothing
        without, with_record = np.concatenate([replaced, others]), np.concatenate([canary, others])
    labelled = [(rows, np.ones(len(rows), np.float32)) for rows in (without, with_record)]
    return {False: labelled[0], True: labelled[1]}


def canary_runs(
    config: Config, *, dimension: int, dataset_size: int, rounds: int = 1, make: MakeClient = linear_client
) -> ClientRuns:
    """Runs of the linear client on `canary_worlds`.

    Without a seed, the operating system draws one for this audit. The noise is as random as without a seed, and the
    client needs no ledger with room for thousands of messages.
    """
    if config.privacy.seed is None:
        config = config.but(seed=secrets.randbits(63))
    return ClientRuns(
        make,
        config,
        worlds=canary_worlds(config, dimension=dimension, dataset_size=dataset_size),
        model=np.zeros(dimension, np.float32),
        rounds=rounds,
    )
