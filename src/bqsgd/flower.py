"""Private clients on Flower: a ClientApp and a ServerApp that carry frames between a Flower server and its nodes.

    app = client_app(task)      # client_app.py of a Flower app
    app = server_app(task)      # server_app.py

`bqsgd flower init DIR` writes an app that uses them. Needs the extra: pip install 'bqsgd[flower]'.
"""

from bqsgd._src.flower import MissingExtra
from bqsgd._src.flower.client_app import client_app
from bqsgd._src.flower.server_app import server_app
from bqsgd._src.flower.settings import Node

__all__ = ["MissingExtra", "Node", "client_app", "server_app"]
