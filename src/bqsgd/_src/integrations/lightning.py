"""Private training inside Lightning's Trainer: one callback; the module and the Trainer stay as they are.

    trainer = L.Trainer(max_epochs=20, callbacks=[PrivateTraining(epsilon=3, delta=1e-5, ledger="me.ledger")])
    trainer.fit(module, loader)

The callback gives the module a private backward and Poisson batches. The module's own `training_step` says what the
loss of one sample is: it runs on batches of one, on copies, and what it logs there goes nowhere.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from bqsgd._src.errors import InvalidParameter
from bqsgd._src.private._batches import Batch
from bqsgd._src.private.loop import Private, make_private

_PATCHED = ("training_step", "backward")


class PrivateTraining(L.Callback):
    """Makes `trainer.fit` private. Works with automatic optimization, one optimizer and one process.

    Args: as `bqsgd.make_private`, which is given model, optimizer, loader, loss and epochs by the Trainer.

    The metric `epsilon` is logged after every epoch. A checkpoint of the Trainer holds the state of private training,
    and `ckpt_path` continues it. The ledger is closed when training ends.
    """

    def __init__(self, **settings: Any) -> None:
        self._settings = settings
        self._state: dict[str, Any] | None = None
        self.private: Private | None = None
        """Private training of the last fit: its plan, guarantee and steps."""

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Plan; nothing is spent yet. Lightning has made the optimizers and not yet the batches."""
        _check(trainer, pl_module)
        source = trainer.fit_loop._data_source
        loader = source.dataloader()
        if not isinstance(loader, torch.utils.data.DataLoader):
            raise InvalidParameter(f"private training takes one DataLoader, got {type(loader).__name__}")
        private = make_private(
            pl_module,
            trainer.optimizers[0],
            loader,
            loss_fn=_as_it_is,
            forward=_loss_of_one,
            epochs=_epochs(trainer, loader),
            **self._settings,
        )
        if self._state is not None and "study" not in self._settings:
            private.load_state_dict(self._state)
        source.instance, source.name = private.loader, ""
        waiting: list[Batch] = []

        def training_step(batch: Any, *_: Any) -> Tensor:
            waiting[:] = [batch]
            # Not the loss, which is private. Lightning wants a number that it can call backward for.
            return torch.zeros((), device=pl_module.device, requires_grad=True)

        def backward(*_: Any, **__: Any) -> None:
            with trainer.precision_plugin.train_step_context():
                private.backward(waiting.pop())

        # Set on the instance: type(pl_module).training_step is still the module's own.
        for name, method in zip(_PATCHED, (training_step, backward), strict=True):
            object.__setattr__(pl_module, name, method)
        self.private = private

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Log what is spent."""
        guarantee = None if self.private is None else self.private.guarantee()
        if guarantee is not None:
            pl_module.log("epsilon", guarantee.epsilon, prog_bar=True)

    def state_dict(self) -> dict[str, Any]:
        """For Lightning's checkpoints."""
        return {} if self.private is None else self.private.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """From one of Lightning's checkpoints."""
        self._state = state_dict or None

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Refuse a checkpoint of other training: its steps would be taken again without being the same training."""
        if trainer.state.fn == "fit" and self.state_key not in checkpoint.get("callbacks", {}):
            raise InvalidParameter("the checkpoint was not saved by private training; load its weights alone")

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Give the module its own methods back, and close the ledger."""
        self._leave(pl_module)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """As `teardown`."""
        self._leave(pl_module)

    def _leave(self, pl_module: L.LightningModule) -> None:
        for name in _PATCHED:
            vars(pl_module).pop(name, None)
        if self.private is not None:
            self.private.close()


def _check(trainer: L.Trainer, module: L.LightningModule) -> None:
    """Raise InvalidParameter for what would change a released gradient, or would release it in another way."""
    wrong = None
    if trainer.world_size > 1:
        wrong = "its processes would share one data set: use one device, or torchrun with make_private"
    elif not module.automatic_optimization:
        wrong = "with manual optimization call make_private and private.backward(batch) in your own training_step"
    elif len(trainer.optimizers) != 1:
        wrong = f"it needs exactly one optimizer, got {len(trainer.optimizers)}"
    elif trainer.gradient_clip_val:
        wrong = "leave out gradient_clip_val: every sample's gradient is clipped already (clip)"
    elif trainer.accumulate_grad_batches != 1:
        wrong = "leave out accumulate_grad_batches: give the loader the whole batch size, and micro_batch for memory"
    elif getattr(trainer.precision_plugin, "scaler", None) is not None:
        wrong = 'precision="16-mixed" scales gradients: use "bf16-mixed" or "32"'
    elif getattr(trainer, "overfit_batches", 0):
        wrong = "leave out overfit_batches: batches are drawn from all samples"
    if wrong is not None:
        raise InvalidParameter(f"private training in Lightning: {wrong}")


def _epochs(trainer: L.Trainer, loader: Any) -> int:
    """Passes over the data that the Trainer will make at most."""
    bounds: list[int] = [] if trainer.max_epochs in (None, -1) else [trainer.max_epochs]
    if trainer.max_steps not in (None, -1):
        bounds.append(math.ceil(trainer.max_steps / max(1, math.ceil(len(loader.dataset) / (loader.batch_size or 1)))))
    if not bounds:
        raise InvalidParameter("give the Trainer max_epochs or max_steps: the budget is planned for them")
    return min(bounds)


def _loss_of_one(model: nn.Module, batch: Any) -> tuple[Tensor, None]:
    """The module's own loss of a batch of one, and no targets."""
    assert isinstance(model, L.LightningModule)
    step = type(model).training_step
    with _logging_nothing(model):
        # Lightning gives the number of the batch to a second parameter of any name.
        found = step(model, batch) if len(inspect.signature(step).parameters) == 2 else step(model, batch, 0)
    return (found["loss"] if isinstance(found, Mapping) else found).reshape(1), None


class _NoTrainer:
    """In the place of the Trainer: the copy has none, and Lightning would say that every epoch and step is number 0."""

    def __getattr__(self, name: str) -> Any:
        raise InvalidParameter(
            f"training_step asks the Trainer for {name!r}, and in private training it runs on a copy that has no "
            "Trainer: set an attribute of the module before it, for example in on_train_epoch_start, and read that"
        )


@contextmanager
def _logging_nothing(model: nn.Module) -> Iterator[None]:
    own, names = vars(model), ("log", "log_dict", "_trainer")
    before: dict[str, Any] = {name: own[name] for name in names if name in own}
    own.update(dict.fromkeys(names, lambda *_, **__: None) | {"_trainer": _NoTrainer()})
    try:
        yield
    finally:
        for name in names:
            del own[name]
        own.update(before)


def _as_it_is(loss: Tensor, _: None) -> Tensor:
    return loss
