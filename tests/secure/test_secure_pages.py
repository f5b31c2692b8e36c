"""What the pages on secure sums state, and the command that makes keys and rosters."""

import json
import re
import struct
from pathlib import Path

import pytest
from secure_sums import agreement

from bqsgd._src.cli.app import main
from bqsgd._src.privacy.guarantee import rounded_up
from bqsgd._src.secure import masks, messages
from bqsgd._src.secure.graph import thresholds
from bqsgd._src.secure.roster import public_key, read_identity, read_roster
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
        if name == row["preset"] and name.startswith(("mnist-eps3", "fashion-eps3")) and not name.endswith("bit")
    }
