"""torch.distributed: each rank a client, rank 0 also serves. And a communication hook for existing DDP scripts."""

from bqsgd.engines.distributed.engine import Distributed
from bqsgd.engines.distributed.group import Group, joined
from bqsgd.engines.distributed.hook import BQHookState, NoGuaranteeWarning, bq_hook
from bqsgd.engines.distributed.private_steps import PrivateSteps
from bqsgd.engines.distributed.session import DistributedSession
from bqsgd.engines.distributed.taking_part import take_part

__all__ = [
    "BQHookState",
    "Distributed",
    "DistributedSession",
    "Group",
    "NoGuaranteeWarning",
    "PrivateSteps",
    "bq_hook",
    "joined",
    "take_part",
]
