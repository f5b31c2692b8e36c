"""Private training in Lightning's real Trainer: the user's module and Trainer stay as they are, but for a callback."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bqsgd
from bqsgd.clips import L2

L = pytest.importorskip("lightning")
pytestmark = pytest.mark.filterwarnings("ignore")
QUIET = bqsgd.Mechanism(levels=1, trials=2000)
EXACT = bqsgd.Mechanism(levels=1000, trials=0)
QUIETLY = {
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
}


class Net(L.LightningModule):
    """As in Lightning's quickstart: a mean loss, which is logged, and a scheduler."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.save_hyperparameters()
        self.layer = nn.Linear(4, 2)

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        loss = nn.functional.cross_entropy(self.layer(inputs), targets)
        self.log("train_loss", loss, on_step=True)
        return {"loss": loss}

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", nn.functional.cross_entropy(self.layer(batch[0]), batch[1]))

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def loader(batch_size=8):
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(32, 4, generator=generator), torch.arange(32) % 2)
    return DataLoader(data, batch_size=batch_size, shuffle=True)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """A Trainer writes into the current folder unless it is told otherwise."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def parts(tmp_path):
    from bqsgd.integrations.lightning import PrivateTraining

    def make(*, privacy=None, callbacks=(), **settings):
        chosen = {"epsilon": 8, "delta": 1e-5, "ledger": tmp_path / "me.ledger", "mechanism": QUIET, "range": 0.5}
        training = PrivateTraining(**chosen | (privacy or {}))
        settings = {"max_epochs": 2, "accelerator": "cpu", "default_root_dir": tmp_path} | QUIETLY | settings
        return L.Trainer(callbacks=[training, *callbacks], **settings), training

    return make


def test_an_ordinary_module_is_trained_in_private_and_every_step_counts(parts):
    module, seen = Net(), []

    class Watch(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            seen.append(
                (float(outputs["loss"]), dict(trainer.callback_metrics), trainer.optimizers[0].param_groups[0]["lr"])
            )

    trainer, training = parts(callbacks=[Watch()])
    before = module.layer.weight.detach().clone()
    trainer.fit(module, loader(), loader())
    assert trainer.global_step == training.private.steps == 8
    assert not torch.equal(module.layer.weight, before)
    assert training.private.dropped == 0
    assert [loss for loss, *_ in seen] == [0.0] * 8
    assert not any("train_loss" in metrics for _, metrics, _ in seen)
    assert "train_loss" not in trainer.callback_metrics
    assert "val_loss" in trainer.callback_metrics
    assert float(trainer.callback_metrics["epsilon"]) == pytest.approx(training.private.guarantee().epsilon)
    assert seen[-1][2] == 0.5**9  # the module's own schedule, a step of it after each step
    # The module is its own again.
    assert module.training_step.__func__ is Net.training_step
    assert "backward" not in vars(module)


def test_the_gradient_is_the_mean_of_the_clipped_gradients_of_the_modules_own_loss(parts):
    """Without noise and with every sample in the batch: what is left is the rounding of the encoder."""
    loose = {"epsilon": 1e9, "mechanism": EXACT, "ledger": None, "seed": 0, "clip": L2(1e3), "range": 2.0}
    trainer, _ = parts(privacy=loose, max_steps=1)
    module, plain, data = Net(), Net(), loader(32)
    trainer.fit(module, data)
    inputs, targets = data.dataset.tensors
    nn.functional.cross_entropy(plain.layer(inputs), targets).backward()
    with torch.no_grad():
        expected = plain.layer.weight - 0.5 * plain.layer.weight.grad
    assert module.layer.weight.detach() == pytest.approx(expected, abs=0.5 * 4e-3)


class UnnamedIndex(Net):
    def training_step(self, batch, _):
        return super().training_step(batch, _)


class WithoutIndex(Net):
    def training_step(self, batch):
        return super().training_step(batch, 0)


@pytest.mark.parametrize("module", [UnnamedIndex, WithoutIndex])
def test_a_training_step_may_name_its_second_parameter_as_it_likes(parts, module):
    trainer, training = parts(max_steps=1)
    trainer.fit(module(), loader())
    assert (training.private.steps, training.private.dropped) == (1, 0)


def test_mixed_precision_is_the_trainers(parts):
    trainer, training = parts(precision="bf16-mixed", max_steps=2)
    trainer.fit(Net(), loader())
    assert training.private._objective.autocast.dtype == torch.bfloat16
    assert (training.private.steps, training.private.dropped) == (2, 0)


def test_a_checkpoint_continues_where_it_was_saved(parts, tmp_path):
    keep = L.pytorch.callbacks.ModelCheckpoint(
        tmp_path / "kept", every_n_train_steps=3, save_top_k=-1, filename="{step}"
    )
    trainer, _ = parts(callbacks=[keep], enable_checkpointing=True, max_steps=5, privacy={"reserve": 1})
    trainer.fit(Net(), loader())
    trainer, again = parts(max_steps=5, privacy={"reserve": 1})
    trainer.fit(Net(), loader(), ckpt_path=tmp_path / "kept" / "step=3.ckpt")
    assert trainer.global_step == again.private.steps == 5
    with bqsgd.Ledger(tmp_path / "me.ledger") as ledger:
        assert ledger.spent_rounds == 7  # two steps twice, with noise of their own each time
    Net.load_from_checkpoint(tmp_path / "kept" / "step=3.ckpt")
    plain = L.Trainer(max_epochs=1, accelerator="cpu", default_root_dir=tmp_path, **QUIETLY)
    plain.fit(Net(), loader())
    plain.save_checkpoint(tmp_path / "plain.ckpt")
    with pytest.raises(bqsgd.InvalidParameter, match="not saved by private training"):
        parts()[0].fit(Net(), loader(), ckpt_path=tmp_path / "plain.ckpt")


class Annealed(Net):
    """Reads the epoch where Lightning would say 0 in every epoch, or as an attribute."""

    def __init__(self, *, by_trainer):
        super().__init__()
        self.by_trainer, self.factor, self.sizes = by_trainer, 1.0, []

    def on_train_epoch_start(self):
        self.factor = float(self.current_epoch == 1)

    def training_step(self, batch, batch_idx):
        factor = self.current_epoch if self.by_trainer else self.factor
        return super().training_step(batch, batch_idx)["loss"] * factor

    def on_before_optimizer_step(self, optimizer):
        self.sizes.append(float(self.layer.weight.grad.norm()))


def test_what_changes_from_epoch_to_epoch_is_an_attribute(parts):
    loose = {"epsilon": 1e9, "mechanism": EXACT, "ledger": None, "seed": 0, "clip": L2(10.0)}
    with pytest.raises(bqsgd.InvalidParameter, match=r"'current_epoch'.*set an attribute"):
        parts(privacy=loose)[0].fit(Annealed(by_trainer=True), loader(32))
    module = Annealed(by_trainer=False)
    parts(privacy=loose)[0].fit(module, loader(32))
    assert module.sizes[0] == 0 < module.sizes[1]


class TwoOptimizers(Net):
    def configure_optimizers(self):
        return [torch.optim.SGD(self.parameters(), lr=0.1), torch.optim.SGD(self.parameters(), lr=0.1)]


class ByHand(Net):
    automatic_optimization = False


@pytest.mark.parametrize(
    ("module", "settings", "match"),
    [
        (Net, {"gradient_clip_val": 1.0}, "leave out gradient_clip_val"),
        (Net, {"accumulate_grad_batches": 2}, "leave out accumulate_grad_batches"),
        (Net, {"max_epochs": -1}, "max_epochs or max_steps"),
        (Net, {"overfit_batches": 1}, "leave out overfit_batches"),
        (ByHand, {}, "in your own training_step"),
    ],
)
def test_what_would_change_a_released_gradient_is_refused(parts, module, settings, match):
    with pytest.raises(bqsgd.InvalidParameter, match=match):
        parts(**settings)[0].fit(module(), loader())


def test_an_error_in_mid_training_gives_the_module_its_methods_back(parts):
    class Stop(L.Callback):
        def on_train_batch_end(self, *_):
            raise RuntimeError("enough")

    module = Net()
    trainer, training = parts(callbacks=[Stop()])
    with pytest.raises(RuntimeError, match="enough"):
        trainer.fit(module, loader())
    assert "training_step" not in vars(module)
    assert training.private.steps == 1


class WithAutomaticOptimization(Net):
    """What a newcomer writes without the callback: it spent, and did not move the weights."""

    def training_step(self, batch, batch_idx):
        self.private.backward(batch)


def test_automatic_optimization_without_the_callback_is_an_error(parts, tmp_path):
    module = WithAutomaticOptimization()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    module.configure_optimizers = lambda: optimizer
    module.private = bqsgd.make_private(
        module.layer, optimizer, loader(), loss_fn=nn.CrossEntropyLoss(reduction="none"), epsilon=8, delta=1e-5,
        epochs=1, ledger=tmp_path / "me.ledger", mechanism=QUIET, range=0.5,
    )  # fmt: skip
    trainer = L.Trainer(max_epochs=1, accelerator="cpu", default_root_dir=tmp_path, **QUIETLY)
    with pytest.raises(bqsgd.InvalidParameter, match="would train nothing"):
        trainer.fit(module, module.private.loader)
