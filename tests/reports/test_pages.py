"""The pages as text: what they must say, must not claim, and must escape; the command that writes them."""

from __future__ import annotations

import json
import re
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest

from bqsgd._src.cli.app import main
from bqsgd._src.errors import InvalidParameter
from bqsgd._src.privacy.guarantee import Guarantee
from bqsgd._src.records.folder import read_history
from bqsgd._src.reports.page import comparison_page, epsilon_text, run_page, write_report


def words(page: str) -> str:
    """The page's text without scripts and styles."""
    page = re.sub(r"<(script|style)\b.*?</\1>", " ", page, flags=re.S)
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", page)).split())


class Addresses(HTMLParser):
    """Every attribute that could make a browser fetch something."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, str]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [
            (tag, value or "") for name, value in attrs if name in ("src", "href", "srcset", "action", "data")
        ]


def test_the_report_is_small_self_contained_and_says_everything_beside_its_epsilon(synthetic_run) -> None:
    page = write_report(synthetic_run()).read_text()
    assert len(page) < 300_000
    addresses = Addresses()
    addresses.feed(page)
    assert addresses.found == [("link", "data:,")]
    assert "url(" not in page
    text = words(page)
    for said in ("ε = 2.913 at δ = 1e-5", "add/remove one", "server sees each client", "poisson", "proven upper bound"):
        assert said in text
    assert "nominal" not in text.lower()
    assert "seeded noise" not in text


def test_a_long_run_stays_a_small_page(synthetic_run) -> None:
    assert write_report(synthetic_run(rounds=5000)).stat().st_size < 400_000


def test_a_seeded_run_claims_no_privacy(synthetic_run) -> None:
    text = words(write_report(synthetic_run(seeded=True)).read_text())
    assert "seeded noise: no privacy claim" in text
    assert "Privacy guarantee" not in text


def test_an_unfinished_run_claims_nothing(synthetic_run) -> None:
    text = words(write_report(synthetic_run(finished=False)).read_text())
    assert "Unfinished run" in text
    assert "It is stated when the run has ended." in text
    assert "ε =" not in text


def test_a_meaningless_epsilon_is_not_dressed_up(synthetic_run, stated_guarantee) -> None:
    for epsilon in ("inf", 1500.0):
        text = words(
            write_report(
                synthetic_run(f"run-{epsilon}", guarantee={**stated_guarantee, "epsilon": epsilon})
            ).read_text()
        )
        assert "No meaningful guarantee" in text
        assert "ε > 1000" in text


def test_a_shown_bound_is_rounded_up(stated_guarantee) -> None:
    for epsilon, shown in ((2.9131, "= 2.914"), (2.913, "= 2.913"), ("inf", "> 1000")):
        assert epsilon_text(Guarantee.from_dict({**stated_guarantee, "epsilon": epsilon})) == shown


def test_every_text_of_the_folder_is_escaped(synthetic_run, stated_guarantee) -> None:
    attack = "<img src=x onerror=alert(1)></script>'\"&"
    folder = synthetic_run("<i>name", guarantee={**stated_guarantee, "method": attack, "sampling": attack})
    with (folder / "rounds.jsonl").open("a") as rounds:
        entry = {"client": 9, "status": "refused", "reason": attack}
        rounds.write(json.dumps({"round": 401, "clients": [entry], "seconds": {attack: 1.0}}) + "\n")
    (folder / "config.toml").write_text(f"dataset = '''{attack}'''\n\"{attack[:4]}\" = 1\n")
    run = read_history(folder)
    for page in (run_page(run), comparison_page([run, run])):
        assert "<img" not in page
        assert "<i>name" not in page
        assert page.count("<script") == page.count("</script>")
        assert page.count("<script") == len(re.findall(r"<figure", page)) + 1


def test_many_clients_are_cut_to_those_with_trouble(tmp_path: Path) -> None:
    clients = [{"client": i, "status": "refused" if i == 777 else "ok", "levels": 1, "trials": 3} for i in range(1000)]
    (tmp_path / "rounds.jsonl").write_text(json.dumps({"round": 1, "clients": clients}) + "\n")
    page = run_page(read_history(tmp_path))
    assert "<td>777</td>" in page
    assert page.count("<tr>") == 41
    assert "The 40 with most trouble of 1000" in page


def test_a_comparison_warns_when_epsilons_do_not_compare(synthetic_run, stated_guarantee) -> None:
    one, same = read_history(synthetic_run("one")), read_history(synthetic_run("same", shape=2))
    other = read_history(synthetic_run("other", guarantee={**stated_guarantee, "delta": 1e-6, "unit": "client"}))
    assert "do not compare" not in comparison_page([one, same])
    assert "The guarantees differ in delta, unit." in words(comparison_page([one, other]))


def test_a_comparison_takes_2_to_16_runs_and_tells_equal_names_apart(synthetic_run) -> None:
    run = read_history(synthetic_run(rounds=12))
    page = comparison_page([run] * 16)
    assert "mnist-4-clients (16)" in page
    for runs in ([run], [run] * 17):
        with pytest.raises(InvalidParameter, match="2 to 16"):
            comparison_page(runs)


def test_the_command_writes_one_report_or_a_comparison(synthetic_run, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    one, two = synthetic_run("one", rounds=12), synthetic_run("two", rounds=12)
    assert main(["report", str(one), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["report"] == str(one / "report.html")
    assert answer["bytes"] == (one / "report.html").stat().st_size
    assert main(["report", str(one), str(two)]) == 0
    assert "2 runs compared" in (tmp_path / "comparison.html").read_text()
    assert main(["report", str(one), "--out", str(tmp_path / "x.html")]) == 0
    assert (tmp_path / "x.html").exists()


def test_the_command_says_in_one_line_what_is_wrong(synthetic_run, tmp_path, capsys) -> None:
    for arguments in (["nowhere"], [str(synthetic_run(rounds=3)), "--out", str(tmp_path / "no" / "x.html")]):
        assert main(["report", *arguments]) == 2
        complaint = capsys.readouterr().err
        assert complaint.count("\n") == 1
        assert complaint.startswith("bqsgd: ")
