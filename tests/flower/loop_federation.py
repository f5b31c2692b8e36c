"""A federation on a loop grid: what the tests of single messages and of secure sums share."""

import functools
from dataclasses import replace

from bqsgd._src.flower.server_app import serve
from bqsgd._src.flower.settings import Service, read_settings
from bqsgd._src.ledger import Ledger
from bqsgd.flower import client_app
from loop_grid import LoopGrid


class LoopFederation:
    """Nodes that share `task`; node N keeps its ledger in the folder node-N.

    All nodes compute with one network: each message brings the parameters, and torch traces the network once.
    `test_engines_agree` has a network for each message, as Flower's processes have.
    """

    def __init__(self, task, folder, settings, places, tamper):
        self.task, self.folder, self.settings, self.made = task, folder, settings, 0
        self.network = functools.cache(task.make_model)
        self.grid = LoopGrid(client_app(self.own), settings, places, tamper)

    def own(self, config, node, options):
        if node is None:
            return replace(self.task, shares=[])
        self.made += 1
        return replace(self.task, make_model=self.network, shares=[self.task.shares[node.client]])

    def serve(self, **service):
        config, _, options = read_settings(self.settings)
        service = Service(**{"join_seconds": 60.0, "force": True, **service})
        return serve(self.grid, config, service, self.own(config, None, options))

    def spent(self):
        """Client -> messages that its ledger counts."""
        found = {}
        for path in self.folder.glob("node-*/client-*.ledger"):
            with Ledger(path) as ledger:
                found[int(path.stem.removeprefix("client-"))] = ledger.spent_rounds
        return found
