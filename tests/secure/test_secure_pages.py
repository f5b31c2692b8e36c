"""What the pages on secure sums state, and the command that makes keys and rosters."""

import hashlib
import json
import math
import re
import struct
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from secure_sums import SMALL_SPARSE, Federation, agreement

from bqsgd._src.cli.app import main
from bqsgd._src.noise import NoiseSource
from bqsgd._src.privacy.guarantee import rounded_up
from bqsgd._src.secure import masks, messages
from bqsgd._src.secure.agreement import Agreement
from bqsgd._src.secure.graph import thresholds
from bqsgd._src.secure.noise_shares import NoiseParts, add_binomial
from bqsgd._src.secure.roster import Roster, public_key, read_identity, read_roster
from bqsgd._src.secure.sparse import sparse_numbers
from bqsgd._src.settings.config import Config
from bqsgd._src.settings.node_limits import NodeLimits

DOCS = Path(__file__).resolve().parents[2] / "docs"
WIRE = (DOCS / "wire.md").read_text(encoding="utf-8").split("## Messages of a secure sum")[1]
PAGE = (DOCS / "secure.md").read_text(encoding="utf-8")
WORDS = " ".join(PAGE.split())
"""The page without line breaks."""


def table(text: str, heading: str) -> list[list[str]]:
    lines = text.split(heading)[1].splitlines()[2:]
    rows = []
    for line in lines:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def test_the_header_is_laid_out_as_the_page_says():
    rows = table(WIRE, "| offset | bytes | field | meaning |")
    sizes = {4: "I", 2: "H", 1: "B", 8: "Q", 16: "16s"}
    fields = [(int(offset), int(size), name) for offset, size, name, _ in rows]
    assert [offset for offset, _, _ in fields] == [sum(size for _, size, _ in fields[:i]) for i in range(len(fields))]
    layout = struct.Struct("<4s" + "".join(sizes[size] for _, size, name in fields if name != "magic"))
    assert layout.format == messages._HEADER.format
    assert layout.size == messages.HEADER_BYTES == 48


def test_the_kinds_are_those_of_the_page():
    rows = table(WIRE, "| kind | message | from | body |")
    assert {int(row[0]): row[1] for row in rows} == {
        int(kind): kind.name.lower().replace("_", " ") for kind in messages.Kind
    }


def test_every_purpose_of_a_key_is_on_the_page():
    named = {row[0].strip("`") for row in table(WIRE, "| purpose | secret | context | gives |")}
    folder = Path(masks.__file__).parent
    source = "".join(path.read_text() for path in folder.glob("*.py"))
    used = set(re.findall(r'(?:derive|_channel|_stream)\([^"\n]*"([\w-]+)"', source))
    assert used == named


def test_the_thresholds_of_the_page():
    for row in table(PAGE, "| n | f | t | neighbours | shares that open a secret | of holders | signatures |"):
        n, f, t, near, share, holders, quorum = (int(re.sub(r"\D", "", cell)) for cell in row)
        rule = thresholds(clients=n, dropouts=f, colluders=t)
        masks, held = (n - 1, n - 1) if rule.sparse is None else (rule.sparse.masks, rule.sparse.holders)
        assert (masks, rule.share_threshold, held, rule.quorum) == (near, share, holders, quorum)
        assert rule.failure <= 2**-40


def test_the_table_of_sparse_numbers():
    heading = "| | meaning | n = 250, f = t = 12 | n = 1,000, f = t = 50 | n = 1,000, f = 50, t = 100 |"
    columns = zip(*(row[2:] for row in table(WIRE, heading)), strict=True)
    for (n, f, t), column in zip([(250, 12, 12), (1000, 50, 50), (1000, 50, 100)], columns, strict=True):
        found = sparse_numbers(n, f, t)
        numbers = found.masks, found.away, found.holders, found.threshold, found.committee, found.quorum
        assert tuple(map(int, column)) == numbers


@pytest.mark.parametrize(("n", "f", "t"), [(201, 0, 0), (201, 20, 5), (250, 12, 12), (310, 15, 31)])
def test_the_numbers_of_a_sparse_graph_follow_from_the_page(n, f, t):
    """Written from the wire page alone, with exact binomial coefficients and without scipy."""
    found = sparse_numbers(n, f, t)
    assert _numbers_of_the_page(n, f, max(t, 1)) == (
        found.masks, found.away, found.holders, found.threshold, found.committee, found.quorum
    )  # fmt: skip


