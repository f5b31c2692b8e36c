"""Data whose samples belong to clients: parsed from a made-up play and table, and shared by owner and nothing else."""

import csv
import hashlib
import io
from dataclasses import replace

import numpy as np
import pytest
import torch

from bqsgd._src import models
from bqsgd._src.data import _plays as plays
from bqsgd._src.data import _visits as visits
from bqsgd._src.data import dataset as datasets
from bqsgd._src.data import shares
from bqsgd._src.data._sources import File
from bqsgd._src.errors import InvalidParameter

SPEECH = {"HAMLET": "words, words, words. ", "KING": "how now! "}
PLAY = "ACT I.\n\n" + "".join(
    f"{role.title()}.\n{speech * 20}\n[Exit.]\n\n" for role, speech in SPEECH.items() for _ in range(4)
)


def text_of(inputs, labels):
    """The characters that a role's rows predict, and the check that each input holds the ones before."""
    line = "".join(plays.ALPHABET[code] for code in labels)
    padded = "\n" * plays.CONTEXT + line
    for number, codes in enumerate(inputs.astype(int)):
        assert "".join(plays.ALPHABET[code] for code in codes) == padded[number : number + plays.CONTEXT]
    return line


def test_a_role_s_first_words_train_its_last_test_and_nobody_else_has_them():
    small = PLAY + "Ghost.\nMark me.\n"
    found = plays.by_role([small.encode(), PLAY.encode()])
    whole = {role: "\n".join(["".join(speech * 20).strip()] * 4) + "\n" for role, speech in SPEECH.items()}
    assert found.owners.max() + 1 == 4, "two roles in each play, and the ghost says too little"
    assert found.classes == len(plays.ALPHABET)
    for owner, said in zip(range(4), 2 * list(whole.values()), strict=True):
        rows = found.owners == owner
        line = text_of(found.train[0][rows], found.train[1][rows])
        cut = len(said) * 4 // 5
        assert line == said[: min(cut, plays.MOST)]
    tested = "".join(plays.ALPHABET[code] for code in found.test[1])
    assert tested == 2 * "".join(said[len(said) * 4 // 5 :][: plays.TESTED] for said in whole.values())


def test_plays_with_hostile_lines_give_roles_or_none():
    assert plays.roles("") == {}
    assert plays.roles("\n\n\nA.") == {}
    assert plays.roles("[" * 1000 + "\n\nA.\nb\n") == {"A": "b\n"}
    assert list(plays.roles("\r\n\r\nKing. [Aside.]\r\nOh.\r\n")) == ["KING"]


def table(people):
    names = "year site xage female black linc educdec disea physlm mhi num coins idp hlthg hlthf hlthp xghindx mdvis"
    written = io.StringIO()
    rows = csv.DictWriter(written, names.split())
    rows.writeheader()
    for site, count in people.items():
        for number in range(count):
            row = dict.fromkeys(names.split(), "0") | {"site": site, "xage": number, "mdvis": number % 4}
            rows.writerows([row | {"year": 1}, row | {"year": 2, "xage": 99}])
    return written.getvalue().encode()


def test_every_person_is_one_record_of_one_practice_and_sites_do_not_mix():
    people = {1: 100, 2: 200, 3: 60, 4: 60, 5: 60, 6: 60}
    found = visits.by_practice([table(people)])
    sizes = np.bincount(found.owners)
    assert len(sizes) == sum(visits.PRACTICES.values()) == 20
    assert len(found.train[1]) + len(found.test[1]) == sum(people.values()), "later years are left out"
    assert sizes[:4].tolist() == [8, 16, 24, 32], "four fifths of 10, 20, 30 and 40 of the first site"
    ages = np.concatenate([found.train[0][:, 0], found.test[0][:, 0]])
    np.testing.assert_allclose(
        np.sort(ages), np.sort([age / 50 - 0.7 for count in people.values() for age in range(count)]), rtol=1e-5
    )
    assert set(found.train[1].tolist()) == {0, 1}
    assert len(visits.features(next(csv.DictReader(io.StringIO(table({1: 1}).decode()))))) == found.train[0].shape[1]


@pytest.fixture
def tiny(monkeypatch):
    """A data set of two plays of the catalogue, read from memory."""
    content = [PLAY.encode(), PLAY.encode()]
    files = tuple(File(f"{n}.txt", hashlib.sha256(raw).hexdigest(), len(raw)) for n, raw in enumerate(content))
    entry = replace(datasets.CATALOGUE["shakespeare"], name="tiny-plays", files=files)
    monkeypatch.setattr(datasets, "fetched", lambda wanted, **_: (content, "memory"))
    monkeypatch.setitem(datasets.CATALOGUE, "tiny-plays", entry)
    shares.load_shares.cache_clear()
    yield "tiny-plays"
    shares.load_shares.cache_clear()


def test_shares_are_the_owners_for_every_seed(tiny):
    whole = datasets.load(tiny)
    divided = shares.load_shares(tiny, clients=4, seed=1)
    assert [len(share) for share in divided.shares] == np.bincount(whole.owners).tolist()
    np.testing.assert_array_equal(np.concatenate([share.labels for share in divided.shares]), whole.train.labels)
    third = shares.load_shares(tiny, clients=4, client=2, seed=5)
    np.testing.assert_array_equal(third.shares[0].inputs, divided.shares[2].inputs)
    with pytest.raises(InvalidParameter, match="has 4 clients of its own, got clients=3: set clients=4"):
        shares.load_shares(tiny, clients=3, seed=1)
    with pytest.raises(InvalidParameter, match="leave concentration out"):
        shares.load_shares(tiny, clients=4, seed=1, concentration=0.5)


def test_the_model_of_contexts_sees_codes_and_no_value_fails_it():
    model = models.build("context", input_shape=(6,), classes=36, seed=0)
    assert models.dimension_of(model) == 6 * 36 * 36 + 36
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape))
    linear = model[-1]
    codes = torch.tensor([[0.0, 35, 3, 3, 7, 1], [-1, 36, 0.5, torch.nan, torch.inf, 1e30]])
    columns = [place * 36 + int(code) for place, code in enumerate(codes[0])]
    torch.testing.assert_close(model(codes)[0], linear.weight[:, columns].sum(1) + linear.bias)
    torch.testing.assert_close(model(codes)[1], linear.bias)
