"""The server of Algorithm 1 (Lines 11 to 15): it sends the model, checks and collects frames, aggregates and steps.

It never sees more of a client than its frames, and trusts none of them: a frame that is damaged, foreign, late,
doubled or made with other parameters is reported with its reason and skipped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from bqsgd.codec import Accumulator, decode_frame
from bqsgd.errors import BqsgdError, FrameError, InvalidParameter
from bqsgd.mechanism.coarsening import variance_at_zero
from bqsgd.params import Mechanism, check_positive
from bqsgd.planner.plan import MAX_BITS
from bqsgd.planner.search import largest_reach
from bqsgd.records.checkpoint import Arrays, CheckpointError, take
from bqsgd.records.record import ClientRecord, RoundRecord, Status
from bqsgd.secure.server import Total
from bqsgd.training.aggregation import aggregate, one_liar_in_sum, one_liar_moves, one_liar_words
from bqsgd.training.client_plan import sum_plan
from bqsgd.training.least_squares import LeastSquares
from bqsgd.training.optimisers import State, average, schedule
from bqsgd.training.settings import Config
from bqsgd.training.sums import SumOutcome
from bqsgd.training.way_down import WayDown
from bqsgd.wire.frame import Buffer, Frame, Header, read_frame

_MOST_REFUSED = 1000
"""Refused frames of which a round keeps the reasons; a flood of them must not fill the memory."""


@dataclass
class _OpenRound:
    """The round in progress."""

    opened: float
    asked: frozenset[int]
    bytes_models: int
    bytes_down: int
    sum: Accumulator | None
    frames: dict[int, Frame] = field(default_factory=dict)
    headers: dict[int, Header] = field(default_factory=dict)
    answers: dict[int, ClientRecord] = field(default_factory=dict)
    refused: list[ClientRecord] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=lambda: {"decode": 0.0, "aggregate": 0.0})
    bytes_up: int = 0
    total: Total | None = None

    def records(self) -> tuple[ClientRecord, ...]:
        """Clients in order. One whose only frame was refused is refused, not missing; further frames come last."""
        by_client = {entry.client: entry for entry in reversed(self.refused) if entry.client is not None}
        shown, used = [], set()
        for client in sorted(self.answers):
            entry = self.answers[client]
            if entry.status is Status.MISSING and client in by_client:
                entry = by_client[client]
                used.add(id(entry))
            shown.append(entry)
        return (*shown, *(entry for entry in self.refused if id(entry) not in used))


class Server:
    """The state of a run: model, optimiser, average, round.

    Args:
        model: the initial model, flat float32.
        weights: client number -> p_i > 0, never a client's own claim; only these clients are heard.
        config: the run's settings.
        least_squares: what the frames are solved for, where they hold moments and no gradients.
        clock: seconds, for the deadline.

    The mean is a running sum in O(d) memory; robust rules keep the frames until the round closes. The sum is taken in
    the order of arrival, so engines hand frames over in the order of client numbers to give the same model bit by bit.
    """

    def __init__(
        self,
        *,
        model: npt.NDArray[np.float32],
        weights: Mapping[int, float],
        config: Config,
        least_squares: LeastSquares | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if model.ndim != 1 or model.dtype != np.float32:
            raise InvalidParameter(f"model must be a flat float32 vector, got {model.dtype} {model.shape}")
        if not weights:
            raise InvalidParameter("weights must name at least one client")
        total = sum(check_positive(f"weight of client {client}", weight) for client, weight in weights.items())
        self.weights = {client: weights[client] / total for client in sorted(weights)}
        self.config, self.model, self.round = config, model.copy(), 0
        self.least_squares = least_squares
        self.dimension = model.size if least_squares is None else least_squares.dimension
        """Coordinates of a frame."""
        self.optimiser = config.server.make_optimiser()
        self.state: State = self.optimiser.init(model.size)
        self.averaged = model.astype(np.float64) if config.server.average else None
        self.sums = sum_plan(config, dimension=self.dimension) if config.secure.on else None
        """The plan of the secure sums, where the run has them."""
        self.way_down = WayDown(self.model, bits=config.server.down_bits)
        self.largest_code_count = self._largest_code_count()
        self._clock = clock
        self._open: _OpenRound | None = None

    def _largest_code_count(self) -> int:
        """A client that claims more trials than any budget allows could send values without limit."""
        privacy = self.config.privacy
        if privacy.mechanism is not None:
            return privacy.mechanism.code_count
        return 1 << max([privacy.bits, *(change.bits for change in privacy.budgets if change.bits is not None)])

    def _within_reach(self, mechanism: Mechanism) -> bool:
        """Few codes may stand for large values where they are coarsened; none larger than a plan can ask for."""
        if mechanism.coarsening is None:
            return True
        bits = (self.largest_code_count - 1).bit_length()
        return mechanism.reach <= largest_reach(bits) and mechanism.fine_code_count <= 1 << MAX_BITS

    @property
    def one_liar(self) -> str:
        """How far one lying client can move the aggregate, from the settings."""
        settings, fixed = self.config.server, self.config.privacy.mechanism
        if self.sums is not None:
            return one_liar_in_sum(self.sums)
        bits = (self.largest_code_count - 1).bit_length()
        order = sorted(self.weights.values())
        together = min(len(order), self.config.clients.cohort or len(order))
        moves = one_liar_moves(
            settings.aggregation,
            weights=[*order[: together - 1], order[-1]],  # the cohort in which the heaviest client weighs most
            fewest_frames=settings.fewest_frames,
            byzantine=settings.byzantine,
            reach=largest_reach(bits) if fixed is None else fixed.reach,
        )
        return one_liar_words(moves, rule=settings.aggregation, clients=together, fewest_frames=settings.fewest_frames)

    @property
    def best_model(self) -> npt.NDArray[np.float32]:
        """The model to use: the exponential average where there is one."""
        return self.model if self.averaged is None else self.averaged.astype(np.float32)

    def open_round(self, asked: Iterable[int] | None = None) -> dict[int, bytes]:
        """Begin a round in which these clients are asked (all by default): client -> the message for it.

        Clients that are sent the same are given the same object.
        """
        if self._open is not None:
            raise InvalidParameter(f"round {self.round} is open already; close it first")
        if self.round >= self.config.run.rounds:
            raise InvalidParameter(f"all {self.config.run.rounds} rounds are done")
        numbers = sorted(self.weights if asked is None else set(asked))
        foreign = next((client for client in numbers if client not in self.weights), None)
        if foreign is not None or not numbers:
            raise InvalidParameter(
                f"a round asks some of the run's clients, got {numbers[:5]}, of which {foreign} is none"
            )
        messages = {client: self.way_down.message(client, model=self.model, round=self.round) for client in numbers}
        streaming = self.config.server.aggregation == "mean"
        self._open = _OpenRound(
            opened=self._clock(),
            asked=frozenset(numbers),
            bytes_models=sum(map(len, messages.values())),
            bytes_down=sum(map(len, messages.values())),
            sum=Accumulator(self.dimension) if streaming else None,
        )
        return messages

    def whole_model(self, client: int) -> bytes:
        """The message for a client that does not hold the model whose changes it was sent."""
        current = self._current()
        message = self.way_down.message(client, model=self.model, round=self.round, whole=True)
        current.bytes_down += len(message)
        return message

    def receive(self, frame: Buffer, *, sender: int | None = None, arrived: float | None = None) -> ClientRecord:
        """Check one frame and take it in.

        sender: the client the engine knows it came from, if it does. arrived: when it came, on the server's clock;
        None for now. An engine that puts frames into order says it, so that waiting for one makes no other late.
        """
        current = self._current()
        started = time.perf_counter()
        size = memoryview(frame).nbytes  # type: ignore[arg-type]
        current.bytes_up += size
        try:
            header = self._take_in(current, frame, sender, arrived)
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

    def _take_in(self, current: _OpenRound, frame: Buffer, sender: int | None, arrived: float | None) -> Header:
        encoder_range = self.config.range
        checked = read_frame(frame, dimension=self.dimension, range=encoder_range, client=sender)
        header = checked.header
        if header.client not in self.weights:
            raise FrameError(f"client {header.client} is foreign to this run")
        if header.round != self.round:
            kind = "a replay or late" if header.round < self.round else "ahead"
            raise FrameError(f"a frame of round {header.round} in round {self.round}: {kind}")
        if header.client not in current.asked:
            raise FrameError(f"client {header.client} was not asked in round {self.round}")
        if header.client in current.headers:
            raise FrameError(f"a second frame of client {header.client} in round {self.round}")
        if header.mechanism.code_count > self.largest_code_count or not self._within_reach(header.mechanism):
            raise FrameError(f"{header.mechanism} passes the {self.largest_code_count} codes that the budgets allow")
        if self.config.privacy.mechanism is not None and header.mechanism != self.config.privacy.mechanism:
            raise FrameError(f"{header.mechanism} is not the mechanism of this run, {self.config.privacy.mechanism}")
        limit = self.config.server.deadline_seconds
        came = self._clock() if arrived is None else arrived
        if limit is not None and came - current.opened > limit:
            raise FrameError(f"it came after the deadline of {limit:g} s")
        if current.sum is not None:
            current.sum.add(checked, range=encoder_range, weight=self.weights[header.client])
        else:
            decode_frame(checked, range=encoder_range)  # refuse it now, not when the round closes
            # A copy of the payload: the engine may reuse its buffer before the round closes.
            current.frames[header.client] = Frame(header=header, payload=checked.payload.copy())
        return header

    def receive_sum(self, found: SumOutcome) -> None:
        """Take in the secure sum of this round, and what became of each client in it."""
        current, plan = self._current(), self.sums
        assert plan is not None
        current.total = found.total
        current.bytes_up += found.bytes_up
        current.bytes_down += found.bytes_down - current.bytes_models
        current.seconds["secure sum"] = found.seconds
        survivors = () if found.total is None else found.total.survivors
        for client in survivors:
            self.way_down.received(client, round=self.round)
            current.answers[client] = ClientRecord(
                client=client,
                status=Status.OK,
                frame_bytes=found.masked[client],
                levels=plan.levels,
                trials=plan.trials,
            )
        for client, (declined, reason) in found.trouble.items():
            if client in self.weights:
                self._note(client, Status.DECLINED if declined else Status.MISSING, reason)
        for client in current.asked:
            reason = "it has no keys in this batch of rounds" if found.lost is None else f"no sum: {found.lost}"
            self._note(client, Status.MISSING, reason)

    def decline(self, client: int, reason: str) -> ClientRecord:
        """A client said that it sends nothing this round."""
        self.way_down.received(client, round=self.round)
        return self._note(client, Status.DECLINED, reason)

    def missing(self, client: int, reason: str) -> ClientRecord:
        """An engine knows that a client will not answer this round."""
        return self._note(client, Status.MISSING, reason)

    def _note(self, client: int, status: Status, reason: str) -> ClientRecord:
        current = self._current()
        if client not in self.weights:
            raise InvalidParameter(f"client {client} is foreign to this run")
        answer = ClientRecord(client=client, status=status, reason=reason)
        return current.answers.setdefault(client, answer)

    def close_round(self) -> RoundRecord:
        """Aggregate what came, step, and go on to the next round. Below the quorum the model stays as it is."""
        current = self._current()
        started = time.perf_counter()
        for client in current.asked:
            current.answers.setdefault(client, ClientRecord(client=client, status=Status.MISSING, reason="no answer"))
        used = len(current.headers) if current.total is None else len(current.total.survivors)
        stepped = used >= self.config.server.fewest_frames
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
            or (current.total is not None and current.total.seeded),
            bytes_up=current.bytes_up,
            bytes_down=current.bytes_down,
            bytes_up_float32=4 * self.dimension * used,
            bytes_down_float32=4 * self.model.size * len(current.asked),
            seconds=current.seconds,
        )
        self._open = None
        self.round += 1
        return record

    def _step(self, current: _OpenRound) -> None:
        settings = self.config.server
        if current.total is not None and self.sums is not None:
            survivors = len(current.total.survivors)
            gradient = self.sums.mean(current.total.lanes, survivors=survivors) * self.config.range
        elif current.sum is not None:
            gradient = current.sum.mean()
        else:
            order = sorted(current.frames)
            encoder_range = self.config.range
            updates = np.stack([decode_frame(current.frames[client], range=encoder_range) for client in order])
            gradient = aggregate(settings.aggregation, updates, weights=None, byzantine=settings.byzantine)
        variance = self._noise_variance(current)
        if self.least_squares is not None:
            state, step = self.state, self.model - self.least_squares.solve(gradient, noise_variance=variance)
        else:
            rate = settings.learning_rate * schedule(settings.schedule, round=self.round, rounds=self.config.run.rounds)
            state, step = self.optimiser.update(self.state, gradient, learning_rate=rate, noise_variance=variance)
        with np.errstate(over="ignore"):
            diverged = not bool(np.isfinite((self.model - step).astype(np.float32)).all())
        if diverged:
            raise BqsgdError(f"the model diverged in round {self.round} and was not changed; lower the learning rate")
        model = self.way_down.move(self.model, step)
        self.state, self.model = state, model
        if self.averaged is not None:
            self.averaged = average(self.averaged, model, decay=self.config.server.average, round=self.round)

    def _noise_variance(self, current: _OpenRound) -> float:
        """The noise's variance per coordinate of the mean: sum p_i^2 (C / s_i)^2 m_i / 4 (not coarsened); public."""
        if current.total is not None and self.sums is not None:
            return self.sums.variance(len(current.total.survivors)) * self.config.range**2
        total = sum(self.weights[client] for client in current.headers)
        return sum(
            (self.weights[client] / total * self.config.range / header.mechanism.levels) ** 2
            * variance_at_zero(header.mechanism)
            for client, header in sorted(current.headers.items())
        )

    def _current(self) -> _OpenRound:
        if self._open is None:
            raise InvalidParameter("no round is open; call open_round first")
        return self._open

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Everything a checkpoint must hold besides the round, for `restore`."""
        arrays: dict[str, npt.NDArray[Any]] = {"model": self.model}
        arrays |= {f"optimiser.{name}": array for name, array in self.state.items()}
        if self.way_down.wanted is not None:
            arrays["wanted"] = self.way_down.wanted
        return arrays if self.averaged is None else arrays | {"averaged": self.averaged}

    def restore(self, arrays: Arrays, *, round: int) -> None:
        """Go on from a checkpoint; arrays of another shape, dtype or name are refused and nothing is changed."""
        expected = self.arrays()
        if set(arrays) != set(expected):
            raise CheckpointError(f"the checkpoint holds {sorted(arrays)}, this run needs {sorted(expected)}")
        taken = {name: take(arrays, name, like) for name, like in expected.items()}
        if self._open is not None or not 0 <= round <= self.config.run.rounds:
            raise CheckpointError(
                f"cannot continue from round {round} of {self.config.run.rounds} while a round is open"
            )
        self.model, self.round = taken["model"], round
        self.state = {name: taken[f"optimiser.{name}"] for name in self.state}
        self.averaged = taken.get("averaged")
        self.way_down.restore(taken.get("wanted"))
