"""Draws: the right law, nothing shared between purposes, clients and rounds."""

import itertools
import random
import threading
import time

import numpy as np
import pytest
import torch

from bqsgd._src.client.draws import Purpose, Sources, draw_batch, lent, seed_for, torch_generator
from bqsgd._src.client.objective import Objective
from bqsgd._src.errors import InvalidParameter
from bqsgd._src.noise import privacy_rng, seeded_rng
from bqsgd._src.persample import L2
from bqsgd._src.release import Scheme
from bqsgd._src.runtime.generators import alone, states


def draws(scheme, count, batch_size, dataset_size):
    rng = seeded_rng(seed=5)
    return [draw_batch(scheme, batch_size=batch_size, dataset_size=dataset_size, rng=rng) for _ in range(count)]


def test_poisson_sizes_have_the_binomial_law():
    # 4,000 batches of D = 200 at rate 0.15: mean 30, variance 25.5. Within 5 standard errors (false alarm 1e-6).
    sizes = np.array([len(rows) for rows in draws(Scheme.POISSON, 4000, 30, 200)])
    assert abs(sizes.mean() - 30) < 5 * np.sqrt(25.5 / 4000)
    assert abs(sizes.var() - 25.5) < 5 * 25.5 * np.sqrt(2 / 4000)


def test_poisson_takes_every_sample_at_the_same_rate_independently():
    taken = np.zeros((4000, 40))
    for row, rows in zip(taken, draws(Scheme.POISSON, 4000, 10, 40), strict=True):
        row[rows] = 1
    assert np.abs(taken.mean(0) - 0.25).max() < 5 * np.sqrt(0.25 * 0.75 / 4000)
    correlation = np.corrcoef(taken.T) - np.eye(40)
    assert np.abs(correlation).max() < 5.5 / np.sqrt(4000)  # 780 pairs: false alarm 3e-5


def test_fixed_size_subsets_are_uniform():
    counts = dict.fromkeys(itertools.combinations(range(5), 2), 0)
    for rows in draws(Scheme.FIXED_SIZE, 5000, 2, 5):
        counts[tuple(rows.tolist())] += 1
    assert max(abs(count - 500) for count in counts.values()) < 5.5 * np.sqrt(5000 * 0.1 * 0.9)


def test_edges():
    rng = privacy_rng()
    assert draw_batch(Scheme.NONE, batch_size=3, dataset_size=7, rng=rng).tolist() == list(range(7))
    assert draw_batch(Scheme.POISSON, batch_size=7, dataset_size=7, rng=rng).tolist() == list(range(7))
    assert draw_batch(Scheme.FIXED_SIZE, batch_size=7, dataset_size=7, rng=rng).tolist() == list(range(7))
    with pytest.raises(InvalidParameter, match="batch_size"):
        draw_batch(Scheme.POISSON, batch_size=8, dataset_size=7, rng=rng)


def test_derived_seeds_differ_by_everything_and_are_stable():
    keys = itertools.product((0, 1), Purpose, (0, 1), (0, 1))
    seeds = [seed_for(seed, purpose, client=client, round=round) for seed, purpose, client, round in keys]
    assert len(set(seeds)) == len(seeds) == 8 * len(Purpose)
    assert seed_for(7, Purpose.NOISE, client=2, round=9) == 9171505494486856468


def test_sources_by_seed_repeat_and_by_the_system_never_do():
    a, b = (Sources(seed=1, client=3).at(Purpose.BATCH, 4).words(4) for _ in range(2))
    np.testing.assert_array_equal(a, b)
    private = Sources(seed=None, client=3)
    assert not private.seeded
    assert not np.array_equal(private.at(Purpose.BATCH, 4).words(4), private.at(Purpose.BATCH, 4).words(4))


def from_every_generator():
    return float(torch.rand(())), np.random.rand(), random.random()  # noqa: NPY002


def test_lent_generators_repeat_by_seed_only_and_the_programs_own_go_on():
    def lent(sources, round=0):
        torch.manual_seed(1)
        np.random.seed(1)  # noqa: NPY002
        random.seed(1)
        with sources.lent(Purpose.FORWARD, round):
            found = from_every_generator()
        return found, from_every_generator()

    seeded, private = Sources(seed=1, client=0), Sources(seed=None, client=0)
    (first, own), (second, same) = lent(seeded), lent(seeded)
    assert first == second
    assert own == same
    for other in (lent(seeded, 1), lent(private), lent(private)):
        assert all(a != b for a, b in zip(other[0], first, strict=True))
        assert other[1] == own


