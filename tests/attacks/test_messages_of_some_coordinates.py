"""Attacks on claim 14: a message of one in N coordinates, whoever chose them, moves by no more than is counted."""

import struct
import tracemalloc
import warnings
from contextlib import suppress

import numpy as np
import pytest
import torch
from neighbours import LOSS
from torch import nn

from bqsgd._src.client.objective import Objective
from bqsgd._src.client.objectives import objective_of
from bqsgd._src.client.values import clip_update
from bqsgd._src.codec import Accumulator, decode_frame, encode_frame
from bqsgd._src.errors import FrameError, InvalidParameter, ModelMessageError
from bqsgd._src.ledger import Ledger
from bqsgd._src.models import to_vector
from bqsgd._src.noise import seeded_rng
from bqsgd._src.params import Mechanism
from bqsgd._src.persample import L2, BatchMean, Clamp, Dual, Normalize, PerLayer, Scale, clipped_gradients, factors
from bqsgd._src.persample.gradients import road_of
from bqsgd._src.persample.program import Form
from bqsgd._src.subset import Subset, Subsets
from bqsgd._src.wire.frame import CHECKED_HEADER_BYTES, HEADER_BYTES, checksum, read_frame
from bqsgd._src.wire.model_message import sealed, write_model
from bqsgd._src.wire.reply import WHOLE_MODEL_NEEDED
from long_suite import others_slow
from tiny_task import client_of, linear, points

BATCH = 16


def of_model(model, one_in, *, rotated=True):
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return Subsets(shapes=tuple(tuple(each.shape) for each in trained), one_in=one_in, rotated=rotated)


def clipped(model, inputs, targets, subset, clip):
    batch = inputs, targets
    found = clipped_gradients(model, LOSS, batch, clip=clip, batch_size=BATCH, subset=subset)
    return found.mean.clone()


@pytest.mark.parametrize("columns", others_slow([1, 2, 7, 8, 9, 256, 257, 300], [1, 257]))
@pytest.mark.parametrize("clip", [L2(1.0), Dual(1.0, 0.4)], ids=lambda clip: type(clip).__name__)
def test_a_record_along_the_kept_rows_of_the_rotation_gains_nothing(columns, clip):
    """All of its energy is kept, instead of one part in N: the clip must act after the rotation, on what is sent."""
    model, target = nn.Linear(columns, 2, bias=False), torch.zeros(1, dtype=torch.long)
    nn.init.zeros_(model.weight)  # both errors are 1/2, whatever the record
    longest = 0.0
    for one_in in (2, 3, 2 * columns + 1, 2**16):
        share, some = clip.of_share(1 / one_in), of_model(model, one_in)
        drawn = some.drawn(round=2**64 - 1, client=0)
        along = np.zeros(2 * columns)
        along[drawn.places[drawn.places < columns]] = 1.0
        record = torch.from_numpy(some.rotated_back(along, round=2**64 - 1)[None, :columns]).float()
        stated = share.sensitivity(batch_size=BATCH, range=1.0)
        for size in (1e-44, 1e-3, 1e4, 1e37):
            found = clipped(model, record * size, target, drawn, share)
            reached = float(found.abs().max()) / stated.linf, float(found.norm()) / stated.l2
            assert max(reached) <= 1
            longest = max(longest, *reached)
    assert longest > 0.999, "the attack is strong enough to be stopped by the clip"


def test_a_subset_made_by_hand_gains_nothing():
    """The attacker repeats the largest coordinate, leaves out the rotation, or sends more or less than one in N."""
    model = nn.Linear(40, 2, bias=False)
    record, clip = torch.zeros(1, 40), L2(1.0).of_share(1 / 4)
    record[0, 3] = 1e6
    for places in ([3] * 20, [3], list(range(80)), [0, 3, 43]):
        for rotated in (True, False):
            chosen = np.sort(np.array(places, np.int64))
            some = of_model(model, 4, rotated=rotated)
            subset = Subset(subsets=some, round=0, places=chosen, sizes=np.ones(len(chosen), np.int64))
            found = clipped(model, record, torch.zeros(1, dtype=torch.long), subset, clip)
            assert float(found.norm()) <= clip.norm / BATCH


