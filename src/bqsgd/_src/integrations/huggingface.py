"""Private training inside Hugging Face: a `Trainer`, and one function for loops on Accelerate.

    trainer = PrivateTrainer(model, args, train_dataset=data, privacy=dict(epsilon=3, delta=1e-5, ledger="me.ledger",
                             sample={"input_ids": [0] * 128, "labels": 0}))
    trainer.train()

The Trainer's own `compute_loss` says what the loss of one sample is: it runs on batches of one, on copies. The mean
training loss is private, so it is not logged; epsilon is logged in its place.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, default_collate
from transformers import Trainer
from transformers.trainer_utils import TrainOutput

from bqsgd._src.errors import InvalidParameter
from bqsgd._src.private._batches import Batch, PoissonLoader
from bqsgd._src.private.loop import Private, make_private
from bqsgd._src.storage import read_regular, write_atomic

_STATE = "bqsgd.json"
_MOST_STATE = 1 << 20
_PRIVATE = ("loss", "train_loss")
"""What a Trainer logs of the training data."""
_SPEED = ("train_runtime", "train_samples_per_second", "train_steps_per_second", "total_flos")
_BESIDE = frozenset({"grad_norm", "learning_rate", "epoch", *_SPEED})
"""What a Trainer logs of its own beside the training loss; `grad_norm` is of the released gradient."""


class PrivateTrainer(Trainer):
    """A `Trainer` whose training is private; evaluation, prediction and checkpoints are the Trainer's own.

    Args:
        privacy: the settings of `bqsgd.make_private` other than model, optimizer, loader, loss and epochs.

    All other arguments are those of `Trainer`. A private step takes `per_device_train_batch_size *
    gradient_accumulation_steps` samples on average, and one step of the optimizer is made of it; the first of the two
    is what is in memory at a time. `max_grad_norm` is not used, because each sample is clipped (`clip`).
    Checkpoints hold the state of private training; `resume_from_checkpoint` continues it.
    """

    def __init__(self, *args: Any, privacy: Mapping[str, Any], **named: Any) -> None:
        given = named.get("args", args[1] if len(args) > 1 else None)
        if given is None:
            raise InvalidParameter("give PrivateTrainer its args: a TrainingArguments with the number of epochs")
        own = copy.copy(given)
        own.gradient_accumulation_steps, own.ignore_data_skip = 1, True
        own.per_device_train_batch_size = given.per_device_train_batch_size * given.gradient_accumulation_steps
        if "args" in named:
            named["args"] = own
        else:
            args = (args[0], own, *args[2:])
        super().__init__(*args, **named)
        _check_accelerator(self.accelerator)
        _check_arguments(own)
        self._privacy = {"micro_batch": given.per_device_train_batch_size} | dict(privacy)
        self._made: Private | None = None
        self._is_computing = False
        """Whether the loss of a sample is being computed. What `compute_loss` logs then is private and goes nowhere."""

    @property
    def private(self) -> Private:
        """Private training: its plan, guarantee and steps. Made when it is first asked for; nothing is spent then."""
        if self._made is None:
            loader = _in_dicts(super().get_train_dataloader())
            steps = math.ceil(len(loader.dataset) / (loader.batch_size or 1))  # type: ignore[arg-type]
            planned = self.args.max_steps / steps if self.args.max_steps > 0 else self.args.num_train_epochs

            # A function, not a method: it is copied with the model, and a method would be with the whole Trainer.
            def loss_of_one(model: nn.Module, batch: Any) -> tuple[Tensor, None]:
                self._is_computing = True
                try:
                    return self.compute_loss(model, dict(batch)).reshape(1), None
                finally:
                    self._is_computing = False

            self._made = make_private(
                self.model,
                _bare(self.create_optimizer()),
                loader,
                loss_fn=_as_it_is,
                forward=loss_of_one,
                epochs=math.ceil(planned),
                **self._privacy,
            )
        return self._made

    def get_train_dataloader(self) -> PoissonLoader:  # type: ignore[override]
        """Poisson batches, each for one step."""
        if self._made is not None and self._made.model is not getattr(self.model, "_orig_mod", self.model):
            raise InvalidParameter(
                "the Trainer has another model now (model_init makes one in every train()), and private training was "
                "planned for the first: use a new PrivateTrainer for each model"
            )
        return self.private.loader

    def training_step(self, model: nn.Module, inputs: Batch, num_items_in_batch: Any = None) -> Tensor:  # type: ignore[override]
        """Put the private gradient of a batch into `.grad`. Returns zero, because the loss is private."""
        model.train()
        with self.compute_loss_context_manager():
            self.private.backward(inputs)
        return torch.zeros((), device=self.args.device)

    def train(self, *args: Any, **named: Any) -> TrainOutput:
        """As `Trainer.train`; the loss in what it returns is NaN, because it is private.

        Raises:
            BudgetExhausted: a step would exceed the budget. The model is that of the step before.
        """
        done = super().train(*args, **named)
        return TrainOutput(done.global_step, math.nan, _public(done.metrics))

    def log(self, logs: dict[str, float], *args: Any, **named: Any) -> None:
        """Log what is public: epsilon in the place of the training loss."""
        if self._is_computing:
            return
        guarantee = self._made.guarantee() if self._made is not None and not logs.keys().isdisjoint(_PRIVATE) else None
        spent = {} if guarantee is None else {"epsilon": guarantee.epsilon}
        super().log(_public(logs) | spent, *args, **named)

    def floating_point_ops(self, inputs: Any) -> int:
        """0: how much a step computes tells how many samples were drawn."""
        return 0

    def _get_train_sampler(self, *_: Any, **__: Any) -> None:
        """None: Poisson batches take the place of whatever would be drawn."""

    def _get_num_items_in_batch(self, *_: Any) -> None:
        """None: how many tokens were drawn is private, and a sample's loss is its own mean."""

    def _clip_grad_norm(self, model: nn.Module) -> None:
        """None: a released gradient stays as it is."""

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        write_atomic(Path(output_dir) / _STATE, json.dumps(self.private.state_dict()).encode())

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None or "study" in self._privacy:
            return
        content = read_regular(Path(checkpoint) / _STATE, limit=_MOST_STATE)
        try:
            state = json.loads(content or b"")
        except (ValueError, RecursionError) as error:
            raise InvalidParameter(f"{checkpoint} is not a checkpoint of private training ({_STATE})") from error
        self.private.load_state_dict(state if isinstance(state, dict) else {})


