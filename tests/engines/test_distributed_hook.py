"""The DDP hook on two real ranks."""

import json
import os
import re
import signal
from functools import partial
from pathlib import Path

import pytest
import torch

from bqsgd._src.codec import encode_frame
from bqsgd._src.errors import InvalidParameter
from bqsgd._src.ledger import Ledger
from bqsgd._src.noise import privacy_rng, seeded_rng
from bqsgd._src.params import Mechanism
from bqsgd._src.persample import L2
from bqsgd._src.release import Scheme
from bqsgd.distributed import BQHookState, PrivateSteps, bq_hook
from distributed_processes import run_ranks

SCRIPT = Path(__file__).parent / "distributed_hook_worker.py"


@pytest.fixture(scope="module")
def found(made_once, tmp_path_factory):
    """What each rank found."""

    def run():
        folder = tmp_path_factory.mktemp("hook")
        ended = run_ranks(folder, {}, script=SCRIPT, ranks=2)
        assert [code for code, _ in ended] == [0, 0], ended
        return [json.loads((folder / f"found-{rank}.json").read_text()) for rank in range(2)]

    return made_once("hook", run)


@pytest.mark.slow
def test_without_per_sample_clipping_it_compresses_and_says_once_that_it_guarantees_nothing(found):
    for rank in found:
        assert rank["compresses"]["warnings"] == 1
        assert rank["compresses"]["steps"] == 3
        assert rank["compresses"]["error"] <= 1 / (1 << 15)
        assert rank["compresses"]["size"] > 100 / (1 << 15), "the gradient is not zero to begin with"


def test_with_per_sample_gradients_the_clipped_mean_is_sent_and_counted(found):
    for rank in found:
        private = rank["private"]
        assert "supply" in private["refused"]
        assert private["before"] == 0, "a refused step costs nothing"
        assert private["spent"] == 20
        assert private["guarantee"].startswith("epsilon ")
        for stated in (
            "add/remove one sample (a null record in its place); server sees each client's messages",
            "poisson rate 0.05, 20 rounds",
        ):
            assert stated in private["guarantee"]
        # 1,502 coordinates: the mean square of z has a standard error of 0.037; 6 of them, and 6 sigma for the
        # largest of 1,502, alarm falsely less than once in 10^5 runs.
        assert abs(private["chi2"] - 1) < 0.22
        assert private["largest"] < 6


def test_a_backward_that_fails_and_is_repeated_sends_the_same_bytes(found):
    for rank in found:
        repeated = rank["repeated"]
        assert repeated["failed"] == 8
        partly, whole = repeated["partly"], repeated["whole"]
        assert partly["messages"] >= 8, "each attempt sends at least one bucket before it fails"
        assert partly["messages"] == 8 * partly["distinct"]
        assert partly["ledger"] == whole["ledger"] == 1
        assert "InvalidParameter" in repeated["other_buckets"]
        assert "sent in another bucket" in repeated["other_buckets"]
        assert repeated["sent_in_other_buckets"] == 0
        assert partly["distinct"] < whole["messages"] == whole["distinct"], "the step ends with each bucket sent once"
        assert repeated["after"] == {"distinct": 2 * whole["distinct"], "ledger": 2, "fresh": True}


def test_every_rank_has_the_mean_of_the_same_frames(found):
    assert found[0]["same"] == found[1]["same"]
    assert found[0]["same"]["matches"]


def test_a_rank_with_another_range_is_refused_everywhere(found):
    wanted = re.compile(
        r"Got the following error when running the callback: WrongParameters: "
        r"expected parameters digest ([0-9a-f]{32}) "
        r"\(levels, trials, dimension, range\), got ([0-9a-f]{32}) from a frame with levels=20, trials=200"
    )
    digests = []
    for rank in found:
        assert rank["foreign"]["class"] == "RuntimeError", "torch's own, around the error of the callback"
        refusal = wanted.fullmatch(rank["foreign"]["text"])
        assert refusal is not None, rank["foreign"]["text"]
        digests.append(refusal.groups())
    # levels and trials are the same, so it is the clip: each rank expects what the other refuses.
    assert digests[0] == digests[1][::-1]
    assert digests[0][0] != digests[0][1]


def test_arguments_are_checked():
    state = BQHookState(Mechanism(levels=2, trials=4), range=1.0, rng=seeded_rng(seed=0))
    with pytest.raises(InvalidParameter, match="supply needs"):
        state.supply((torch.zeros(1, 2), torch.zeros(1)), indices=torch.arange(1))
    with pytest.raises(InvalidParameter, match="range"):
        BQHookState(Mechanism(levels=2, trials=4), range=0.0, rng=seeded_rng(seed=0))

    class Doubles:
        def buffer(self):
            return torch.zeros(3, dtype=torch.float64)

    with pytest.raises(InvalidParameter, match="float32"):
        bq_hook(state, Doubles())


