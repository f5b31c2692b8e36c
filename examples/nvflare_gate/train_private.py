"""What each site runs to train privately: one `make_private` before the loop, with a study for all rounds."""

import sys

import nvflare.client as flare
import torch
from model import Net, accuracy, load_data
from torch import nn
from torch.utils.data import DataLoader

import bqsgd


def main():
    ledger, rounds, epsilon = sys.argv[1:]
    flare.init()
    loader = DataLoader(load_data(flare.get_site_name()), batch_size=128, shuffle=True)
    net, loss_fn = Net(), nn.CrossEntropyLoss(reduction="none")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    with bqsgd.make_private(
        net,
        optimizer,
        loader,
        loss_fn=loss_fn,
        epsilon=float(epsilon),
        delta=1e-5,
        epochs=4 * int(rounds),
        ledger=ledger.replace("{site}", flare.get_site_name()),
        study="hello-pt",
    ) as private:
        while flare.is_running():
            received = flare.receive()
            net.load_state_dict({name: torch.as_tensor(values) for name, values in received.params.items()})
            print(f"round {received.current_round}: accuracy {accuracy(net, load_data()):.4f}")
            for _ in range(4):
                for batch in private.loader:
                    private.step(batch)
            print(f"round {received.current_round}: {private.guarantee()}")
            flare.send(flare.FLModel(params=net.cpu().state_dict()))


if __name__ == "__main__":
    main()
