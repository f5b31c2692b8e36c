"""A Grid that knows to whom each message went, when each answer came, and fetches those that come after their round."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

_POLL_SECONDS = 0.25


@dataclass(frozen=True, kw_only=True)
class Letter:
    """A message that was sent; `arrived` is when its answer came."""

    node: int
    kind: str
    group: str
    arrived: float = 0.0


class Carrier(Grid):
    """Wraps Flower's grid. An answer belongs to the node its question was sent to, whatever it says of itself.

    `send_and_receive` waits for the answers to its own messages and returns, with them, those to earlier messages that
    have come in the meantime; `letter_of` says which is which.
    """

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self.waiting: dict[str, Letter] = {}
        self._answered: dict[str, Letter] = {}
        self._kept: list[Message] = []

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        """Send, then wait until all of these are answered or `timeout` seconds have passed."""
        letters = list(messages)
        if not letters:
            return []
        end = None if timeout is None else time.monotonic() + timeout
        pushed = set(self.grid.push_messages(letters))
        own = set()
        for message in letters:
            data = message.metadata
            if data.message_id in pushed:  # else the SuperLink would not take it: it is missing like an unanswered one
                own.add(data.message_id)
                letter = Letter(node=data.dst_node_id, kind=data.message_type, group=data.group_id)
                self.waiting[data.message_id] = letter
        replies, self._kept = self._kept, []
        while True:
            replies += self._pull()
            left = _POLL_SECONDS if end is None else end - time.monotonic()
            if not own & self.waiting.keys() or left <= 0:
                return replies
            time.sleep(min(_POLL_SECONDS, left))

    def _pull(self) -> list[Message]:
        found = []
        for reply in self.grid.pull_messages(list(self.waiting)):
            question = reply.metadata.reply_to_message_id
            letter = self.waiting.pop(question, None)
            if letter is not None:
                self._answered[question] = replace(letter, arrived=time.monotonic())
                found.append(reply)
        return found

    def letter_of(self, reply: Message) -> Letter:
        """The message that this is the answer to; ask once."""
        return self._answered.pop(reply.metadata.reply_to_message_id)

    def keep(self, reply: Message, letter: Letter) -> None:
        """Put an answer back that is for somebody else: the next `send_and_receive` returns it."""
        self._answered[reply.metadata.reply_to_message_id] = letter
        self._kept.append(reply)

    def set_run(self, run: Any) -> None:
        """As the grid inside."""
        self.grid.set_run(run)

    @property
    def run(self) -> Any:
        """As the grid inside."""
        return self.grid.run

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        """Superseded in Flower by the constructor of `Message`; the same here."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        """The nodes that the SuperLink has heard of lately."""
        return self.grid.get_node_ids()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """As the grid inside."""
        return self.grid.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """As the grid inside."""
        return self.grid.pull_messages(message_ids)