class Remembering(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(2, 2)
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x):
        self.seen.copy_(x[0].detach())
        return self.head(x)


def test_what_a_step_was_not_counted_for_is_refused_before_it_is_counted():
    """A sample that is twice in a batch, one beyond the data, and buffers, which DDP sends to all ranks as they are."""
    loss, batch = torch.nn.CrossEntropyLoss(reduction="none"), (torch.rand(3, 2), torch.zeros(3, dtype=torch.long))
    model = Remembering()
    private = PrivateSteps(
        model=model,
        loss_fn=loss,
        clip=L2(1.0),
        batch_size=4,
        dataset_size=8,
        ledger=None,
        run="a",
        sampling=Scheme.POISSON,
    )
    state = BQHookState(Mechanism(levels=2, trials=4), range=1.0, rng=seeded_rng(seed=0), private=private)
    for indices in ([0, 1, 1], [0, 1, 8]):
        with pytest.raises(InvalidParameter, match="different numbers below"):
            state.supply(batch, indices=torch.tensor(indices))
    state.supply(batch, indices=torch.tensor([0, 1, 7]))
    private.used()
    model(batch[0])
    with pytest.raises(InvalidParameter, match="changed its buffers"):
        state.supply(batch, indices=torch.tensor([0, 1, 7]))
    assert private.guarantee(delta=1e-5) is not None


class Noting(torch.nn.Module):
    """Keeps the largest value that it saw in one of its parameters."""

    def __init__(self, *, frozen, anew=False):
        super().__init__()
        self.head, self.anew = torch.nn.Linear(2, 2), anew
        self.largest = torch.nn.Parameter(torch.zeros(1), requires_grad=not frozen)

    def forward(self, x):
        with torch.no_grad():
            if self.anew:
                self.largest = torch.nn.Parameter(x.max()[None], requires_grad=False)
            else:
                self.largest.data.clamp_(min=float(x.max()))
        return self.head(x) + 0 * self.largest


def steps(model, loss=None):
    private = PrivateSteps(
        model=model,
        loss_fn=loss or torch.nn.CrossEntropyLoss(reduction="none"),
        clip=L2(1.0),
        batch_size=4,
        dataset_size=8,
        ledger=None,
        run="a",
    )
    return BQHookState(Mechanism(levels=2, trials=4), range=1.0, rng=seeded_rng(seed=0), private=private)


BATCH = torch.rand(3, 2, generator=torch.Generator().manual_seed(0)), torch.zeros(3, dtype=torch.long)
NUMBERS = torch.tensor([0, 1, 7])


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("anew", [False, True])
def test_frozen_parameters_that_a_forward_writes_are_refused(anew):
    """DDP runs the forward on the samples themselves, and the model is released with what it wrote."""
    model = Noting(frozen=True, anew=anew)
    state = steps(model)
    state.supply(BATCH, indices=NUMBERS)
    state.private.used()
    model(BATCH[0])
    with pytest.raises(InvalidParameter, match="frozen parameters"):
        state.supply(BATCH, indices=NUMBERS)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_trained_parameters_that_a_forward_writes_are_refused_before_a_frame_is_made():
    model = Noting(frozen=False)
    state = steps(model)
    state.supply(BATCH, indices=NUMBERS)
    model(BATCH[0])
    with pytest.raises(InvalidParameter, match="changed its parameters"):
        state.private.frame(list(model.parameters()), 0, state, partial(encode_frame, client=0, range=1.0), round=0)


def test_a_step_that_was_interrupted_twice_can_be_supplied_again_and_is_counted_again(tmp_path, monkeypatch):
    model = torch.nn.Linear(2, 2)
    with Ledger.open(tmp_path / "a", client=0, budget_epsilon=1e4, budget_delta=1e-5) as ledger:
        private = PrivateSteps(
            model=model,
            loss_fn=torch.nn.CrossEntropyLoss(reduction="none"),
            clip=L2(1.0),
            batch_size=4,
            dataset_size=8,
            ledger=ledger,
            run="a",
        )
        state = BQHookState(Mechanism(levels=2, trials=400), range=1.0, rng=privacy_rng(), private=private)
        real = private._objective.mean

        def interrupted(*given, **asked):
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGINT)

        monkeypatch.setattr(private._objective, "mean", interrupted)
        with pytest.raises(KeyboardInterrupt):
            state.supply(BATCH, indices=NUMBERS)
        monkeypatch.setattr(private._objective, "mean", real)
        state.supply(BATCH, indices=NUMBERS)
        assert ledger.spent_rounds == 2
