"""Text that a peer chose moves no cursor, forges no line and reverses nothing, wherever it is shown.

Each place gets the same text: an escape sequence that clears a screen, a line break with a false line of a log, and an
override of direction, which makes "exe.txt" read as "txt.exe".
"""

import html
import json
import logging
import re

import pytest

from bqsgd._src import errors
from bqsgd._src.cli.app import main
from bqsgd._src.cli.output import answer
from bqsgd._src.engines.round import log_trouble
from bqsgd._src.engines.torch_distributed.engine import _words
from bqsgd._src.errors import FrameError
from bqsgd._src.ledger.history import Earlier
from bqsgd._src.privacy.guarantee import Guarantee
from bqsgd._src.records.folder import read_history
from bqsgd._src.records.record import RoundRecord
from bqsgd._src.reports.page import comparison_page, run_page
from bqsgd._src.text import one_line
from ledger.test_ledger import RELEASE, open_ledger
from synthetic_run import synthetic_run

__all__ = ["synthetic_run"]

NASTY = "\x1b[2Jname\nINFO: \u202eexe.txt\u2066\r\x9b31m\u2028\u200b\x00\ud800"
BAD = re.compile(r"[^\n -~–…·ε-ω\ufffd]")
"""Whatever does not print: the texts around it are plain, but for a few signs of ours."""


def clean(shown, *, lines=1):
    """Whether nothing of NASTY works any more, and all of it can be read."""
    assert BAD.search(shown) is None, repr(shown)
    assert shown.count("\n") < lines, repr(shown)
    assert r"\x1b[2Jname" in shown
    return True


def test_what_prints_stays_and_all_else_is_an_escape():
    assert clean(one_line(NASTY))
    assert one_line("Zürich, 3 % von α") == "Zürich, 3 % von α"
    assert one_line("a\u00a0b") == r"a\xa0b"  # a blank that is none can part a name in two
    assert one_line(r"\x1b") == r"\x1b"
    for limit in (10, 299, 300):
        assert len(one_line("\x1b" * 10**6, limit=limit)) == limit
    assert len(one_line("a" * 300)) == 300
    assert len(one_line("\x1b" * 400, limit=None)) == 1600


@pytest.mark.parametrize("name", [name for name in vars(errors) if isinstance(getattr(errors, name), type)])
def test_no_error_shows_more_than_text(name):
    assert clean(str(getattr(errors, name)(f"a header that says {NASTY!s}")), lines=2)


def test_errors_keep_their_own_line_breaks_and_the_arguments_of_their_other_base():
    assert str(FrameError("one\ntwo")) == "one\ntwo"
    assert str(errors.NotWritten(28, "no space")) == "[Errno 28] no space"


def test_a_command_refuses_in_one_line_that_obeys_nobody(capsys, tmp_path):
    assert main(["ledger", "show", str(tmp_path / NASTY.replace("\x00", "").replace("\ud800", ""))]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert BAD.search(said) is None, repr(said)


def test_answers_of_commands(capsys):
    answer(NASTY, {NASTY: NASTY}, {"text": NASTY}, json=False)
    shown = capsys.readouterr().out
    assert BAD.search(shown) is None
    assert r"\x1b[2Jname" in shown
    answer(NASTY, {NASTY: NASTY}, {"text": NASTY}, json=True)
    assert BAD.search(capsys.readouterr().out) is None


def test_what_a_client_states_of_its_own_guarantee():
    fields = {"epsilon": 1.0, "delta": 1e-5, "relation": "add/remove one", "unit": "sample", "seeded": False}
    fields |= {"trust": "server sees each client's messages", "method": "proven upper bound", "delta_floor": 0.0}
    stated = Guarantee.from_dict(fields | {"sampling": NASTY})
    assert clean(str(stated.sampling))


def test_the_history_of_a_ledger(tmp_path):
    with open_ledger(tmp_path / "a.ledger") as ledger:
        ledger.spend(RELEASE, run=NASTY.replace("\ud800", ""), round=0, seeded=False)
        assert clean(str(Earlier.of(ledger)))


def test_reasons_of_ranks_and_of_replies_in_the_log(caplog):
    assert clean(_words(memoryview(NASTY.encode(errors="surrogatepass"))))
    record = RoundRecord.from_dict(
        {"round": 3, "time": 1.0, "clients": [{"client": 1, "status": "refused", "reason": NASTY}], "stepped": True}
    )
    with caplog.at_level(logging.WARNING):
        log_trouble(record)
    assert clean(caplog.messages[0])


def test_every_text_on_a_page(synthetic_run):
    folder = synthetic_run(rounds=40)
    with (folder / "rounds.jsonl").open("a") as rounds:
        entry = {"client": 9, "status": "refused", "reason": NASTY}
        rounds.write(json.dumps({"round": 41, "clients": [entry], "seconds": {NASTY: 1.0}}) + "\n")
    (folder / "config.toml").write_text(f"dataset = {json.dumps(NASTY[:-1])}\n")
    run = read_history(folder)
    for page, times in ((run_page(run), 3), (comparison_page([run, run]), 0)):
        page = html.unescape(page)
        assert page.count(r"\x1b[2Jname") >= times
        assert not set(NASTY) & set(page) - set(map(chr, range(32, 127))) - {"\n"}
        assert "\nINFO:" not in page
