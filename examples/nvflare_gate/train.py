"""NVFlare's hello-pt on scikit-learn's digits: each site trains on its part of the samples; nothing is private."""

import nvflare.client as flare
import torch
from model import Net
from sklearn.datasets import load_digits
from torch import nn


def main():
    flare.init()
    site = int(flare.get_site_name().split("-")[-1]) - 1
    digits = load_digits()
    x = torch.tensor(digits.data / 16, dtype=torch.float32)[site::2]
    y = torch.tensor(digits.target)[site::2]
    net = Net()
    while flare.is_running():
        received = flare.receive()
        net.load_state_dict({name: torch.as_tensor(values) for name, values in received.params.items()})
        optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
        for _ in range(20):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x), y).backward()
            optimizer.step()
        accuracy = (net(x).argmax(1) == y).float().mean().item()
        flare.send(flare.FLModel(params=net.cpu().state_dict(), metrics={"accuracy": accuracy}))


if __name__ == "__main__":
    main()
