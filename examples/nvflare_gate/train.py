"""What each site runs, as in NVFlare's hello-pt; nothing here is private."""

import nvflare.client as flare
import torch
from model import Net, accuracy, load_data
from torch import nn
from torch.utils.data import DataLoader


def main():
    flare.init()
    loader = DataLoader(load_data(flare.get_site_name()), batch_size=128, shuffle=True)
    net, loss_fn = Net(), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    while flare.is_running():
        received = flare.receive()
        net.load_state_dict({name: torch.as_tensor(values) for name, values in received.params.items()})
        print(f"round {received.current_round}: accuracy {accuracy(net, load_data()):.4f}")
        for _ in range(4):
            for x, y in loader:
                optimizer.zero_grad()
                loss_fn(net(x), y).backward()
                optimizer.step()
        flare.send(flare.FLModel(params=net.cpu().state_dict(), metrics={"accuracy": accuracy(net, loader.dataset)}))


if __name__ == "__main__":
    main()
