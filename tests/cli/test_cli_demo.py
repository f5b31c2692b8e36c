"""`bqsgd demo`: the whole path on a gradient of LeNet-5's size."""

import pytest


def test_the_figures_are_those_of_the_mechanism(bqsgd):
    result = bqsgd("demo", "--clients", 25, "--json")
    assert result.code == 0, result.err
    shown = result.json
    assert shown["frame_bytes"] == 61_706 + 80  # one byte a coordinate and the header
    assert shown["entropy_frame_bytes"] < 0.7 * shown["frame_bytes"]
    # Relative standard error of a root mean square over 61,706 coordinates is 0.3 %.
    assert shown["error_one_client"] == pytest.approx(shown["error_expected_one_client"], rel=0.03)
    assert shown["error_mean_of_clients"] == pytest.approx(shown["error_one_client"] / 5, rel=0.04)


def test_a_table_for_people_and_one_line_for_mistakes(bqsgd):
    assert "bits_per_coordinate" in bqsgd("demo", "--clients", 1).out
    refused = bqsgd("demo", "--levels", 0)
    assert refused.code == 2
    assert refused.err.startswith("bqsgd: levels must be")
