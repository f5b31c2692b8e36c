"""Features of a whole data set are kept in a file; a damaged one is computed again."""

from dataclasses import replace

import numpy as np
import pytest

from bqsgd import data
from bqsgd._src.data import features as module
from bqsgd._src.data.features import kept_features, whole_features


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setitem(module.CATALOGUE, "digits", None)
    digits = data.load("digits")
    first = np.arange(8)
    return data.Dataset(
        name="digits", train=digits.train.take(first), test=digits.test.take(first[:4]), classes=10, source="test",
        mean=digits.mean, deviation=digits.deviation,
    )  # fmt: skip


@pytest.fixture
def place(tmp_path):
    """The one file that is kept."""

    def found():
        (file,) = (tmp_path / "bqsgd/features").iterdir()
        assert file.name.startswith("digits-train-scattering-3-")
        return file

    return found


def test_what_was_kept_is_what_was_computed(tiny, place, monkeypatch):
    assert kept_features("scattering", "train", of=tiny) is None
    made = whole_features("scattering", "train", of=tiny)
    assert place().stat().st_mode & 0o777 == 0o600
    monkeypatch.setattr(module, "compute_features", lambda *_, **__: pytest.fail("computed twice"))
    again = whole_features("scattering", "train", of=tiny)
    np.testing.assert_array_equal(made.inputs, again.inputs)
    np.testing.assert_array_equal(made.labels, again.labels)
    with pytest.raises(ValueError, match="read-only"):
        again.inputs[0] = 0
    again.take(np.array([1]))


@pytest.mark.parametrize("damage", ["cut", "flip", "link"])
def test_a_damaged_file_is_computed_again(tiny, place, tmp_path, damage):
    made = whole_features("scattering", "train", of=tiny)
    file = place()
    content = file.read_bytes()
    if damage == "cut":
        file.write_bytes(content[:-1])
    elif damage == "flip":
        file.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    else:
        file.rename(tmp_path / "elsewhere")
        file.symlink_to(tmp_path / "elsewhere")
    assert kept_features("scattering", "train", of=tiny) is None
    np.testing.assert_array_equal(whole_features("scattering", "train", of=tiny).inputs, made.inputs)


@pytest.mark.parametrize("changed", ["pixels", "deviation"])
def test_other_data_under_the_same_name_have_features_of_their_own(tiny, changed):
    made = whole_features("scattering", "train", of=tiny)
    if changed == "pixels":
        other = replace(tiny, train=tiny.train.take(np.arange(8)[::-1].copy()))
    else:
        other = replace(tiny, mean=tiny.mean / 2, deviation=tiny.deviation / 2)
    assert kept_features("scattering", "train", of=other) is None
    found = whole_features("scattering", "train", of=other)
    assert not np.array_equal(found.inputs, made.inputs)
    np.testing.assert_array_equal(kept_features("scattering", "train", of=tiny).inputs, made.inputs)


def test_a_cache_that_cannot_be_written_costs_time_only(tiny, tmp_path):
    (tmp_path / "bqsgd").write_text("a file in the folder's place")
    assert len(whole_features("scattering", "test", of=tiny)) == 4


def test_raw_inputs_and_other_data_are_not_kept(tiny, tmp_path, monkeypatch):
    assert whole_features("none", "train", of=tiny) is tiny.train
    monkeypatch.delitem(module.CATALOGUE, "digits")
    whole_features("scattering", "train", of=tiny)
    assert not (tmp_path / "bqsgd").exists()
