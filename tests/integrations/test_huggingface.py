"""Private training in the real Trainer of transformers and on the real Accelerate, with a tiny transformer."""

import functools
import importlib.util
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import bqsgd
from bqsgd.clips import L2

pytestmark = pytest.mark.filterwarnings("ignore")
EXACT = bqsgd.Mechanism(levels=1000, trials=0)
QUIET = bqsgd.Mechanism(levels=1, trials=2000)
LENGTH = 6
ROOT = Path(__file__).resolve().parents[2]


class Sentences(Dataset):
    """Records as tokenizers give them, in one or two lengths."""

    def __init__(self, lengths=1, count=24):
        self.lengths = lengths
        generator = torch.Generator().manual_seed(0)
        self.ids = torch.randint(1, 20, (count, LENGTH), generator=generator).tolist()

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, n):
        ids = self.ids[n][: LENGTH - n % self.lengths]
        return {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": self.ids[n][0] % 2}


MADE_UP = {"input_ids": [0] * LENGTH, "attention_mask": [1] * LENGTH, "labels": 0}


def classifier():
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    return BertForSequenceClassification(
        BertConfig(vocab_size=20, max_position_embeddings=8, hidden_dropout_prob=0.0, **sizes)
    )


@pytest.fixture
def trainer(tmp_path):
    from transformers import TrainingArguments

    from bqsgd.integrations.huggingface import PrivateTrainer

    def make(*, ledger="me.ledger", privacy=None, lengths=1, **arguments):
        chosen = {"per_device_train_batch_size": 6, "num_train_epochs": 1, "save_strategy": "no", "logging_steps": 1}
        args = TrainingArguments(
            tmp_path / "out", report_to=[], disable_tqdm=True, use_cpu=True, **chosen | {"seed": 1} | arguments
        )
        settings = {"epsilon": 8, "delta": 1e-5, "ledger": tmp_path / ledger, "mechanism": QUIET, "range": 0.5}
        settings |= {"sample": MADE_UP} | (privacy or {})
        sets = {"train_dataset": Sentences(lengths), "eval_dataset": Sentences()}
        return PrivateTrainer(classifier(), args, privacy=settings, **sets)

    return make


def test_each_step_of_the_trainer_is_private_counted_and_logged_without_the_loss(trainer, tmp_path):
    made = trainer(gradient_accumulation_steps=2, lengths=2)
    before = made.model.classifier.weight.detach().clone()
    done = made.train()
    assert done.global_step == made.private.steps == 2  # 24 samples, batches of 2 times 6 on average
    assert made.private.plan.release.terms.sampling.rate == pytest.approx(0.5)
    assert not torch.equal(made.model.classifier.weight, before)
    assert made.private.dropped == 0
    logs = [entry for entry in made.state.log_history if "learning_rate" in entry]
    assert [entry["step"] for entry in logs] == [1, 2]
    assert [entry["epsilon"] for entry in logs] == sorted(entry["epsilon"] for entry in logs)
    assert logs[-1]["epsilon"] == made.private.guarantee().epsilon > 0
    told = [*made.state.log_history, done.metrics]
    assert not any(name in entry for entry in told for name in ("loss", "train_loss"))
    assert done.training_loss != done.training_loss  # NaN
    assert made.state.total_flos == 0
    assert "eval_loss" in made.evaluate()


def test_the_gradient_is_the_mean_of_the_clipped_gradients_of_the_trainers_own_loss(trainer):
    """Without noise and with every sample in the batch: what is left is the rounding of the encoder."""
    loose = {"epsilon": 1e9, "mechanism": EXACT, "ledger": None, "seed": 0, "clip": L2(1e3), "range": 2.0}
    made = trainer(per_device_train_batch_size=24, privacy=loose, label_smoothing_factor=0.1)
    made.private.backward(next(iter(made.private.loader)))
    got = made.model.classifier.weight.grad.clone()
    made.model.zero_grad()
    data = Sentences()
    losses = []
    for n in range(len(data)):
        record = {name: torch.tensor([value]) for name, value in data[n].items()}
        losses.append(made.compute_loss(made.model, record))
    (sum(losses) / len(losses)).backward()
    assert got == pytest.approx(made.model.classifier.weight.grad, abs=2e-3 + 1e-3 * 2)


@pytest.mark.slow
def test_a_checkpoint_continues_where_it_was_saved(trainer, tmp_path):
    first = trainer(save_strategy="steps", save_steps=2, max_steps=3, privacy={"reserve": 1})
    first.train()
    first.private.close()
    again = trainer(save_strategy="no", max_steps=3, privacy={"reserve": 1})
    done = again.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))
    assert done.global_step == again.private.steps == 3
    again.private.close()
    with bqsgd.Ledger(tmp_path / "me.ledger") as ledger:
        assert ledger.spent_rounds == 4  # the third step twice, with noise of its own each time
    (tmp_path / "out" / "checkpoint-2" / "bqsgd.json").unlink()
    with pytest.raises(bqsgd.InvalidParameter, match="not a checkpoint of private training"):
        trainer(max_steps=3).train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))


