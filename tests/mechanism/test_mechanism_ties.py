"""Draws that tie with an alias threshold, which no test would meet by chance: made by hand."""

import numpy as np
import pytest

from bqsgd._src.laws import Binomial
from bqsgd._src.mechanism._kernels import resolve_ties
from bqsgd._src.mechanism.encoder import encode
from bqsgd._src.noise import NOISE_BITS, ROUND_BITS, NoiseSource, alias_table
from bqsgd._src.params import Mechanism


class ScriptedKeystream:
    """Reads 16-byte blocks from a script; blocks that are not in it are zero."""

    def __init__(self, script: dict[int, tuple[int, int]], block: int) -> None:
        self.script, self.word = script, 2 * block

    def fill(self, words: np.ndarray) -> None:
        for j in range(len(words)):
            block, half = divmod(self.word + j, 2)
            words[j] = self.script.get(block, (0, 0))[half]
        self.word += len(words)


class ScriptedSource(NoiseSource):
    """A noise source whose words are chosen by the test."""

    def __init__(self, script: dict[int, tuple[int, int]]) -> None:
        super().__init__(bytes(32), seeded=True)
        self.script = script

    def keystream(self, block: int) -> ScriptedKeystream:  # type: ignore[override]
        return ScriptedKeystream(self.script, block)


def tied_word(trials: int, index: int) -> int:
    table = alias_table(Binomial(trials))
    rest = int(table.threshold[index])
    assert rest < 1 << (NOISE_BITS - table.index_bits), "an entry that is always kept cannot tie"
    return (index << (64 - table.index_bits)) | (rest << ROUND_BITS)


def tieable(trials: int) -> list[int]:
    table = alias_table(Binomial(trials))
    full = 1 << (NOISE_BITS - table.index_bits)
    return [i for i in range(len(table.alias)) if table.threshold[i] < full]


@pytest.mark.parametrize("trials", [7, 251, 16279, 1 << 20])
def test_the_refinement_word_decides_a_tie_exactly_at_its_threshold(trials: int) -> None:
    table, mechanism = alias_table(Binomial(trials)), Mechanism(levels=3, trials=trials)
    d = 5
    for index in [*tieable(trials)[:6], *tieable(trials)[-3:]]:
        refine, alias = int(table.refine[index]), int(table.alias[index])
        for refinement, entry in ((refine - 1, index), (refine, alias), (0, index if refine else alias)):
            if refinement < 0:
                continue
            # Coordinate 3 ties: the second word of block 1. Three blocks hold the five words, then one a coordinate.
            script = {1: (0, tied_word(trials, index)), 3 + 3: (refinement, 0)}
            codes = encode(np.zeros(d), mechanism, range=1.0, rng=ScriptedSource(script))
            assert int(codes[3]) == 3 + table.first + entry


def test_neighbours_of_a_tie_need_no_refinement() -> None:
    table = alias_table(Binomial(251))
    index = next(i for i in tieable(251) if table.threshold[i] > 1)
    one = 1 << ROUND_BITS
    words = tied_word(251, index)
    mechanism = Mechanism(levels=3, trials=251)
    below, above = (
        encode(np.zeros(1), mechanism, range=1.0, rng=ScriptedSource({0: (word, 0)}))[0]
        for word in (words - one, words + one)
    )
    assert int(below) == 3 + table.first + index
    assert int(above) == 3 + table.first + int(table.alias[index])


def test_only_tied_coordinates_are_touched_and_counted() -> None:
    table = alias_table(Binomial(251))
    first, second = [i for i in tieable(251) if table.refine[i] > 0][:2]
    words = np.array([2**64 - 1, tied_word(251, first), 2**63 - 1, tied_word(251, second)], np.uint64)
    codes = np.array([9, table.alias[first], 9, table.alias[second]], np.uint8)
    asked = []

    def refinement(j: int) -> int:
        asked.append(j)
        return 0 if j == 1 else 2**64 - 1

    assert resolve_ties(words, table, codes, refinement=refinement) == 2
    assert asked == [1, 3]
    assert codes.tolist() == [9, first, 9, int(table.alias[second])]
