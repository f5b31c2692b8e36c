"""make_private with secure sums under torchrun: the mean of all ranks, and no rank sees another's message."""

from pathlib import Path

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from private_loops import told_by_ranks
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bqsgd
from bqsgd._src.errors import InvalidParameter
from bqsgd._src.private import SecureRanks
from bqsgd._src.secure.roster import Roster, public_key, write_identity

WORKER = Path(__file__).parent / "secure_rank_loop.py"
RANKS = 3


def test_a_process_alone_has_nobody_to_sum_with(tmp_path):
    loader = DataLoader(TensorDataset(torch.randn(8, 4), torch.arange(8) % 2), batch_size=4)
    model = nn.Linear(4, 2)
    with pytest.raises(InvalidParameter, match="this process is alone"):
        bqsgd.make_private(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            loader,
            loss_fn=nn.CrossEntropyLoss(reduction="none"),
            epsilon=3,
            delta=1e-5,
            epochs=1,
            ledger=tmp_path / "me.ledger",
            secure=SecureRanks(roster=tmp_path / "roster.toml", identity=tmp_path / "me.key"),
        )


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    identities = {rank: Ed25519PrivateKey.generate() for rank in range(RANKS)}
    for rank, identity in identities.items():
        write_identity(folder / f"{rank}.key", identity)
    roster = Roster({rank: public_key(identity) for rank, identity in identities.items()})
    (folder / "roster.toml").write_text(roster.to_toml())
    return told_by_ranks(WORKER, folder, RANKS)


@pytest.mark.slow
def test_every_rank_has_the_same_model_and_shares_one_noise(told):
    assert all(rank["weights"] == told[0]["weights"] for rank in told)
    assert all(rank["steps"] == 8 for rank in told)
    assert "server sees only sums over clients; no client colludes with it" in told[1]["guarantee"]


@pytest.mark.slow
def test_the_step_is_the_mean_of_all_ranks(told):
    assert all(rank["gradient"] == told[0]["gradient"] for rank in told)
    expected = np.mean([rank["own"] for rank in told], axis=0)
    np.testing.assert_allclose(told[0]["gradient"], expected, atol=1e-3)


@pytest.mark.slow
def test_a_sum_of_subsets_gives_every_rank_the_same_estimate(told):
    parts = [torch.tensor(each["part"]) for each in told]
    assert all(torch.equal(part, parts[0]) for part in parts)
    assert 0 < parts[0].norm() < 4 * torch.tensor(told[0]["gradient"]).norm()


@pytest.mark.slow
def test_a_checkpoint_is_not_resumed_with_less_noise_in_the_sums_than_its_ledger_counts(told):
    for rank in told:
        assert rank["resumed"].startswith("refused: "), rank["resumed"]
        assert "another mechanism of secure sums" in rank["resumed"]


@pytest.mark.slow
def test_one_spent_budget_ends_the_step_for_all(told):
    assert told[1]["ended"].startswith("BudgetExhausted")
    assert all("the sum of this step is lost" in told[rank]["ended"] for rank in (0, 2))
    assert all(rank["taken"] == told[0]["taken"] for rank in told)
