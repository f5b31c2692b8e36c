"""The server of Algorithm 1 (Lines 11 to 15): it sends the model, checks and collects frames, aggregates and steps.

The server sees nothing of a client but its frames, and trusts none of them. It skips a frame that is damaged, late,
sent twice, made with other parameters or from a client outside the run, and records the reason.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from bqsgd._src.client.least_squares import LeastSquares
from bqsgd._src.codec import Accumulator, decode_frame
from bqsgd._src.descent.centre import Centre
from bqsgd._src.descent.descent import Descent, moved
from bqsgd._src.descent.optimizers import State, average, optimizer_of
from bqsgd._src.errors import BqsgdError, FrameError, InvalidParameter
from bqsgd._src.mechanism.coarsening import variance_at_zero
from bqsgd._src.params import Mechanism, check_positive
from bqsgd._src.planner.plan import MAX_BITS
from bqsgd._src.planner.search import largest_reach
from bqsgd._src.planner.sums import variance_of_groups
from bqsgd._src.records.checkpoint import Arrays, CheckpointError, take
from bqsgd._src.records.record import ClientRecord, RoundRecord, Status
from bqsgd._src.secure.opening import Total
from bqsgd._src.server.aggregation import aggregate, one_liar_in_sum, one_liar_moves, one_liar_words
from bqsgd._src.server.least_squares import solve
from bqsgd._src.server.sums import SumOutcome
from bqsgd._src.server.way_down import WayDown
from bqsgd._src.settings.client_plan import sum_plans
from bqsgd._src.settings.config import Config
from bqsgd._src.settings.groups import CENTRED
from bqsgd._src.subset import Subsets
from bqsgd._src.wire.frame import Buffer, Frame, Header, read_frame
from bqsgd._src.wire.model_message import model_bytes
from bqsgd._src.wire.model_steps import STEPS_HEADER_BYTES, Aggregate
from bqsgd._src.wire.reply import Reply

_MOST_REFUSED = 1000
"""How many refused frames a round keeps the reasons of; a flood of bad frames must not fill the memory."""


@dataclass
class _OpenRound:
    """The round in progress."""

    opened: float
    asked: frozenset[int]
    bytes_models: int
    """The part of `bytes_down` for the models that were sent when the round was opened."""
    bytes_down: int
    sum: Accumulator | None
    frames: dict[int, Frame] = field(default_factory=dict)
    headers: dict[int, Header] = field(default_factory=dict)
    answers: dict[int, ClientRecord] = field(default_factory=dict)
    refused: list[ClientRecord] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=lambda: {"decode": 0.0, "aggregate": 0.0})
    bytes_up: int = 0
    totals: dict[int, Total] = field(default_factory=dict)
    """Group -> its secure sum; all clients are group 0 if there are no groups."""

    def records(self) -> tuple[ClientRecord, ...]:
        """One record for each client, in ascending order, then the other refused frames.

        A client whose only frames were refused counts as refused, not as missing.
        """
        first_refusals = {entry.client: entry for entry in reversed(self.refused) if entry.client is not None}
        records, used = [], set()
        for client in sorted(self.answers):
            entry = self.answers[client]
            if entry.status is Status.MISSING and client in first_refusals:
                entry = first_refusals[client]
                used.add(id(entry))  # by identity: two refusals can be equal, and both must be kept
            records.append(entry)
        return (*records, *(entry for entry in self.refused if id(entry) not in used))


class Server:
    """The state of a run: model, optimizer, average, round.

    Args:
        model: the initial model, flat float32.
        weights: client number -> p_i > 0, never what a client claims. Frames of other clients are refused.
        config: the run's settings.
        least_squares: the problem to solve, if the frames contain moments instead of gradients.
        subsets: which coordinates the frames carry, if not all.
        centre: how the centre of the features is measured, in a centred run.
        clock: a clock in seconds, for the deadline.

    The mean is a running sum in O(d) memory; robust rules keep the frames until the round closes. Floating-point sums
    depend on their order, so engines hand over frames in the order of client numbers to get the same model bit by bit.
    """

    def __init__(
        self,
        *,
        model: npt.NDArray[np.float32],
        weights: Mapping[int, float],
        config: Config,
        least_squares: LeastSquares | None = None,
        subsets: Subsets | None = None,
        centre: Centre | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if model.ndim != 1 or model.dtype != np.float32:
            raise InvalidParameter(f"model must be a flat float32 vector, got {model.dtype} {model.shape}")
        if not weights:
            raise InvalidParameter("weights must contain at least one client")
        total = sum(check_positive(f"weight of client {client}", weight) for client, weight in weights.items())
        self.weights = {client: weights[client] / total for client in sorted(weights)}
        self.config, self.model, self.round = config, model.copy(), 0
        self.least_squares, self.subsets = least_squares, subsets
        if subsets is not None and subsets.dimension != model.size:
            raise InvalidParameter(f"subsets of {subsets.dimension} coordinates do not fit a model of {model.size}")
        if (centre is not None) != (config.run.method == CENTRED):
            raise InvalidParameter("a centred run needs the sizes of its centre, and no other run has one")
        self.whole = model.size if least_squares is None else least_squares.dimension
        """Coordinates that a round estimates."""
        self.dimension = self.whole if subsets is None else subsets.kept
        """Coordinates of a frame."""
        self.state: State = optimizer_of(config.server).init(model.size)
        self.averaged = model.astype(np.float64) if config.server.average else None
        self.sums = sum_plans(config, dimension=self.dimension)
        """The plans of a round's secure sums, one for each group of clients; none in a run without secure sums."""
        repeated = self.sums[0] if config.sends_sums else None
        self.descent = Descent(config=config, dimension=model.size, subsets=subsets, sums=repeated, centre=centre)
        self.way_down = WayDown(
            self.model, bits=config.server.down_bits, descent=self.descent if self._steps_are_shorter else None
        )
        self.range, self.mechanism = config.range, config.privacy.mechanism
        # With more codes than any budget of the run allows, a client could send values without limit.
        privacy = config.privacy
        most_bits = max([privacy.bits, *(change.bits for change in privacy.budgets if change.bits is not None)])
        self.largest_code_count = 1 << most_bits if self.mechanism is None else self.mechanism.code_count
        self._clock = clock
        self._open: _OpenRound | None = None

    @property
    def _steps_are_shorter(self) -> bool:
        """Whether clients can repeat the steps, and those between two turns of a client are shorter than a model."""
        if not self.config.repeats_steps:
            return False
        between = -(-self.config.clients.count // self.config.asked)
        return STEPS_HEADER_BYTES + between * self.descent.step_bytes < model_bytes(self.model.size)

    @property
    def _subsets_now(self) -> Subsets | None:
        """The subsets of coordinates in this round; None if messages carry all, or features."""
        return None if self.descent.measures(self.round) else self.subsets

    @property
    def _largest_reach(self) -> float:
        """The largest |value| in units of the range that a frame of this run may contain."""
        return largest_reach((self.largest_code_count - 1).bit_length())

    def _is_allowed(self, mechanism: Mechanism) -> bool:
        """Whether a frame may have this mechanism: no more codes, and no code for a larger value, than a plan has."""
        if mechanism.code_count > self.largest_code_count:
            return False
        # Coarsened, a few codes could cover any range.
        return mechanism.coarsening is None or (
            mechanism.reach <= self._largest_reach and mechanism.fine_code_count <= 1 << MAX_BITS
        )

    def one_liar(self, width: int = 0) -> str:
        """Sentences that say how far one lying client can move the aggregate. width: of the last secure sums, or 0."""
        settings = self.config.server
        if self.sums:
            return one_liar_in_sum(self.sums, rule=settings.aggregation, byzantine=settings.byzantine, width=width)
        order = sorted(self.weights.values())
        together = min(len(order), self.config.clients.cohort or len(order))
        moves = one_liar_moves(
            settings.aggregation,
            weights=[*order[: together - 1], order[-1]],  # the worst cohort: the heaviest client and the lightest
            fewest_frames=settings.fewest_frames,
            byzantine=settings.byzantine,
            reach=self._largest_reach if self.mechanism is None else self.mechanism.reach,
        )
        return one_liar_words(moves, rule=settings.aggregation, clients=together, fewest_frames=settings.fewest_frames)

    @property
    def best_model(self) -> npt.NDArray[np.float32]:
        """The model to use: the exponential average if the run keeps one, else the current model."""
        model = self.model if self.averaged is None else self.averaged.astype(np.float32)
        return model if self.descent.centre is None else self.descent.centre.plain(model)

    def open_round(self, asked: Iterable[int] | None = None) -> dict[int, bytes]:
        """Begin a round in which these clients are asked (all by default); returns client -> the message for it.

        Clients that get the same message get the same object.
        """
        if self._open is not None:
            raise InvalidParameter(f"round {self.round} is open already; close it first")
        if self.round >= self.config.run.rounds:
            raise InvalidParameter(f"all {self.config.run.rounds} rounds are done")
        numbers = sorted(self.weights if asked is None else set(asked))
        strangers = [client for client in numbers if client not in self.weights]
        if strangers or not numbers:
            reason = f"client {strangers[0]} is not part of it" if strangers else "none was named"
            raise InvalidParameter(f"a round must ask at least one client, all of this run; {reason}")
        messages = {client: self._message(client) for client in numbers}
        size = sum(map(len, messages.values()))
        estimated = self.whole if self._subsets_now is not None else self.dimension
        self._open = _OpenRound(
            opened=self._clock(),
            asked=frozenset(numbers),
            bytes_models=size,
            bytes_down=size,
            sum=Accumulator(estimated) if self.config.server.aggregation == "mean" else None,
        )
        return messages

    def _message(self, client: int, *, whole: bool = False) -> bytes:
        return self.way_down.message(client, model=self.model, state=self.state, round=self.round, whole=whole)

    def whole_model(self, client: int) -> bytes:
        """The message for a client that was sent changes or steps of a model that it does not hold."""
        current = self._current()
        message = self._message(client, whole=True)
        current.bytes_down += len(message)
        return message

    def take(self, reply: Reply) -> ClientRecord:
        """Take one client's reply to the open round: check and add its frame, or record why there is none."""
        if reply.frame is not None:
            return self.receive(reply.frame, sender=reply.client, arrived=reply.arrived)
        if reply.declined:
            self.way_down.received(reply.client, round=self.round)
        return self._note(reply)

    def receive(self, frame: Buffer, *, sender: int | None = None, arrived: float | None = None) -> ClientRecord:
        """Check one frame and add it to the round, or record why it is refused.

        sender: the client that sent it, if the engine knows. arrived: when it came, on the server's clock; None for
        now. An engine that hands frames over in order sets it, so that waiting for one client makes no other late.
        """
        current = self._current()
        started = time.perf_counter()
        size = memoryview(frame).nbytes  # type: ignore[arg-type]
        current.bytes_up += size
        try:
            header = self._check_and_add(current, frame, sender, arrived)
        except FrameError as error:
            answer = ClientRecord(
                client=sender, status=Status.REFUSED, reason=f"{type(error).__name__}: {error}", frame_bytes=size
            )
            if len(current.refused) < _MOST_REFUSED:
                current.refused.append(answer)
            return answer
        finally:
            current.seconds["decode"] += time.perf_counter() - started
        used = header.mechanism
        coarse = {} if used.coarsening is None else asdict(used.coarsening)
        answer = ClientRecord(
            client=header.client, status=Status.OK, frame_bytes=size, levels=used.levels, trials=used.trials, **coarse
        )
        current.headers[header.client] = header
        current.answers[header.client] = answer
        self.way_down.received(header.client, round=self.round)
        return answer

    def _check_and_add(self, current: _OpenRound, frame: Buffer, sender: int | None, arrived: float | None) -> Header:
        kept = None if self.subsets is None else self.subsets.header
        checked = read_frame(frame, binomial=True, dimension=self.dimension, range=self.range, kept=kept, client=sender)
        header = checked.header
        if header.client not in self.weights:
            raise FrameError(f"client {header.client} does not belong to this run")
        if header.round != self.round:
            kind = "a replay or late" if header.round < self.round else "ahead"
            raise FrameError(f"a frame of round {header.round} in round {self.round}: {kind}")
        if header.client not in current.asked:
            raise FrameError(f"client {header.client} was not asked in round {self.round}")
        if header.client in current.headers:
            raise FrameError(f"a second frame of client {header.client} in round {self.round}")
        if not self._is_allowed(header.mechanism):
            raise FrameError(f"{header.mechanism} exceeds the {self.largest_code_count} codes that the budgets allow")
        if self.mechanism is not None and header.mechanism != self.mechanism:
            raise FrameError(f"{header.mechanism} is not the mechanism of this run, {self.mechanism}")
        limit = self.config.server.deadline_seconds
        arrived = self._clock() if arrived is None else arrived
        if limit is not None and arrived - current.opened > limit:
            raise FrameError(f"it came after the deadline of {limit:g} s")
        if current.sum is not None:
            subsets = self._subsets_now
            subset = None if subsets is None else subsets.drawn(round=self.round, client=header.client)
            current.sum.add(checked, range=self.range, weight=self.weights[header.client], subset=subset, kept=kept)
        else:
            # Decoded only to find errors: refuse the frame now, since one bad frame at the close would cost the round.
            decode_frame(checked, range=self.range, kept=kept)
            # A copy of the payload: the engine may reuse its buffer before the round closes.
            current.frames[header.client] = Frame(header=header, payload=checked.payload.copy())
        return header

    def receive_sums(self, outcomes: Sequence[SumOutcome]) -> None:
        """Take the secure sum of each group in this round, and record what became of each client in it."""
        current = self._current()
        current.bytes_up += sum(outcome.bytes_up for outcome in outcomes)
        # Both count the models; count them once.
        current.bytes_down += sum(outcome.bytes_down for outcome in outcomes) - current.bytes_models
        # The exchanges of all groups travel together.
        current.seconds["secure sum"] = max(outcome.seconds for outcome in outcomes)
        for group, (outcome, plan) in enumerate(zip(outcomes, self.sums, strict=True)):
            if outcome.total is None:
                continue
            current.totals[group] = outcome.total
            for client in outcome.total.survivors:
                self.way_down.received(client, round=self.round)
                current.answers[client] = ClientRecord(
                    client=client,
                    status=Status.OK,
                    frame_bytes=outcome.masked[client],
                    levels=plan.levels,
                    trials=plan.trials,
                )
        for reply in (reply for outcome in outcomes for reply in outcome.trouble.values()):
            if reply.client in self.weights:
                self._note(reply)
        for client in current.asked:
            group = self.config.secure.group_of(client)
            lost, of_group = outcomes[group].lost, f" of group {group}" if len(outcomes) > 1 else ""
            reason = "it has no keys in this batch of rounds" if lost is None else f"no sum{of_group}: {lost}"
            self._note(Reply(client=client, reason=reason))

    def _note(self, reply: Reply) -> ClientRecord:
        """Record why a client has sent no frame, unless something is recorded of it already."""
        if reply.client not in self.weights:
            raise InvalidParameter(f"client {reply.client} does not belong to this run")
        status = Status.DECLINED if reply.declined else Status.MISSING
        reason = reply.reason or ("declined" if reply.declined else "no answer")
        record = ClientRecord(client=reply.client, status=status, reason=reason)
        return self._current().answers.setdefault(reply.client, record)

    def close_round(self) -> RoundRecord:
        """Aggregate the frames, step, and go on to the next round. Below the quorum the model stays as it is."""
        current = self._current()
        started = time.perf_counter()
        for client in current.asked:
            self._note(Reply(client=client))
        # A sum counts as many clients as are in it, and for a robust rule it is one update.
        used = sum(len(total.survivors) for total in current.totals.values()) if self.sums else len(current.headers)
        updates = len(current.totals) if self.sums else used
        stepped = used >= self.config.server.quorum and updates >= self.config.server.fewest_updates
        if stepped:
            self._step(current)
        else:
            self.way_down.move(self.model, None)
        current.seconds["aggregate"] += time.perf_counter() - started
        record = RoundRecord(
            round=self.round,
            stepped=stepped,
            clients=current.records(),
            seeded=any(header.seeded for header in current.headers.values())
            or any(total.seeded for total in current.totals.values()),
            bytes_up=current.bytes_up,
            bytes_down=current.bytes_down,
            bytes_up_float32=4 * self.whole * used,
            bytes_down_float32=4 * self.model.size * len(current.asked),
            sum_width=max((total.width for total in current.totals.values()), default=0),
            seconds=current.seconds,
        )
        self._open = None
        self.round += 1
        return record

    def _step(self, current: _OpenRound) -> None:
        released = self._aggregate(current)
        if released is not None:
            gradient, variance = self.descent.gradient(released, round=self.round)
        else:
            gradient, variance = self._gradient(current), self._read_variance(current)
        if self.least_squares is not None:
            state, step = self.state, self.model - solve(self.least_squares, gradient, noise_variance=variance)
        else:
            state, step = self.descent.step(self.state, gradient, model=self.model, variance=variance, round=self.round)
        # Checked before anything is assigned, so that the server still holds the last good model and state.
        with np.errstate(over="ignore"):
            diverged = not bool(np.isfinite(moved(self.model, step)).all())
        if diverged:
            raise BqsgdError(f"the model diverged in round {self.round} and was not changed; lower the learning rate")
        model = self.way_down.move(self.model, step, released)
        self.state, self.model = state, model
        if self.averaged is not None:
            self.averaged = average(self.averaged, model, decay=self.config.server.average, round=self.round)

    def _aggregate(self, current: _OpenRound) -> Aggregate | None:
        """What a client needs to repeat the step; None in a run whose clients cannot."""
        if self.config.sends_sums:
            total = current.totals[0]
            return Aggregate(messages=len(total.survivors), width=total.width, numbers=total.lanes)
        if self.sums:
            return Aggregate.estimate(
                self._mean_of_groups(current), messages=len(current.totals), variance=self._read_variance(current)
            )
        if current.sum is not None or not self.config.repeats_steps:
            return None
        return Aggregate.estimate(
            self._robust(current) / self.range,
            messages=len(current.frames),
            variance=self._read_variance(current),
        )

    def _gradient(self, current: _OpenRound) -> npt.NDArray[np.float64]:
        if current.sum is None:
            return self.descent.whole(self._robust(current), round=self.round)
        gradient, subsets = current.sum.mean(), self._subsets_now
        return gradient if subsets is None else subsets.rotated_back(gradient, round=self.round)

    def _robust(self, current: _OpenRound) -> npt.NDArray[np.float64]:
        """What the robust rule makes of the frames."""
        # In the order of the clients: a rule's floating-point sum depends on the order.
        frames = [current.frames[client] for client in sorted(current.frames)]
        kept = None if self.subsets is None else self.subsets.header
        updates = np.stack([decode_frame(frame, range=self.range, kept=kept) for frame in frames])
        return aggregate(self.config.server.aggregation, updates, byzantine=self.config.server.byzantine)

    def _mean_of_groups(self, current: _OpenRound) -> npt.NDArray[np.float64]:
        """The mean over all clients from the sums of their groups, or what a robust rule makes of the groups' means."""
        settings, totals = self.config.server, dict(sorted(current.totals.items()))
        survivors = [len(total.survivors) for total in totals.values()]
        means = np.stack(
            [
                self.sums[group].mean(total.lanes, survivors=count, width=total.width)
                for (group, total), count in zip(totals.items(), survivors, strict=True)
            ]
        )
        if settings.aggregation == "mean":
            return np.asarray(np.average(means, axis=0, weights=survivors), dtype=np.float64)
        return aggregate(settings.aggregation, means, byzantine=settings.byzantine)

    def _read_variance(self, current: _OpenRound) -> float:
        """The variance of the noise if something reads it, else 0."""
        adam = self.config.server.subtract_noise
        is_read = adam or self.least_squares is not None or self.descent.measures(self.round)
        return self._noise_variance(current) if is_read else 0.0

    def _noise_variance(self, current: _OpenRound) -> float:
        """The variance of the noise in a coordinate of the mean; public. Uncoarsened: sum p_i^2 (R / s_i)^2 m_i / 4."""
        # A kept coordinate is multiplied by one_in, and one in one_in is kept.
        share = 1 if self._subsets_now is None else self.config.clients.one_in
        if self.sums:
            groups = sorted(current.totals)
            survivors = [len(current.totals[group].survivors) for group in groups]
            return share * self.range**2 * variance_of_groups([self.sums[group] for group in groups], survivors)
        total = sum(self.weights[client] for client in current.headers)
        return share * sum(
            (self.weights[client] / total * self.range / header.mechanism.levels) ** 2
            * variance_at_zero(header.mechanism)
            for client, header in sorted(current.headers.items())
        )

    def _current(self) -> _OpenRound:
        if self._open is None:
            raise InvalidParameter("no round is open; call open_round first")
        return self._open

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Everything but the round that a checkpoint must hold for `restore`."""
        arrays: dict[str, npt.NDArray[Any]] = {"model": self.model}
        # Checkpoints on disk spell it "optimiser.", and old ones must stay readable.
        arrays |= {f"optimiser.{name}": array for name, array in self.state.items()}
        if self.way_down.wanted is not None:
            arrays["wanted"] = self.way_down.wanted
        return arrays if self.averaged is None else arrays | {"averaged": self.averaged}

    def restore(self, arrays: Arrays, *, round: int) -> None:
        """Continue from a checkpoint.

        Raises:
            CheckpointError: an array has another shape, dtype or name, or the round is wrong; nothing is changed.
        """
        expected = self.arrays()
        if set(arrays) != set(expected):
            raise CheckpointError(f"the checkpoint holds {sorted(arrays)}, this run needs {sorted(expected)}")
        taken = {name: take(arrays, name, like) for name, like in expected.items()}
        if self._open is not None or not 0 <= round <= self.config.run.rounds:
            raise CheckpointError(
                f"cannot continue from round {round} of {self.config.run.rounds}: the round must be in that range, and "
                "no round may be open"
            )
        self.model, self.round = taken["model"], round
        self.state = {name: taken[f"optimiser.{name}"] for name in self.state}
        self.averaged = taken.get("averaged")
        self.way_down.restore(taken.get("wanted"))
