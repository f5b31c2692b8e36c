"""The server of Algorithm 1 (Lines 11 to 15): it sends the model, checks and collects frames, aggregates and steps.

It never sees more of a client than its frames, and trusts none of them: a frame that is damaged, foreign, late,
doubled or made with other parameters is reported with its reason and skipped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
import numpy.typing as npt

from bqsgd.codec import Accumulator, decode_frame
from bqsgd.errors import BqsgdError, FrameError, InvalidParameter
from bqsgd.mechanism.coarsening import variance_at_zero
from bqsgd.params import Mechanism, check_positive
from bqsgd.planner.coarsening_window import largest_reach
from bqsgd.planner.plan import MAX_BITS
from bqsgd.training.aggregation import aggregate, smallest_quorum
from bqsgd.training.checkpoint import Arrays, CheckpointError, take
from bqsgd.training.config import Config
from bqsgd.training.optimisers import State, average, schedule
from bqsgd.training.receipts import DECLINED, MISSING, OK, REFUSED, OpenRound, Outcome, Receipt, explained
from bqsgd.wire.frame import Buffer, Frame, Header, read_frame
from bqsgd.wire.model_message import write_model


class Server:
    """The state of a run: model, optimiser, average, round.

    Args:
        model: the initial model, flat float32.
        weights: client number -> p_i > 0 (usually its number of samples); only these clients are heard.
        config: the run's settings.
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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if model.ndim != 1 or model.dtype != np.float32:
            raise InvalidParameter(f"model must be a flat float32 vector, got {model.dtype} {model.shape}")
        if not weights:
            raise InvalidParameter("weights must name at least one client")
        total = sum(check_positive(f"weight of client {client}", weight) for client, weight in weights.items())
        self.weights = {client: weights[client] / total for client in sorted(weights)}
        self.config, self.model, self.round = config, model.copy(), 0
        self.optimiser = config.make_optimiser()
        self.state: State = self.optimiser.init(model.size)
        self.averaged = model.astype(np.float64) if config.average else None
        self.largest_code_count = self._largest_code_count()
        self._clock = clock
        self._open: OpenRound | None = None

    def _largest_code_count(self) -> int:
        """A client that claims more trials than any budget allows could send values without limit."""
        if self.config.mechanism is not None:
            return self.config.mechanism.code_count
        bits = [self.config.bits, *(change.bits for change in self.config.budgets if change.bits is not None)]
        return 1 << max(bits)

    def _within_reach(self, mechanism: Mechanism) -> bool:
        """Few codes may stand for large values where they are coarsened; none larger than a plan can ask for."""
        if mechanism.coarsening is None:
            return True
        bits = (self.largest_code_count - 1).bit_length()
        return mechanism.reach <= largest_reach(bits) and mechanism.fine_code_count <= 1 << MAX_BITS

    @property
    def best_model(self) -> npt.NDArray[np.float32]:
        """The model to use: the exponential average where there is one."""
        return self.model if self.averaged is None else self.averaged.astype(np.float32)

    def open_round(self) -> bytes:
        """Begin a round; returns the message for every client."""
        if self._open is not None:
            raise InvalidParameter(f"round {self.round} is open already; close it first")
        if self.round >= self.config.rounds:
            raise InvalidParameter(f"all {self.config.rounds} rounds are done")
        message = write_model(self.model, round=self.round)
        streaming = self.config.aggregation == "mean"
        self._open = OpenRound(
            opened=self._clock(),
            bytes_down=len(message) * len(self.weights),
            sum=Accumulator(self.model.size) if streaming else None,
        )
        return message

    def receive(self, frame: Buffer, *, sender: int | None = None, arrived: float | None = None) -> Receipt:
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
            receipt = Receipt(
                client=sender, status=REFUSED, reason=f"{type(error).__name__}: {error}", frame_bytes=size
            )
            current.refused.append(receipt)
            return receipt
        finally:
            current.seconds["decode"] += time.perf_counter() - started
        used = header.mechanism
        coarse = {} if used.coarsening is None else asdict(used.coarsening)
        receipt = Receipt(
            client=header.client, status=OK, frame_bytes=size, levels=used.levels, trials=used.trials, **coarse
        )
        current.headers[header.client] = header
        current.receipts[header.client] = receipt
        return receipt

    def _take_in(self, current: OpenRound, frame: Buffer, sender: int | None, arrived: float | None) -> Header:
        encoder_range = self.config.encoder_range
        checked = read_frame(frame, dimension=self.model.size, range=encoder_range, client=sender)
        header = checked.header
        if header.client not in self.weights:
            raise FrameError(f"client {header.client} is foreign to this run")
        if header.round != self.round:
            kind = "a replay or late" if header.round < self.round else "ahead"
            raise FrameError(f"a frame of round {header.round} in round {self.round}: {kind}")
        if header.client in current.headers:
            raise FrameError(f"a second frame of client {header.client} in round {self.round}")
        if header.mechanism.code_count > self.largest_code_count or not self._within_reach(header.mechanism):
            raise FrameError(f"{header.mechanism} passes the {self.largest_code_count} codes that the budgets allow")
        if self.config.mechanism is not None and header.mechanism != self.config.mechanism:
            raise FrameError(f"{header.mechanism} is not the mechanism of this run, {self.config.mechanism}")
        limit = self.config.deadline_seconds
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

    def decline(self, client: int, reason: str) -> Receipt:
        """A client said that it sends nothing this round."""
        return self._note(client, DECLINED, reason)

    def missing(self, client: int, reason: str) -> Receipt:
        """An engine knows that a client will not answer this round."""
        return self._note(client, MISSING, reason)

    def _note(self, client: int, status: str, reason: str) -> Receipt:
        current = self._current()
        if client not in self.weights:
            raise InvalidParameter(f"client {client} is foreign to this run")
        receipt = Receipt(client=client, status=status, reason=reason)
        return current.receipts.setdefault(client, receipt)

    def close_round(self) -> Outcome:
        """Aggregate what came, step, and go on to the next round. Below the quorum the model stays as it is."""
        current = self._current()
        started = time.perf_counter()
        for client in self.weights:
            current.receipts.setdefault(client, Receipt(client=client, status=MISSING, reason="no answer"))
        needed = max(self.config.quorum, smallest_quorum(self.config.aggregation, byzantine=self.config.byzantine))
        stepped = len(current.headers) >= needed
        if stepped:
            self._step(current)
        current.seconds["aggregate"] += time.perf_counter() - started
        receipts = [current.receipts[client] for client in sorted(current.receipts)]
        outcome = Outcome(
            round=self.round,
            stepped=stepped,
            receipts=tuple(explained(receipts, current.refused)),
            seeded=any(header.seeded for header in current.headers.values()),
            bytes_up=current.bytes_up,
            bytes_down=current.bytes_down,
            seconds=current.seconds,
        )
        self._open = None
        self.round += 1
        return outcome

    def _step(self, current: OpenRound) -> None:
        if current.sum is not None:
            gradient = current.sum.mean()
        else:
            order = sorted(current.frames)
            encoder_range = self.config.encoder_range
            updates = np.stack([decode_frame(current.frames[client], range=encoder_range) for client in order])
            gradient = aggregate(self.config.aggregation, updates, weights=None, byzantine=self.config.byzantine)
        rate = self.config.learning_rate * schedule(self.config.schedule, round=self.round, rounds=self.config.rounds)
        state, step = self.optimiser.update(
            self.state, gradient, learning_rate=rate, noise_variance=self._noise_variance(current)
        )
        model = (self.model - step).astype(np.float32)
        if not bool(np.isfinite(model).all()):
            raise BqsgdError(f"the model diverged in round {self.round} and was not changed; lower the learning rate")
        self.state, self.model = state, model
        if self.averaged is not None:
            self.averaged = average(self.averaged, model, decay=self.config.average, round=self.round)

    def _noise_variance(self, current: OpenRound) -> float:
        """Variance a coordinate the noise gives the mean: sum p_i^2 (C / s_i)^2 m_i / 4 (not coarsened); public."""
        total = sum(self.weights[client] for client in current.headers)
        return sum(
            (self.weights[client] / total * self.config.encoder_range / header.mechanism.levels) ** 2
            * variance_at_zero(header.mechanism)
            for client, header in sorted(current.headers.items())
        )

    def _current(self) -> OpenRound:
        if self._open is None:
            raise InvalidParameter("no round is open; call open_round first")
        return self._open

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Everything a checkpoint must hold besides the round, for `restore`."""
        arrays: dict[str, npt.NDArray[Any]] = {"model": self.model}
        arrays |= {f"optimiser.{name}": array for name, array in self.state.items()}
        return arrays if self.averaged is None else arrays | {"averaged": self.averaged}

    def restore(self, arrays: Arrays, *, round: int) -> None:
        """Go on from a checkpoint; arrays of another shape, dtype or name are refused and nothing is changed."""
        expected = self.arrays()
        if set(arrays) != set(expected):
            raise CheckpointError(f"the checkpoint holds {sorted(arrays)}, this run needs {sorted(expected)}")
        taken = {name: take(arrays, name, like) for name, like in expected.items()}
        if self._open is not None or not 0 <= round <= self.config.rounds:
            raise CheckpointError(f"cannot go on from round {round} of {self.config.rounds} while a round is open")
        self.model, self.round = taken["model"], round
        self.state = {name: taken[f"optimiser.{name}"] for name in self.state}
        self.averaged = taken.get("averaged")
