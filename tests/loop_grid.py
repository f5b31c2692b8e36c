"""A Flower grid without a network: messages go straight to a ClientApp, in one process, through Flower's own bytes."""

import time
import uuid

from flwr.app import Context, Error, Message, RecordDict
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity


class LoopGrid(Grid):
    """Nodes with a node configuration each; `tamper(client, round, reply)` may change, delay or lose an answer.

    An answer is delayed by returning ("late", reply): it is there only when the next messages are pushed.
    """

    def __init__(self, app, run_config, node_configs, tamper=None):
        self.app, self.run_config, self.tamper = app, dict(run_config), tamper
        self.contexts = {
            1000 + place: Context(1, 1000 + place, dict(config), RecordDict(), self.run_config)
            for place, config in enumerate(node_configs)
        }
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1  # as Flower's own programs do
        self.offline = set()
        self.replies, self.delayed, self.sent = {}, {}, []

    def push_messages(self, messages):
        self.replies |= self.delayed
        self.delayed = {}
        pushed = []
        for message in messages:
            number = uuid.uuid4().hex
            message.metadata.__dict__["_message_id"] = number
            self.sent.append(message)
            pushed.append(number)
            node = message.metadata.dst_node_id
            reply = self._carried(self.app(self._carried(message), self.contexts[node]))
            if self.tamper is not None:
                reply = self.tamper(node - 1000, message, reply)
            if isinstance(reply, Error):
                reply = Message(reply, reply_to=message)
            if isinstance(reply, tuple):
                self.delayed[number] = reply[1]
            elif reply is not None:
                self.replies[number] = reply
        return pushed

    @staticmethod
    def _carried(message):
        """As the other side reads it from the wire."""
        return message_from_proto(message_to_proto(message))

    def pull_messages(self, message_ids):
        return [self.replies.pop(number) for number in message_ids if number in self.replies]

    def get_node_ids(self):
        return [node for node in self.contexts if node not in self.offline]

    def send_and_receive(self, messages, *, timeout=None):
        time.sleep(0)
        return self.pull_messages(self.push_messages(messages))

    def set_run(self, run):
        raise NotImplementedError

    @property
    def run(self):
        raise NotImplementedError

    def create_message(self, *_arguments, **_options):
        raise NotImplementedError