class Looks(nn.Module):
    """Reads a value, so that samples run one at a time by this code."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(9, 5)

    def forward(self, x):
        return self.layer(x) if x.sum().item() > -np.inf else self.layer(-x)


class Odd(nn.Module):
    """Parameters of no dimension, of one, of one entry, of none, and one that the loss does not use."""

    def __init__(self):
        super().__init__()
        self.scalar, self.line = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.randn(9))
        self.unused, self.one = nn.Parameter(torch.randn(30)), nn.Parameter(torch.randn(1, 1, 1))
        self.none, self.frozen = nn.Parameter(torch.empty(0, 4)), nn.Parameter(torch.ones(9), requires_grad=False)
        self.table = nn.Parameter(torch.randn(9, 5))

    def forward(self, x):
        return (x * self.line * self.frozen) @ self.table * self.scalar * self.one.view(1, 1) + self.none.sum()


ROADS = {
    "LanesRoad": lambda: nn.Sequential(nn.Linear(9, 12), nn.Tanh(), nn.Linear(12, 5)),
    "PassesRoad": lambda: nn.Sequential(nn.Linear(9, 12), nn.Tanh(), nn.Linear(12, 5)).double(),
    "AloneRoad": Looks,
    "odd shapes": Odd,
}
CLIPS = [L2(1.0), Dual(1.0, 0.1), PerLayer(L2(1.0)), Normalize(1.0), Clamp(0.1), Scale(0.1)]


@pytest.mark.filterwarnings("ignore::bqsgd._src.persample.gradients.SlowGradientsWarning")
@pytest.mark.parametrize("road", ROADS)
def test_a_record_of_any_size_is_inside_the_bound_and_apart_on_every_road(road):
    torch.manual_seed(3)
    model, others = ROADS[road](), torch.randn(5, 9)
    dtype = next(model.parameters()).dtype
    targets = torch.arange(6) % 5
    form = Form.of((others.to(dtype), targets[:5]))
    with warnings.catch_warnings(action="ignore"):
        used = type(road_of(model, LOSS, None, form, batch_size=BATCH, packed=False)).__name__
    assert used == road or road not in ("LanesRoad", "PassesRoad", "AloneRoad")
    for number, size in enumerate((1e-45, 1e-20, 1.0, 1e19, 3e38, np.inf, np.nan)):
        whole, clip = (3, 13, 10**4)[number % 3], CLIPS[number % len(CLIPS)]
        share = clip.of_share(1 / whole)
        drawn = of_model(model, whole, rotated=number % 2 == 0).drawn(round=number, client=1)
        inputs = torch.cat([others, (torch.randn(1, 9) * size)]).to(dtype)
        both = clipped(model, inputs, targets, drawn, share)
        moved = both - clipped(model, inputs[:5], targets[:5], drawn, share)
        assert torch.equal(moved, clipped(model, inputs[5:], targets[5:], drawn, share))
        stated = share.sensitivity(batch_size=BATCH, range=1.0)
        assert float(moved.abs().max()) <= stated.linf
        assert stated.l2 is None or float(moved.norm()) <= stated.l2


def test_a_message_of_unused_parameters_alone_is_zero_and_no_error():
    """It was an error of torch: before the spend for round 0, after the spend a batch whose samples were all lost."""
    model = Odd()
    some = of_model(model, 10**4)
    places = np.array([some.starts[2] + 7])
    subset = Subset(subsets=some, round=0, places=places, sizes=np.array([some.dimension]))
    inputs, targets = torch.randn(3, 9), torch.arange(3)
    for clip in [*CLIPS, BatchMean(0.1)]:
        assert clipped(model, inputs, targets, subset, clip).tolist() == [0.0]
    first = next(r for r in range(10**4) if some.starts[2] <= some.drawn(round=r, client=0).places[0] < some.starts[3])
    objective = Objective(model, LOSS, clip=L2(1.0), batch_size=BATCH, subsets=some)
    objective.subset = lambda **_: some.drawn(round=first, client=0)
    objective.check((inputs[:1], targets[:1]))


@pytest.mark.parametrize("one_in", [1, 2, 7, 100])
def test_a_whole_update_at_its_bound_is_not_rounded_beyond_it(one_in):
    """Rounded to float32 after the clip, it was up to 6e-8 of the bound too large: most bounds are no float32."""
    for clip in (Clamp(0.1), Dual(1.0, 0.1), Scale(0.1), L2(0.1)):
        share = clip.of_share(1 / one_in)
        for update in (np.array([3e38, -1e-30]), np.array([0.3, 0.2]), np.full(2, 1e-2)):
            # In float64, because a float32 is compared with a bound that is rounded to float32 first.
            found = clip_update(update.astype(np.float32), share).astype(np.float64)
            assert np.abs(found).max() <= share.largest
            assert np.linalg.norm(found) <= getattr(share, "norm", np.inf)


def test_a_client_refuses_an_objective_that_clips_otherwise_than_it_counts(settings):
    """One that clips the whole gradient at C moves a message by sqrt(N) times what a client with one_in counts."""
    asked = settings(clip="dual", clip_norm=1.0, one_in=4)
    others = [{"one_in": 1}, {"one_in": 3}, {"clip_norm": 2.0}, {"batch_size": 10}, {"packed_rows": True}]
    client = client_of(asked, linear(), LOSS, points(60, 0))
    for other in others:
        objective = objective_of(asked.but(**other), linear(), LOSS)
        with pytest.raises(InvalidParameter, match="made with another clip"):
            type(client)(asked, objective, client.samples, client.sender)


@pytest.mark.parametrize("unit", ["sample", "client"])
@pytest.mark.parametrize("clip", others_slow(["l2", "dual", "clamp", "scale"], ["l2", "dual"]))
def test_what_is_sent_has_the_dimension_and_the_reach_that_the_ledger_counts(settings, unit, clip):
    given = {"clip": clip, "clip_norm": 1.0, "range": 2.0, "levels": 2**20, "unit": unit, "sampling": "none"}
    if unit == "client":
        given |= {"local_steps": 2, "local_learning_rate": 1e4}
    inputs, targets = points(20, 0)
    for one_in, aggregation in ((2, "mean"), (7, "median")):
        config = settings(one_in=one_in, aggregation=aggregation, **given)
        means = []
        for record in ((0.0, 0.0), (1e30, -3e30), (np.nan, 1.0), (-1e-30, 1e5)):
            inputs[5] = record
            client = client_of(config, linear(), LOSS, (inputs.copy(), targets))
            frame = client.answer(write_model(to_vector(client.model), round=4)).frame
            header = read_frame(frame).header
            terms = client.charge(4).release.terms
            assert header.dimension == terms.dimension == -(-6 // one_in)
            means.append(decode_frame(frame, range=2.0, kept=header.kept) / 2.0)
        moved = np.abs(means - means[0])
        rounding = 2 * 2.0**-20  # each of two codes is rounded to a neighbouring level
        assert moved.max() <= 2 * terms.sensitivity.linf + rounding
        if terms.sensitivity.l2 is not None:
            assert np.linalg.norm(moved, axis=1).max() <= 2 * terms.sensitivity.l2 + 2 * rounding


def test_a_server_that_repeats_and_reorders_rounds_gets_no_message_that_is_not_counted(settings, tmp_path):
    """With one subset known to it for every round, a server would ask for the same coordinates again and again."""
    config = settings(seed=None, trials=2000, levels=2, one_in=3, epsilon=50.0, delta=1e-5)
    with Ledger.open(tmp_path / "ledger", client=0, budget_epsilon=50.0, budget_delta=1e-5) as ledger:
        client = client_of(config, linear(), LOSS, points(60, 0), ledger=ledger, resume=True)
        model, frames = np.zeros(6, np.float32), set()
        for round, moved in ((3, 0), (3, 0), (0, 0), (3, 1), (3, 0), (9, 0), (12, 0), (0, 1)):
            reply = client.update(model + moved, round)
            frames |= set() if reply.frame is None else {bytes(reply.frame)}
        assert len(frames) == 6
        assert {release.terms.dimension: count for release, count in client.spending.sent.items()} == {2: 6}


STEPS = struct.Struct("<4sHHQQIIQ")


def test_hostile_steps_spend_nothing_and_end_in_a_refusal(settings, tmp_path):
    config = settings(
        seed=None, trials=2000, levels=2, one_in=3, epsilon=50.0, delta=1e-5, aggregation="median", optimizer="adam",
        subtract_noise=True,
    )  # fmt: skip
    numbers = struct.pack("<IId2f", 3, 32, 1.0, 0.5, -0.5)
    bodies = {
        "wrong digest": (1, numbers),
        "not a number": (1, struct.pack("<IId2f", 3, 32, 1.0, np.nan, 0.0)),
        "a negative variance": (1, struct.pack("<IId2f", 3, 32, -1.0, 0.0, 0.0)),
        "no messages with numbers": (1, struct.pack("<II", 0, 32)),
        "too wide": (1, struct.pack("<II", 3, 2**32 - 1)),
        "many steps in a short message": (64, numbers),
        "steps without number": (2**32 - 1, b""),
        "overflow": (1, struct.pack("<IId2f", 3, 32, 1e308, 3e38, -3e38)),
    }
    with Ledger.open(tmp_path / "ledger", client=0, budget_epsilon=50.0, budget_delta=1e-5) as ledger:
        client = client_of(config, linear(), LOSS, points(60, 0), ledger=ledger)
        assert client.answer(write_model(np.zeros(6, np.float32), round=0)).frame is not None
        before = sum(ledger.released.values())
        for count, body in bodies.values():
            for round in (1, 0, 64, 2**63 - 1, 2**64 - 1):
                for one_in, dimension in ((3, 6), (2, 6), (3, 2**63)):
                    head = STEPS.pack(b"BQST", 1, 2, round, dimension, count, one_in, 7)
                    with suppress(ModelMessageError):
                        assert client.answer(sealed(head, body)).reason == WHOLE_MODEL_NEEDED
        assert sum(ledger.released.values()) == before


def test_frames_that_lie_about_what_they_keep_are_refused_before_memory_is_taken():
    model = nn.Linear(30, 10)
    some, mechanism = of_model(model, 4), Mechanism(levels=4, trials=9)
    server, drawn = Accumulator(some.dimension), some.drawn(round=0, client=0)
    kept, values = some.header, np.zeros(some.kept)
    honest = encode_frame(values, mechanism, range=1.0, rng=seeded_rng(seed=1), client=0, round=0, kept=kept)
    lies = [(4, 1, 4 * some.kept - 4), (2, 1, 2 * some.kept), (4, 0, some.dimension), (4, 2, some.dimension)]
    lies += [(1, 1, some.kept), (0, 1, 1), (2**32 - 1, 1, 2**64 - 1), (2**16, 1, 2**63 - 1)]
    tracemalloc.start()
    for one_in, rotated, stated in lies:
        for dimension in (some.kept, -(-stated // max(1, one_in))):
            frame = bytearray(honest)
            struct.pack_into("<IIQ", frame, HEADER_BYTES, one_in, rotated, stated)
            struct.pack_into("<Q", frame, 40, dimension)
            struct.pack_into("<Q", frame, CHECKED_HEADER_BYTES, checksum(memoryview(frame)))
            with pytest.raises(FrameError):
                server.add(frame, range=1.0, client=0, round=0, subset=drawn)
            with pytest.raises(FrameError):
                decode_frame(frame, range=1.0, kept=kept)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20
    assert server.frames == 0
    assert not server.total.any()


def test_kept_coordinates_take_the_scratch_and_not_the_batch(monkeypatch):
    """They were built for all samples of a pass at once: gigabytes for a wide layer, and only for large batches."""
    torch.manual_seed(4)
    model, inputs, targets = nn.Linear(256, 64), torch.randn(256, 256), torch.arange(256) % 64
    drawn, clip = of_model(model, 2).drawn(round=0, client=0), L2(1.0).of_share(1 / 2)
    expected = clipped(model, inputs, targets, drawn, clip)
    monkeypatch.setattr(factors, "SCRATCH_BYTES", 1 << 18)
    tracemalloc.start()
    found = clipped(model, inputs, targets, drawn, clip)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert torch.equal(found, expected)
    assert peak < 256 * 4 * 64 * 256 / 2 / 4, "a quarter of what all of them take"
