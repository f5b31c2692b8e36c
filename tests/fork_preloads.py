"""Imported by the server of `forked.py` before it forks: what takes long to import, and no thread is started."""

import dp_accounting.pld.privacy_loss_distribution  # noqa: F401
import numpy as np
import pytest  # noqa: F401
import sklearn.datasets  # noqa: F401
import torch._inductor  # noqa: F401  torch imports it when it first traces a model, and no import takes longer

import bqsgd._src.persample
import bqsgd._src.run
import bqsgd.data
import bqsgd.distributed  # noqa: F401
from bqsgd._src.codec import encode_frame
from bqsgd._src.noise import seeded_rng
from bqsgd._src.params import Mechanism

# numba reads its own tables when the first loop is loaded. So few numbers stay in this thread.
encode_frame(np.zeros(8), Mechanism(levels=1, trials=8), range=1.0, rng=seeded_rng(seed=0), client=0, round=0)
