"""Weights are the operator's, never a client's word; how far one liar gets is stated, and attained, and not passed."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from bqsgd._src.errors import InvalidParameter
from bqsgd._src.params import Mechanism, parameters_digest
from bqsgd._src.server.aggregation import aggregate, client_weights, one_liar_moves, one_liar_words, read_sizes
from bqsgd._src.server.server import Server
from bqsgd._src.settings.config import Config
from bqsgd._src.wire.fixed import FixedWidth
from bqsgd._src.wire.frame import FrameWriter, Header

CLAIMS = {0: 100, 1: 100, 2: 2**40 - 1}


def test_a_claim_never_decides_a_weight() -> None:
    assert client_weights(None, CLAIMS, claimed=True, sizes=None) == {0: 1.0, 1: 1.0, 2: 1.0}
    assert client_weights("equal", CLAIMS, claimed=False, sizes=None) == {0: 1.0, 1: 1.0, 2: 1.0}
    assert client_weights(None, CLAIMS, claimed=False, sizes=None) == {0: 100.0, 1: 100.0, 2: float(2**40 - 1)}
    listed = {0: 120, 1: 80, 2: 100, 3: 7}
    for choice in (None, "size"):
        assert client_weights(choice, CLAIMS, claimed=True, sizes=listed) == {0: 120.0, 1: 80.0, 2: 100.0}
    with pytest.raises(InvalidParameter, match="needs a list of sizes"):
        client_weights("size", CLAIMS, claimed=True, sizes=None)
    with pytest.raises(InvalidParameter, match=r"clients \[2\] are not on the list of sizes"):
        client_weights(None, CLAIMS, claimed=True, sizes={0: 1, 1: 1})


def test_the_list_of_sizes_is_a_table_of_numbers(tmp_path: Path) -> None:
    path = tmp_path / "sizes.toml"
    path.write_text("[samples]\n0 = 1200\n17 = 64\n")
    assert read_sizes(path) == {0: 1200, 17: 64}
    for wrong in (
        "", "[samples]\n", "samples = 3\n", "[samples]\na = 3\n", "[samples]\n0 = 0\n", "[samples]\n0 = 1.5\n",
        f"[samples]\n0 = {'9' * 400}\n", f"[samples]\n0 = {'9' * 5000}\n", "[samples]\n0 = 3\n[other]\n",
        "x = " + "[" * 5000, f"[samples]\n{'9' * 30} = 3\n", "[samples]\n'\u00b2' = 3\n",
    ):  # fmt: skip
        path.write_text(wrong)
        with pytest.raises(InvalidParameter):
            read_sizes(path)
    with pytest.raises(InvalidParameter, match="no such file"):
        read_sizes(tmp_path / "none")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InvalidParameter):
        read_sizes(tmp_path / "pipe")


def lie(mechanism: Mechanism, *, client: int, code: int, config: Config) -> bytearray:
    """A well-formed frame in which every code is `code`."""
    digest = parameters_digest(mechanism, range=config.range, dimension=3)
    writer = FrameWriter(Header(mechanism=mechanism, digest=digest, client=client, round=0, dimension=3, seeded=False))
    coder = FixedWidth(mechanism.code_count)
    coder.pack(np.full(3, code, coder.dtype), writer.payload)
    return writer.seal()


@pytest.mark.parametrize(("bits", "stated"), [(8, "25.7"), (16, "6,560")])
def test_one_liar_of_five_moves_the_mean_as_far_as_is_stated_and_no_further(bits: int, stated: str) -> None:
    config = Config.of(clients=5, rounds=1, bits=bits, range=0.5, learning_rate=1.0, momentum=0.0, schedule="constant")
    honest = Mechanism(levels=100, trials=40)
    lying = Mechanism(levels=1, trials=(1 << bits) - 3)
    moved = {}
    for liar_lies in (False, True):
        server = Server(model=np.zeros(3, np.float32), weights=dict.fromkeys(range(5), 1.0), config=config)
        server.open_round()
        for client in range(5):
            codes = (lying, lying.code_count - 1) if client == 4 and liar_lies else (honest, 20)  # 20 is the value -R
            frame = lie(codes[0], client=client, code=codes[1], config=config)
            assert server.receive(frame, sender=client).status == "ok"
        server.close_round()
        moved[liar_lies] = -server.model[0] / config.range
    attained = moved[True] - moved[False]
    bound = one_liar_moves("mean", weights=[1.0] * 5, fewest_frames=1, byzantine=0, reach=((1 << bits) - 1) / 2)
    assert bound is not None
    assert attained == pytest.approx(bound[0], rel=1e-6)
    assert f"by up to {stated} R when all 5 clients answer" in server.one_liar()
    wider = Mechanism(levels=1, trials=(1 << bits) - 2)
    server = Server(model=np.zeros(3, np.float32), weights=dict.fromkeys(range(5), 1.0), config=config)
    server.open_round()
    assert server.receive(lie(wider, client=4, code=0, config=config), sender=4).status == "refused"


def test_a_round_of_few_frames_gives_a_liar_more() -> None:
    moves = one_liar_moves("mean", weights=[3.0, 1.0, 1.0, 1.0], fewest_frames=2, byzantine=0, reach=9.0)
    assert moves == pytest.approx((10 * 3 / 6, 10 * 3 / 4))
    words = one_liar_words(moves, rule="mean", clients=4, fewest_frames=2)
    assert "5.00 R when all 4 clients answer, 7.50 R if only 2 of them" in words


@pytest.mark.parametrize(("rule", "byzantine"), [("median", 0), ("median", 1), ("trimmed-mean", 1)])
def test_robust_rules_keep_one_liar_among_the_honest(rule: str, byzantine: int) -> None:
    assert one_liar_moves(rule, weights=[1.0] * 5, fewest_frames=3, byzantine=byzantine, reach=127.5) is None
    rng = np.random.default_rng(0)
    for _ in range(50):
        honest = rng.normal(size=(4, 3))
        found = aggregate(rule, [*honest, rng.normal(size=3) * 1e9], byzantine=byzantine)
        assert (found >= honest.min(axis=0)).all()
        assert (found <= honest.max(axis=0)).all()


def test_robust_rules_without_enough_clients_are_no_better_than_a_mean() -> None:
    assert one_liar_moves("median", weights=[1.0, 1.0], fewest_frames=1, byzantine=0, reach=9.0) == (5.0, 10.0)
    assert one_liar_moves("trimmed-mean", weights=[1.0] * 5, fewest_frames=5, byzantine=0, reach=9.0) == (2.0, 2.0)
    assert one_liar_moves("krum", weights=[1.0] * 5, fewest_frames=5, byzantine=1, reach=9.0) is None


def test_the_page_states_the_figures() -> None:
    page = (Path(__file__).parents[2] / "docs" / "training.md").read_text()
    for clients in (5, 100):
        cells = []
        for settings in ({"bits": 4}, {"bits": 8}, {"bits": 16}, {"levels": 17, "trials": 220}):
            config = Config.of(clients=clients, **settings)
            weights = dict.fromkeys(range(clients), 1.0)
            words = Server(model=np.zeros(3, np.float32), weights=weights, config=config).one_liar()
            cells.append(words.split(" by up to ")[1].split(" when ")[0])
        assert f"| {clients} | {' | '.join(cells)} |" in page


def test_no_run_has_more_clients_than_a_record_can_hold() -> None:
    assert Config.of(clients=100_000).clients.count == 100_000
    with pytest.raises(InvalidParameter, match="clients must be from 1 to 100000, got 100001"):
        Config.of(clients=100_001)
