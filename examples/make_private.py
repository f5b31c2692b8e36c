"""An ordinary MNIST loop made private: four lines of it are new, and the model is an ordinary module all along."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bqsgd

epochs = int(sys.argv[1]) if len(sys.argv) > 1 else 3
images = bqsgd.data.load("mnist")
train = TensorDataset(torch.as_tensor(images.train.inputs).float(), torch.as_tensor(images.train.labels))
test = torch.as_tensor(images.test.inputs).float(), torch.as_tensor(images.test.labels)

model = nn.Sequential(
    nn.Unflatten(1, (1, 28, 28)) if train[0][0].dim() == 1 else nn.Identity(),
    nn.Conv2d(1, 16, 8, 2, padding=3), nn.ReLU(), nn.MaxPool2d(2, 1),
    nn.Conv2d(16, 32, 4, 2), nn.ReLU(), nn.MaxPool2d(2, 1),
    nn.Flatten(), nn.Linear(512, 32), nn.ReLU(), nn.Linear(32, 10),
)  # fmt: skip
optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
loader = DataLoader(train, batch_size=256, shuffle=True)

private = bqsgd.make_private(
    model, optimizer, loader, loss_fn=nn.CrossEntropyLoss(reduction="none"), epsilon=3, delta=1e-5, bits=8,
    epochs=epochs, ledger=sys.argv[2] if len(sys.argv) > 2 else "make_private.ledger",
)  # fmt: skip
for epoch in range(epochs):
    for batch in private.loader:
        private.step(batch)
    with torch.no_grad():
        accuracy = (model(test[0]).argmax(dim=1) == test[1]).float().mean()
    print(f"epoch {epoch + 1}: accuracy {accuracy:.2%}, {private.guarantee()}")