def test_the_trainer_ends_when_the_budget_is_spent(trainer):
    few = {"epsilon": 0.06, "mechanism": bqsgd.Mechanism(levels=1, trials=300)}
    made = trainer(privacy=few, num_train_epochs=2, logging_steps=100)
    with pytest.raises(bqsgd.BudgetExhausted):
        made.train()
    assert made.state.global_step == made.private.steps
    assert 0 < made.private.steps < 8
    assert 0 < made.private.guarantee().epsilon <= 0.06


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"include_num_input_tokens_seen": "all"}, "how many tokens were drawn is private"),
        ({"auto_find_batch_size": True}, "batch size is public"),
        ({"dataloader_drop_last": True}, "no last one"),
    ],
)
def test_arguments_that_would_tell_of_the_batches_are_refused(trainer, arguments, match):
    with pytest.raises(bqsgd.InvalidParameter, match=match):
        trainer(**arguments)


def test_what_a_loss_logs_of_a_sample_goes_nowhere(trainer, monkeypatch):
    made = trainer(max_steps=1)
    original = made.compute_loss

    def telling(model, inputs, **named):
        loss = original(model, inputs, **named)
        made.log({"secret": loss.item()})
        return loss

    monkeypatch.setattr(made, "compute_loss", telling)
    made.train()
    assert made.private.dropped == 0
    assert not any("secret" in entry for entry in made.state.log_history)


def test_what_a_loss_keeps_of_samples_is_not_logged_later(trainer):
    """Trainers of other libraries keep figures in `compute_loss`, and put them into what `log` is given."""
    made = trainer(max_steps=2)
    loss_of, log, kept = made.compute_loss, made.log, []

    def keeping(model, inputs, **named):
        loss = loss_of(model, inputs, **named)
        kept.append(loss.item())
        return loss

    made.compute_loss = keeping
    made.log = lambda logs, *args: log(logs | {"samples": len(kept), "mean": sum(kept)}, *args)
    made.train()
    assert len(kept) > 1
    assert made.private.dropped == 0
    beside = {"grad_norm", "learning_rate", "epoch", "step", "epsilon"}
    assert [set(entry) for entry in made.state.log_history[:-1]] == [beside, beside]
    assert not {"samples", "mean"} & set(made.state.log_history[-1])


def test_another_model_than_the_one_that_was_planned_for_is_refused(trainer):
    made = trainer()
    assert made.private.rounds == 4
    made.model = classifier()  # as model_init does
    with pytest.raises(bqsgd.InvalidParameter, match="another model now"):
        made.train()


def test_a_loop_on_accelerate(tmp_path):
    from accelerate import Accelerator

    from bqsgd.integrations.huggingface import prepare_private

    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(4, 2))
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    loader = DataLoader(TensorDataset(torch.randn(32, 4), torch.arange(32) % 2), batch_size=8, shuffle=True)
    settings = {"epsilon": 8, "delta": 1e-5, "epochs": 1, "mechanism": QUIET, "range": 0.5}
    private = prepare_private(
        accelerator, model, optimizer, loader, loss_fn=nn.CrossEntropyLoss(reduction="none"),
        ledger=tmp_path / "me.ledger", **settings,
    )  # fmt: skip
    before = model.weight.detach().clone()
    for batch in private.loader:
        private.backward(batch)
        optimizer.step()
        optimizer.zero_grad()
    assert private.steps == 4
    assert not torch.equal(model.weight, before)
    loss = nn.functional.cross_entropy(model(torch.randn(2, 4)), torch.tensor([0, 1]))
    accelerator.backward(loss)
    with pytest.raises(bqsgd.InvalidParameter, match="was not released"):
        optimizer.step()
    accelerator.gradient_accumulation_steps = 2
    with pytest.raises(bqsgd.InvalidParameter, match="leave out gradient_accumulation_steps"):
        prepare_private(accelerator, model, optimizer, loader, **settings)


@pytest.fixture
def lora(tmp_path, monkeypatch):
    """The example, on a page of Python's own documentation."""
    from pydoc_data.topics import topics

    spec = importlib.util.spec_from_file_location("lora", ROOT / "examples" / "lora.py")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    text = topics["specialnames"]
    works = {f"work {n}": text[n * 700 : (n + 1) * 700] for n in range(20)}
    monkeypatch.setattr(example, "library", lambda: (text[:2000], works))
    monkeypatch.setattr(example, "FOLDER", tmp_path)
    for name, value in {"PASSAGES": 8, "BATCH": 32, "EPSILON": 50.0}.items():
        monkeypatch.setattr(example, name, value)
    quiet = functools.partial(bqsgd.make_private, mechanism=QUIET, range=0.5)  # planning takes long
    monkeypatch.setattr(bqsgd, "make_private", quiet)
    return example


def test_the_example_trains_and_sends_adapters_and_nothing_else(lora, tmp_path):
    shares, test = lora.split()
    assert [len(inputs) for inputs, _ in shares] == [8] * 4
    assert "".join(map(chr, shares[0][0][0])) == lora.library()[1]["work 0"][: lora.LENGTH]
    data = TensorDataset(
        *(torch.cat([torch.as_tensor(part) for part in column]) for column in zip(*shares, strict=True))
    )
    model = lora.adapted()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.Adam([each for each in model.parameters() if each.requires_grad], lr=lora.RATE)
    private = lora.private_loop(model, optimizer, data, tmp_path / "me.ledger")
    assert (private.steps, private.dropped, private.dimension) == (1, 0, 8192)
    moved = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert moved == {name for name in before if "lora_" in name}
    assert 0 <= lora.accuracy(model, test) <= 1
    config = lora.federation(None).config(secure=True, rounds=2, batch_size=2, epsilon=50.0)
    assert config.clients.count == 4
    lora.federation(None).check(config, lora.adapted())
