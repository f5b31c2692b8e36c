"""A rank that sends what no honest rank sends."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from bqsgd._src.engines.torch_distributed import engine
from bqsgd._src.engines.torch_distributed.ranks import MessageKind
from bqsgd._src.errors import InvalidParameter
from distributed_processes import run_ranks

SCRIPT = Path(__file__).parent / "hostile_rank_worker.py"
WORDS = b"no\x1b[2J\x1b]0;owned\x07\r\nround 3: all is well \xe2\x80\xae" + b"x" * 400


@pytest.fixture(scope="module")
def found(made_once, tmp_path_factory):
    def run():
        folder = tmp_path_factory.mktemp("hostile")
        ended = run_ranks(folder, {}, script=SCRIPT, ranks=2)
        assert [code for code, _ in ended] == [0, 0], ended
        return json.loads((folder / "found.json").read_text())

    return made_once("hostile-ranks", run)


def test_a_body_that_is_shorter_than_announced_brings_up_nothing_that_this_process_held(found):
    """Gloo takes it as complete. The rest went into the round's record, as the reason of a client that declined."""
    assert found["beyond"] == [0]


def test_a_note_of_brackets_and_a_rank_that_leaves_raise_errors_of_bqsgd(found):
    assert found["nested"] == ["bqsgd._src.errors", "InvalidParameter"]
    assert found["gone"] == ["bqsgd._src.engines.torch_distributed.ranks", "PeerLost"]


class Refusing:
    """A channel to a rank that refuses to take part, in words of its own."""

    peer = 1

    def send(self, kind, body=b""):
        pass

    def receive(self, *, most_bytes):
        return MessageKind.REFUSAL, memoryview(WORDS)


def test_what_a_rank_says_is_shown_as_one_printable_line(settings):
    setup = SimpleNamespace(config=settings(), task=SimpleNamespace(source=None), resuming=False)
    with pytest.raises(InvalidParameter, match="rank 1 does not take part: no") as refused:
        engine._greet([Refusing()], setup)
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < 400