def test_neighbours_and_committee_follow_from_the_page():
    agreed = agreement(30, dropouts=2, sparse=SMALL_SPARSE)
    roster, numbers = agreed.roster, SMALL_SPARSE

    def order(index):
        info = b"bqsgd.secure.graph.v3\x00" + struct.pack("<Q", index)
        key = HKDF(algorithm=hashes.SHA256(), length=32, salt=roster.digest, info=info).derive(roster.seed)[:16]
        stream = Cipher(algorithms.AES128(key), modes.CTR(bytes(16))).encryptor().update(bytes(8 * 30))
        words = struct.unpack("<30Q", stream)
        return sorted(range(30), key=lambda place: (words[place], place))

    def near(client, slots):
        around = set()
        for index in range(slots // 2):
            at = order(index).index(client)
            around |= {order(index)[at - 1], order(index)[(at + 1) % 30]}
        return tuple(sorted(around - {client}))

    for client in range(30):
        assert agreed.graph.masks(client) == near(client, numbers.masks)
        assert agreed.graph.holders(client) == near(client, numbers.holders)
    assert agreed.graph.committee == tuple(sorted(order(numbers.holders // 2)[: numbers.committee]))


def test_the_check_of_a_self_seed_follows_from_the_page():
    federation = Federation(agreement(4, dropouts=1, trials=7))
    federation.begin(epoch=5, first_round=3, rounds=2)
    client, agreed = federation.clients[2], federation.agreement
    seed = client._state.batch.secrets[4]
    for _ in range(agreed.noise.parts):
        info = b"bqsgd.secure.noise-chain.v3\x00" + struct.pack("<QQ", 2, 4)
        seed = HKDF(algorithm=hashes.SHA256(), length=32, salt=agreed.run_digest, info=info).derive(seed)[:16]
    assert agreed.noise.parts > 0
    name = b"bqsgd.secure.seed-check.v3\x00" + agreed.session + struct.pack("<QQQ", 5, 2, 4)
    said = federation.server._batch.shares[2].corrections(agreed, 4)
    assert said.seed_check == hashlib.sha256(name + seed).digest()[:16]
    assert all(f"`{check}-check`" in WIRE for check in ("seed", "self", "mask"))


def test_the_example_of_a_sparse_graph():
    keys = {client: hashlib.sha256(struct.pack("<I", client)).digest() for client in range(250)}
    agreed = Agreement(
        roster=Roster(keys, bytes(range(32))),
        run="example",
        rule=thresholds(clients=250, dropouts=12, colluders=12),
        dimension=100,
        width=12,
        trials=5000,
    )
    words, graph, noise = " ".join(WIRE.split()), agreed.graph, agreed.noise

    def listed(numbers):
        return ", ".join(map(str, numbers))

    digests = [digest.hex()[:8] for digest in (agreed.roster.digest, agreed.run_digest, agreed.session)]
    assert "begin with `{}`, `{}` and `{}`;".format(*digests) in words
    assert f"begins with the places {listed(graph._order(0)[:6])};" in words
    near, holders = graph.masks(0), graph.holders(0)
    assert (
        f"has the mask neighbours {listed(near)} ({len(near)} clients in 20 slots) and {len(holders)} holders" in words
    )
    assert f"the first {listed(holders[:6])}; the committee begins with {listed(graph.committee[:5])};" in words
    chain = noise.chain(0, bytes(16), agreed.run_digest, client=0, round=7)
    own = masks.self_key(chain[-1], agreed.session, client=0, round=7)
    pair = masks.pair_keys([bytes(16)], agreed.session, round=7, model=masks.NO_MODEL)[0]
    assert f"the cuts are {listed(noise.cuts)}." in words
    assert [f"`{key.hex()[:8]}`" in words for key in (chain[1], chain[2], own, pair)] == [True] * 4
    drawn = np.zeros(agreed.dimension, np.uint16)  # all of them: where a piece ends depends on their number
    add_binomial(drawn, 70, NoiseSource(masks.derive(bytes(16), "noise", agreed.run_digest, 0), seeded=False))
    assert f"be {listed(drawn[:5])};" in words


def test_the_example_of_noise_in_parts():
    noise = NoiseParts(total=100, rule=thresholds(clients=10, dropouts=2, colluders=1))
    ends = [noise.kept(size, rank) for size in (8, 9, 10) for rank in (0, size - 1)]
    words = " ".join(WIRE.split())
    assert "kept is {} and {} at u = 8, {} and {} at u = 9, {} and {} at u = 10".format(*ends) in words
    assert f"cuts are {', '.join(map(str, noise.cuts))}." in words
    assert [noise.first_unneeded(9, rank) for rank in range(9)] == [2] * 5 + [1] * 4  # as the page says


def _numbers_of_the_page(n, f, t):
    p, comb = 2.0**-42, math.comb

    def binomial(size, chance):
        return [comb(size, i) * chance**i * (1 - chance) ** (size - i) for i in range(size + 1)]

    def drawn(marked, size):
        whole = comb(n, size)
        return [comb(marked, i) * comb(n - marked, size - i) / whole for i in range(size + 1)]

    def top(law, most):
        return next(h for h in range(len(law)) if math.fsum(law[h + 1 :]) <= most)

    for m in range(3, n + 1):
        c, g = min(t, 1 + top(drawn(t, m), p)), min(f, 1 + top(drawn(f, m), 1e-9))
        quorum = (m + c) // 2 + 1
        if m - g >= quorum:
            break

    def expectation(s, x):
        rest, whole = n - s, comb(n - 1, s)
        u, v = (t + x * (rest - t)) / rest, (t + x * x * (rest - t)) / rest
        if s > 48:
            return math.fsum(comb(rest, j) * comb(s - 1, j - 1) / whole * v**j for j in range(1, s + 1))
        return math.fsum(
            comb(s - 1, j - 1) * rest * comb(rest - j, r) * comb(j - 1, r - 1) / (whole * (rest - j))
            * u ** (2 * r) * v ** (j - r)
            for j in range(1, s + 1) for r in range(1, j + 1)
        )  # fmt: skip

    tilts = (0.003, 0.01, 0.03, 0.06, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5)
    sizes = range(1, (n - t) // 2 + 1)
    logs = {(s, x): math.log(min(1.0, expectation(s, x))) for s in sizes for x in tilts}
    for d in range(8, 129, 2):
        a = top(binomial(d, f / n), 0.003)
        bounds = (
            min(math.log(comb(n - t, s)) - a * s * math.log(x) + d / 2 * logs[s, x] for x in tilts) for s in sizes
        )
        if 1.000001 * math.fsum(math.exp(min(0.0, bound)) for bound in bounds) <= p:
            break

    def safe(k, h):
        b, z = t / (n - 1), k / h
        rate = z * math.log(z / b) + ((1 - z) * math.log((1 - z) / (1 - b)) if z < 1 else 0)
        return z > b and n * math.exp(-h * rate) <= p

    for h in range(d, 129, 2):
        k = next((k for k in range(1, h + 1) if safe(k, h)), None)
        y = h * (h - 1) / (2 * (n - 1))
        e = max(0, h - math.ceil(y + 3 * math.sqrt(y)))
        if k is not None and (e >= k) and math.fsum(binomial(e, f / n)[e - k + 1 :]) <= 1e-6:
            break
    return d, a, h, k, m, quorum


def test_what_the_page_says_of_colluders_and_deleted_files():
    assert "in [its own limits](deploy.md#what-a-client-agrees-to): `colluders`, 0 by default too" in WORDS
    assert NodeLimits().colluders == Config().secure.colluders == 0
    rule = thresholds(clients=10, dropouts=2, colluders=2)
    assert rule.quorum - rule.colluders == 5
    assert "(with n = 10, f = t = 2: five)" in WORDS  # what it takes is tested in test_hostile_sum_server


def test_lengths_follow_from_what_was_agreed():
    agreed = agreement(10, dropouts=2, colluders=2, dimension=1000, width=11, trials=60)
    k = agreed.rule.share_threshold
    assert k == 6
    for count in (9, 7, 6):
        assert messages.round_size(agreed, 0, range(1, 1 + count)) == 16 * (3 + (count - k + 1) + (count - k))


def test_keys_and_roster_from_the_command_line(tmp_path, capsys):
    entries = []
    for name in ("a", "b", "c"):
        assert main(["secure", "keygen", "--out", str(tmp_path / name), "--json"]) == 0
        public = json.loads(capsys.readouterr().out)["public_key"]
        assert public == public_key(read_identity(tmp_path / name)).hex()
        entries.append(f"{len(entries)}={public}")
    path = tmp_path / "roster.toml"
    assert main(["secure", "roster", "--out", str(path), *entries]) == 0
    assert read_roster(path).digest.hex() in capsys.readouterr().out
    assert main(["secure", "roster", "--show", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["clients"] == dict(entry.split("=") for entry in entries)


@pytest.mark.parametrize(
    "arguments",
    [["roster"], ["roster", "--out", "new", "0=zz"], ["roster", "--out", "new", "what"], ["roster", "--show", "none"]],
)
def test_what_is_no_roster_is_refused_in_one_line(arguments, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["secure", *arguments]) == 2
    assert capsys.readouterr().err.startswith("bqsgd: ")
    assert not (tmp_path / "new").exists()


def test_files_are_not_overwritten(tmp_path, capsys):
    key = tmp_path / "key"
    assert main(["secure", "keygen", "--out", str(key)]) == 0
    before = key.read_bytes()
    assert main(["secure", "keygen", "--out", str(key)]) == 2
    assert key.read_bytes() == before
    capsys.readouterr()


def test_the_costs_on_the_page_are_those_of_the_benchmark():
    measured = json.loads((DOCS.parent / "benchmarks" / "results" / "secure.json").read_text())
    heading = (
        "| clients | masks | encode and mask, in plain encodes | whole round | server, ms a client | kB up | kB down |"
    )
    assert table(PAGE, heading) == [
        [
            f"{row['clients']:,}",
            str(row["masks"]),
            f"{row['masked_times_plain_encode']:.1f}",
            f"{row['round_times_plain_encode']:.1f}",
            f"{1e3 * row['server_seconds_per_client']:.2f}",
            f"{row['bytes_up'] / 1e3:.1f}",
            f"{row['bytes_down'] / 1e3:.1f}",
        ]
        for row in measured["by_clients"]
    ]
    seconds, sharing = measured["masking"]["seconds"], measured["sharing_30_of_which_20"]
    for figure in (
        f"A plain encode took {1e3 * measured['plain_encode_seconds']:.2f} ms",
        f"took {1e3 * seconds['ours']:.1f} ms, Flower's SecAgg+ {1e3 * seconds['flower']:.0f} ms",
        f"took {1e3 * sharing['split']:.2f} ms, pycryptodome's `Shamir` {1e3 * sharing['split_pycryptodome']:.1f} ms",
    ):
        assert figure in WORDS


def test_the_costs_over_flower_are_those_of_the_demos(monkeypatch):
    monkeypatch.syspath_prepend(str(DOCS.parent))
    from experiments.scale import secure_flower

    found = json.loads(secure_flower.RESULTS.read_text(encoding="utf-8"))
    for run in found["runs"]:
        batches = -(-run["rounds"] // Config().secure.key_rounds)
        assert run["round_trips"] == (3 * run["rounds"] + 3 * batches if run["secure"] else run["rounds"])
        assert run["frames_received"] == run["rounds_in_ledgers"] == found["clients"] * run["rounds"]
        assert run["processes_left"] == 0
        guarantee = run["guarantee"]
        assert guarantee["epsilon"] <= 3.0
        assert (guarantee["delta"], guarantee["seeded"]) == (1e-5, False)
        assert ("sums" in guarantee["trust"]) == run["secure"]


def test_what_the_page_says_of_liars_is_what_the_runs_found():
    found = json.loads((DOCS.parent / "experiments" / "results" / "liars.json").read_text(encoding="utf-8"))
    runs = {(run["groups"], run["lie"], run["liars"]): run for run in found["runs"]}
    assert len(runs) == 4 * (1 + 2 * 4)
    for (groups, lie, liars), run in runs.items():
        assert set(map(int, run["named"])) <= set(found["places"][:liars]), "The log names nobody but liars"
        assert not (lie == "wrong vector" and run["named"]), "Nobody is named for a wrong vector"
        assert run["rounds"] == run["steps"] == 15
        assert run["largest_epsilon"] <= 3.0
        if groups == 1 and lie != "wrong vector":  # "cost one sum the liars' own vectors and nothing else"
            assert run["used"] >= 29 - liars
            assert run["accuracy"] > 0.6
    accuracy = {key: run["accuracy"] for key, run in runs.items()}
    assert accuracy[3, "wrong vector", 1] > 0.5 > 0.2 > accuracy[3, "wrong vector", 2]
    assert "three withstand one such liar and not two" in WORDS


def test_the_accuracies_of_the_page_are_those_of_the_runs():
    found = json.loads((DOCS.parent / "experiments" / "results" / "frontier.json").read_text(encoding="utf-8"))
    points = {row["point"]: row for row in found["rows"]}
    rows = table(
        PAGE,
        "| data | clients | sums only, % (epsilon) | each message, % (epsilon) | bits of a sum; of a message |",
    )
    shown = set()
    for data, clients, *cells, bits in rows:
        after = "" if clients == "4" else f"-{clients}"
        presets = [f"{data.split('-')[0].lower()}-eps3{kind}{after}" for kind in ("-sums", "")]
        # The runs that sent every coordinate stand in for a preset that has none yet.
        pair = [points[name] if points[name]["mean"] else points[f"{name}-one-in-1"] for name in presets]
        for name, row, cell in zip(presets, pair, cells, strict=True):
            shown.add(name)
            guarantee = row["guarantee"]
            assert cell == f"{100 * row['mean']:.2f} ({rounded_up(guarantee['epsilon'])})"
            assert guarantee["epsilon"] <= 3.0
            assert (guarantee["delta"], guarantee["relation"], guarantee["seeded"]) == (1e-5, "add/remove one", False)
            assert ("sums" in guarantee["trust"]) == row["secure"] == ("sums" in name)
        assert bits == "; ".join(f"{row['bits_measured']:.2f}" for row in pair)
    assert shown == {
        name
        for name, row in points.items()
        if name == row["preset"]
        and name.startswith(("mnist-eps3", "fashion-eps3"))
        and not name.endswith(("bit", "whitened"))
    }
