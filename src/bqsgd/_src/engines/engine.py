"""What an engine is: it carries bytes between the server and its clients, and reports their guarantees.

An engine contains no algorithm. `run` and `engines.round` decide who is asked, with which bytes, in how many exchanges.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import nn

from bqsgd._src.client.client import Client, client_sender
from bqsgd._src.client.files import client_folder, client_ledger, client_log
from bqsgd._src.client.objective import Objective
from bqsgd._src.client.objectives import objective_of
from bqsgd._src.client.samples import reader_of
from bqsgd._src.client.sums import SumSetup
from bqsgd._src.errors import InvalidParameter
from bqsgd._src.ledger import Ledger, Register
from bqsgd._src.params import short_repr
from bqsgd._src.privacy.guarantee import Guarantee
from bqsgd._src.release import Scheme, Unit
from bqsgd._src.server.aggregation import client_weights
from bqsgd._src.settings.config import Config
from bqsgd._src.settings.node_limits import NodeLimits
from bqsgd._src.tasks.task import Samples, Task
from bqsgd._src.wire.reply import Reply

_MAX_JSON = 1 << 16
_MAX_SAMPLES = 2**40


class Engine(Protocol):
    """What a run needs from an engine.

    The defaults are those of an engine whose clients are in processes of their own.
    """

    samples: Mapping[int, int]
    """Client -> its number of samples, or what it counts as (`counted_samples`), for all clients of the run."""
    claimed: bool = True
    """Whether `samples` is what clients say about themselves. No weight may depend on it then."""
    lost: Mapping[int, str] = {}
    """Client -> why it can never reply again."""

    def exchange(self, messages: Mapping[int, bytes], *, round: int, enough: int | None = None) -> Iterable[Reply]:
        """Carry these bytes to these clients and yield their replies in the order of client numbers.

        enough: stop waiting once this many clients have sent bytes.

        A client that cannot be reached has a reply too, with the reason. Replies to an earlier exchange that come late
        are yielded as well; their bytes say what they are. Clients that get the same message share one bytes object.
        """

    def seconds(self) -> Mapping[str, float]:
        """Stage -> the time that clients spent on it in the last exchange.

        Empty for clients elsewhere: how long a stage takes depends on the size of the batch, so they do not tell.
        """
        return {}

    def guarantees(self, *, delta: float) -> Mapping[int, Guarantee | None]:
        """Client -> what its ledger says it has spent; None if it has sent nothing private."""

    def close(self) -> None:
        """End the run on every client, and close the ledgers that this process holds."""


def check_known(asked: Iterable[int], clients: Container[int]) -> list[int]:
    """The clients that are asked, in order. Raises InvalidParameter if a client does not belong to this run."""
    numbers = sorted(asked)
    for number in numbers:
        if number not in clients:
            raise InvalidParameter(f"client {number} does not belong to this run")
    return numbers


def read_guarantee(text: str | bytes) -> Guarantee | None:
    """The guarantee that a client states, or None if the text is not one. The server cannot verify it."""
    # The size first: a hostile client could send megabytes of brackets.
    try:
        return Guarantee.from_dict(json.loads(text)) if len(text) <= _MAX_JSON else None
    except (ValueError, RecursionError):  # InvalidParameter is a ValueError; deep nesting raises RecursionError
        return None


@dataclass(frozen=True, kw_only=True, eq=False)
class Setup:
    """What an engine is made from.

    folder: for the ledgers; None to keep none. resuming: the ledgers must exist. sizes: client -> samples, from the
    server's own list, if there is one. sums: what the run's secure sums need, if it has them.
    """

    task: Task
    config: Config
    folder: Path | None
    resuming: bool
    dimension: int
    sizes: Mapping[int, int] | None = None
    sums: SumSetup | None = None

    def check_separate(self) -> None:
        """Check the settings for clients in processes of their own, which the server need not trust.

        Raises:
            InvalidParameter: the weights would depend on what clients say about themselves, or the clients' keys were
                made in this process.
        """
        client_weights(self.config.server.weights, {}, claimed=True, sizes=self.sizes)  # for its check alone
        if self.sums is not None and self.sums.simulated:
            raise InvalidParameter(
                "secure sums between processes need a roster of the clients' identity keys, and each client needs its "
                "own key: set roster and identity (bqsgd secure keygen, bqsgd secure roster)"
            )

    def counted_samples(self, client: int, claimed: object) -> int:
        """The number of samples that a client counts as.

        claimed: what the client says; any value, as it may come from a hostile one.

        Raises:
            InvalidParameter: the client is not on the list of sizes, or the run does not allow its claim.
        """
        privacy = self.config.privacy
        listed = None if self.sizes is None else self.sizes.get(client)
        if self.sizes is not None and listed is None:
            raise InvalidParameter(f"client {client} is not on the list of sizes")
        if privacy.unit == Unit.CLIENT:
            return privacy.batch_size  # the guarantee hides how many samples a client has, so its claim is ignored
        fewest = privacy.batch_size if privacy.scheme is Scheme.FIXED_SIZE else 1
        # `type`, not `isinstance`: True is an int too.
        if type(claimed) is not int or not fewest <= claimed < _MAX_SAMPLES:
            raise InvalidParameter(f"client {client} claims {short_repr(claimed)} samples; this run needs {fewest}")
        if listed is not None and claimed > listed:
            raise InvalidParameter(f"client {client} claims {claimed} samples, the list of sizes has {listed}")
        return claimed

    @property
    def run(self) -> str:
        """The run's name in the ledgers."""
        return self.config.run.name or "run"


MakeEngine = Callable[[Setup], Engine]
FEW = 100
"""With more simulated clients than this, all share one register of ledgers."""


def make_client(
    setup: Setup,
    *,
    number: int,
    model: nn.Module,
    share: Samples,
    limits: NodeLimits | None = None,
    register: Register | None = None,
    objective: Objective | None = None,
) -> Client:
    """Client `number` with its ledger open and, if the settings ask for it, its private log.

    limits: for a client that need not trust the server. register: holds its ledger among those of many clients.
    """
    config, folder = setup.config, setup.folder
    if register is not None:
        ledger: Ledger | None = register.ledger(number)
    else:
        ledger = client_ledger(config, folder, number=number, resuming=setup.resuming, limits=limits)
    sums = None
    if setup.sums is not None:
        sums = setup.sums.client(number, folder=client_folder(folder, limits), seed=config.privacy.seed)
    task = setup.task
    return Client(
        config,
        objective or objective_of(config, model, task.loss_fn, task.forward),
        reader_of(share, task.sample),
        client_sender(config, number, ledger, run=setup.run, resume=setup.resuming),
        sums=sums,
        limits=limits,
        private_log=client_log(config, folder, number=number),
    )