def prepare_private(
    accelerator: Accelerator, model: nn.Module, optimizer: Optimizer, loader: DataLoader[Any], **settings: Any
) -> Private:
    """`bqsgd.make_private` on the device of an Accelerator, in the place of `accelerator.prepare`.

    In the loop, `private.step(batch)` takes the place of `accelerator.backward(loss)` and `optimizer.step()`; put it in
    `with accelerator.autocast():` for mixed precision.

    Args:
        settings: as for `make_private`.

    Raises:
        InvalidParameter: the Accelerator has several processes, or scales gradients.
    """
    _check_accelerator(accelerator)
    model = accelerator.unwrap_model(model).to(accelerator.device)
    return make_private(model, _bare(optimizer), _in_dicts(loader), **settings)


def _check_accelerator(accelerator: Accelerator) -> None:
    if accelerator.num_processes > 1 or accelerator.distributed_type != "NO":
        raise InvalidParameter(
            "private training with Accelerate takes one process, because several would share one data set: start one, "
            "or use torchrun with make_private, where each rank has data of its own"
        )
    if accelerator.scaler is not None:
        raise InvalidParameter("fp16 scales gradients, and released ones must stay as they are: use bf16")
    if accelerator.gradient_accumulation_steps != 1:
        raise InvalidParameter(
            "leave out gradient_accumulation_steps: give the loader the whole batch size, and make_private a "
            "micro_batch for the memory"
        )


def _check_arguments(args: Any) -> None:
    """Raise InvalidParameter for arguments that would tell how large a batch is, or need its samples."""
    wrong = None
    if args.n_gpu > 1:
        wrong = "it takes one device; set CUDA_VISIBLE_DEVICES"
    elif args.include_num_input_tokens_seen != "no":
        wrong = "leave out include_num_input_tokens_seen: how many tokens were drawn is private"
    elif args.auto_find_batch_size:
        wrong = "leave out auto_find_batch_size: the batch size is public and fixed in advance"
    elif args.dataloader_drop_last:
        wrong = "leave out dataloader_drop_last: batches are drawn, so there is no last one"
    if wrong is not None:
        raise InvalidParameter(f"PrivateTrainer: {wrong}")


def _public(logs: Mapping[str, float]) -> dict[str, float]:
    """Beside a training loss only the Trainer's own figures: subclasses put in what `compute_loss` kept of samples."""
    if logs.keys().isdisjoint(_PRIVATE):
        return dict(logs)
    return {name: figure for name, figure in logs.items() if name in _BESIDE}


def _bare(optimizer: Optimizer) -> Optimizer:
    """The optimizer that Accelerate may have wrapped."""
    found: Optimizer = getattr(optimizer, "optimizer", optimizer)
    return found


class _Dict:
    """A collate function whose result is a plain dict where the wrapped one's is another mapping."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate = collate

    def __call__(self, records: list[Any]) -> Any:
        batch = self._collate(records)
        return dict(batch) if isinstance(batch, Mapping) else batch


def _in_dicts(loader: DataLoader[Any]) -> DataLoader[Any]:
    """The same loader; its batches are plain dicts. Tokenizers collate into mappings that torch does not know."""
    if loader.collate_fn is default_collate:  # it is known to keep samples apart, and need not see them one by one
        return loader
    own = copy.copy(loader)
    own.collate_fn = _Dict(cast(Any, loader.collate_fn))
    return own


def _as_it_is(loss: Tensor, _: None) -> Tensor:
    return loss
