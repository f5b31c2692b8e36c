"""`bqsgd plan --sites`: what to set for a whole federation, before there is a run."""

import json

import pytest

from bqsgd import InvalidParameter, plan_sites
from bqsgd._src.cli.app import main
from bqsgd._src.reports.sites_map import _cells
from bqsgd._src.settings.fit import Sizes, fit
from bqsgd._src.settings.outlook import foresee
from bqsgd._src.settings.sites import read_bytes, read_sites

HOSPITALS = [300 + 247 * number for number in range(20)]
ASKED = {"sites": HOSPITALS, "parameters": 10**6, "epsilon": 2.0, "upload": 20e6}


@pytest.fixture(scope="module")
def answer():
    return plan_sites(**ASKED)


def test_both_trust_models_stay_within_the_upload_and_say_what_they_cost(answer):
    separate, secure = answer.options
    assert (separate.secure, secure.secure) == (False, True)
    for option in answer.options:
        assert option.bytes_up <= 20e6
        assert option.bytes_down == option.rounds * (4 * 10**6 + 100)
    assert secure.noise_to_signal < separate.noise_to_signal / 2, "twenty sites share one noise"
    assert (str(separate.verdict), str(secure.verdict)) == ("learns something", "learns well")
    text = str(answer)
    assert "use secure sums: with one noise for all sites the model learns well" in text
    assert "train fewer parameters to learn well (about 600,000 without secure sums)" in text
    assert text.count("well up to 0.15") == 1
    assert "add/remove one sample" in text
    assert "[some]" in text, "the point asked for is marked on the map"


def test_the_estimate_is_near_the_plan():
    """A small federation, whose plan is quick: the figure that the answer rests on is that of the real outlook."""
    small = {"sites": [300, 1000, 2000, 900], "parameters": 650, "epsilon": 2.0}
    option = plan_sites(**small).options[0]
    given = {"clients": 4, "epsilon": 2.0, "rounds": option.rounds}
    config = fit(given, Sizes(samples=4200, dimension=650, parameters=650))
    samples = dict(enumerate(small["sites"]))
    planned = foresee(config, samples, dimension=config.kept(650), learnt=650).forecast.noise_to_signal
    assert config.clients.one_in == option.one_in == 1
    assert option.noise_to_signal == pytest.approx(planned, rel=0.15)


def test_a_smaller_model_or_a_larger_epsilon_is_never_worse(answer):
    ranks = ["will not learn", "learns something", "learns well"]
    for (epsilon, parameters, secure), verdict in answer.map.items():
        for (other_epsilon, other_parameters, other_secure), other in answer.map.items():
            if secure == other_secure and other_epsilon >= epsilon and other_parameters <= parameters:
                assert ranks.index(other) >= ranks.index(verdict)


def test_sites_from_which_nothing_can_be_learnt_get_no_settings_and_no_tiny_model():
    text = str(plan_sites(sites=[5, 5, 5], parameters=10**4, epsilon=0.5))
    assert "will not learn" in text
    assert "--rounds" not in text
    assert "train fewer" not in text
    assert "more samples help most" in text
    assert "delta" not in text.split("\n", 1)[1]


def test_a_delta_above_one_in_the_largest_site_is_said():
    text = str(plan_sites(sites=[300_000], parameters=1000, epsilon=1.0))
    assert text.startswith("Plan for 1 site with 300,000 samples")
    assert "1e-05 is above 1/n of the largest site" in text


def test_an_upload_too_small_for_any_message_says_so():
    tiny = plan_sites(**ASKED | {"upload": 500.0})
    assert tiny.options == ()
    assert "no message fits" in str(tiny)


def test_the_command_reads_sizes_and_bytes(tmp_path, capsys):
    path = tmp_path / "sizes.csv"
    path.write_text("site,patients\n" + "\n".join(f"h{n},{size}" for n, size in enumerate(HOSPITALS)))
    asked = ["plan", "--sites", str(path), "--upload", "20MB", "--epsilon", "2", "--parameters", "1e6"]
    assert main([*asked, "--json"]) == 0
    fields = json.loads(capsys.readouterr().out)
    assert fields["sites"] == HOSPITALS
    assert [option["verdict"] for option in fields["options"]] == ["learns something", "learns well"]
    assert main([*asked, "--rounds", "7"]) == 2
    assert "--sites chooses --rounds itself" in capsys.readouterr().err
    assert main(["plan", "--epsilon", "2", "--delta", "1e-5"]) == 2
    assert "give --dimension, --dataset-size; or --sites" in capsys.readouterr().err


def test_files_and_bytes_that_cannot_be_read_are_refused(tmp_path):
    (tmp_path / "empty.csv").write_text("site,patients\n")
    with pytest.raises(InvalidParameter, match="holds no size"):
        read_sites(tmp_path / "empty.csv")
    with pytest.raises(InvalidParameter, match="cannot be read"):
        read_sites(tmp_path / "nowhere.csv")
    for line in ("B;300;Bonn", "B,about 300", "B,300.0", 'B,"1,200"'):
        (tmp_path / "one.csv").write_text(f"site,patients\nA,300\n\n{line}\n")
        with pytest.raises(InvalidParameter, match=r"line 4 of .*end each line with the site's number of samples"):
            read_sites(tmp_path / "one.csv")
    (tmp_path / "excel.csv").write_text("\ufeff1;300\n2;1_200\n", encoding="utf-8")
    assert read_sites(tmp_path / "excel.csv") == [300, 1200]
    for wrong in ("", "MB", "twenty", "-3MB"):
        with pytest.raises(InvalidParameter, match="upload"):
            read_bytes(wrong)


def test_the_picture_shows_the_verdict_of_the_point_that_was_asked(tmp_path, capsys):
    sizes = tmp_path / "sizes.csv"
    sizes.write_text("site,samples\n" + "\n".join(f"h{number},{size}" for number, size in enumerate(HOSPITALS)))
    asked = ["plan", "--sites", str(sizes), "--parameters", "3e6", "--epsilon", "0.7", "--json", "--figure"]
    assert main([*asked, str(tmp_path / "map.svg")]) == 0
    assert json.loads(capsys.readouterr().out)["figure"].endswith("map.svg")
    assert (tmp_path / "map.svg").read_text().startswith("<?xml")
    assert main([*asked, str(tmp_path / "map.txt")]) == 2
    assert "must end in .png" in capsys.readouterr().err


def test_the_middle_of_a_cell_of_the_picture_is_the_value_that_was_asked():
    for asked, low, high in ((2.0, 0.25, 16.0), (100.0, 0.25, 16.0), (1.0, 1e3, 1e8)):
        cells = _cells(asked, low, high)
        assert asked in cells
        assert len(cells) == 9
