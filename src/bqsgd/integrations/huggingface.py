"""Private training with Hugging Face: `PrivateTrainer` for transformers, `prepare_private` for Accelerate.

Needs the extra: pip install 'bqsgd[huggingface]'.
"""

from bqsgd._src.integrations.huggingface import PrivateTrainer, prepare_private

__all__ = ["PrivateTrainer", "prepare_private"]
