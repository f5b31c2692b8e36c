"""torch.distributed: every rank is a client and rank 0 is the server as well; and a hook for existing DDP scripts.

`join` enters the process group. Rank 0 gives `torch_distributed(group)` to `Run.start` as its engine, and every other
rank calls `work`. `bq_hook` is a communication hook for DDP; with `PrivateSteps` it has a guarantee.
"""

from bqsgd._src.engines.torch_distributed.client import work
from bqsgd._src.engines.torch_distributed.engine import torch_distributed
from bqsgd._src.engines.torch_distributed.hook import BQHookState, PrivateSteps, bq_hook
from bqsgd._src.engines.torch_distributed.ranks import join

__all__ = ["BQHookState", "PrivateSteps", "bq_hook", "join", "torch_distributed", "work"]
