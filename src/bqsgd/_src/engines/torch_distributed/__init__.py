"""torch.distributed: each rank is a client, and rank 0 serves as well. And a hook for existing DDP scripts."""

from bqsgd._src.engines.torch_distributed.client import RunDeclined, work
from bqsgd._src.engines.torch_distributed.engine import TorchDistributed, torch_distributed
from bqsgd._src.engines.torch_distributed.hook import BQHookState, NoGuaranteeWarning, PrivateSteps, bq_hook
from bqsgd._src.engines.torch_distributed.ranks import RankGroup, join

__all__ = [
    "BQHookState",
    "NoGuaranteeWarning",
    "PrivateSteps",
    "RankGroup",
    "RunDeclined",
    "TorchDistributed",
    "bq_hook",
    "join",
    "torch_distributed",
    "work",
]
