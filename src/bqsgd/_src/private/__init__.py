"""An ordinary PyTorch loop made private: your own model, optimizer and loader, and a proven guarantee.

    private = bqsgd.make_private(model, optimizer, loader, loss_fn=nn.CrossEntropyLoss(reduction="none"),
                                 epsilon=3, delta=1e-5, bits=8, epochs=20, ledger="me.ledger")
    for epoch in range(20):
        for batch in private.loader:   # Poisson batches of your own data set
            private.step(batch)        # clip each sample, quantise, add binomial noise, decode, optimizer.step()
    print(private.guarantee())

In one process this is differentially private training: the process sees the data and is trusted, and what it releases
(the model after every step, and everything computed from it) is protected. Started by torchrun, the same lines make
each rank a client with data of its own: the ranks exchange frames, and none needs to trust another.

A step: the spend is recorded, each sample's gradient is clipped on its own, their sum is divided by the public batch
size, rounded to integers with binomial noise, framed, decoded and put into `.grad`. Everything after that is computed
from a private message and costs nothing: any optimizer, schedule, weight decay or average.
"""

from bqsgd._src.private._batches import PoissonLoader
from bqsgd._src.private._sums import SecureRanks
from bqsgd._src.private.loop import Private, make_private

__all__ = ["PoissonLoader", "Private", "SecureRanks", "make_private"]