def test_the_whole_state_of_torchs_generator_is_drawn():
    """Of a seed it would use 32 bits, few enough to try them all."""
    state = torch_generator(seeded_rng(seed=1)).get_state()
    other = state.clone()
    other[24 + 8 * 623] ^= 1  # the last of 624 words
    found = [torch.rand(1000, generator=torch.Generator().set_state(each)) for each in (state, other)]
    assert not torch.equal(*found)
    whole = state[24 : 24 + 8 * 624].numpy().view(np.uint64)
    assert len(np.unique(whole)) == 624
    assert whole.max() < 2**32


def test_threads_that_overlap_never_draw_from_the_programs_own_generators():
    torch.manual_seed(1)
    known = torch.rand(64).tolist()
    torch.manual_seed(1)
    first, second = (Sources(seed=None, client=client).lent(Purpose.FORWARD, 0, shared=True) for client in (0, 1))
    first.__enter__()
    found = [float(torch.rand(()))]
    second.__enter__()
    first.__exit__(None, None, None)  # before the one that came later
    found += [float(torch.rand(())) for _ in range(8)]
    second.__exit__(None, None, None)
    assert not set(found) & set(known)
    assert torch.rand(64).tolist() == known


def test_whoever_has_the_generators_alone_may_compare_their_states():
    """Tracing tells by them whether a model draws, while other threads lend generators and give them back."""
    over, changed = threading.Event(), []

    def lend():
        sources = Sources(seed=None, client=0)
        while not over.is_set():
            with sources.lent(Purpose.FORWARD, 0, shared=True):
                pass

    thread = threading.Thread(target=lend)
    thread.start()
    for _ in range(20):
        with alone:
            before = states()
            time.sleep(0.002)
            changed.append(states() != before)
        time.sleep(0.001)
    over.set()
    thread.join()
    assert not any(changed)


class Accelerator:
    """A device that torch knows: generators of its own, which are there once it is in use."""

    def __init__(self, devices):
        self.default_generators = tuple(torch.Generator().manual_seed(1) for _ in range(devices))
        self.in_use = True

    def is_initialized(self):
        return self.in_use

    def drawn(self):
        return [float(torch.rand((), generator=generator)) for generator in self.default_generators]


@pytest.fixture
def accelerator(monkeypatch):
    made = Accelerator(2)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch, "get_device_module", lambda device: made)
    return made


def test_generators_of_accelerators_are_lent_as_those_of_the_cpu(accelerator):
    """Whoever knows the seed of a program would know the masks that a model draws on its GPU."""

    def lent(sources):
        for generator in accelerator.default_generators:
            generator.manual_seed(1)
        before = states()
        with sources.lent(Purpose.FORWARD, 0):
            assert states() != before
            found = accelerator.drawn()
        assert states() == before
        return found, accelerator.drawn()

    seeded, private = Sources(seed=1, client=0), Sources(seed=None, client=0)
    first, own = lent(seeded)
    assert own[0] == own[1], "the program has given both devices one seed"
    assert first[0] != first[1]
    assert (first, own) == lent(seeded)
    for found, after in (lent(private), lent(private)):
        assert not {*first, *own} & {*found}
        assert after == own


def test_an_accelerator_that_is_not_in_use_is_left_alone(accelerator):
    """Asking for its state would initialise it."""
    accelerator.in_use = False
    before = len(states())
    with Sources(seed=None, client=0).lent(Purpose.FORWARD, 0):
        pass
    own = torch.Generator().manual_seed(1)
    assert accelerator.drawn() == [float(torch.rand((), generator=own))] * 2
    accelerator.in_use = True
    assert len(states()) == before + 2


def test_a_machine_without_accelerators_draws_as_before():
    """Nothing more is drawn from a source, so that seeded runs stay the same."""
    rng = seeded_rng(seed=3)
    with lent(rng):
        pass
    other = seeded_rng(seed=3)
    for words in (312, 4, 4):
        other.words(words)
    assert rng.words(1) == other.words(1)


def test_a_check_within_a_step_gives_the_masks_back():
    with Sources(seed=None, client=0).lent(Purpose.FORWARD, 0):
        before = states()
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 2))
        middle = states()
        form = torch.zeros(1, 3), torch.zeros(1, dtype=torch.long)
        loss_fn = torch.nn.CrossEntropyLoss(reduction="none")
        masked, plain = (Objective(model, loss_fn, clip=L2(1.0), batch_size=16) for _ in range(2))
        masked.check(form)
        assert masked.draws
        assert states() == middle != before
        model.eval()
        plain.check(form)
        assert not plain.draws
