"""The command line as a whole: help, version, one line and exit code 2 on bad input."""

import io
import re
import subprocess
import sys
from collections.abc import Iterator

import click
import pytest
import typer.main
from rich.console import Console

from bqsgd import Config, __version__
from bqsgd._src.cli import output
from bqsgd._src.cli.app import OPTIONS, app
from bqsgd._src.records.record import RoundRecord

CLIENT = ["--dimension", 3000, "--batch-size", 32, "--dataset-size", 15000]


def test_version(bqsgd):
    result = bqsgd("--version")
    assert (result.code, result.out) == (0, f"bqsgd {__version__}\n")


@pytest.mark.parametrize(
    "command", [[], ["plan"], ["account"], ["paper"], ["paper", "plan"], ["paper", "account"], ["paper", "tradeoffs"]]
)
def test_help_explains_every_option(bqsgd, command):
    result = bqsgd(*command, "--help")
    assert result.code == 0
    assert "Usage:" in result.out


@pytest.mark.parametrize("command", [["flower", "superlink"], ["flower", "supernode"]])
def test_a_command_around_flowers_own_explains_its_options_and_where_flowers_are(bqsgd, command):
    result = bqsgd(*command, "--help")
    assert result.code == 0
    assert f"`flower-{command[1]} --help`" in result.out
    assert ("--signed" in result.out) is (command[1] == "superlink")


def test_a_misspelt_command_is_met_with_one_suggestion(bqsgd):
    assert bqsgd("trian").err.count("Did you mean") == 1


def commands(command: click.Command, name: str = "bqsgd") -> Iterator[tuple[str, click.Command]]:
    yield name, command
    for word, inner in getattr(command, "commands", {}).items():
        yield from commands(inner, f"{name} {word}")


@pytest.mark.parametrize(("name", "command"), commands(typer.main.get_command(app)), ids=lambda word: str(word))
def test_help_texts_fit_a_narrow_terminal_and_name_every_argument(name, command):
    """Typer keeps the line breaks of a help text: a longer line would wrap in the middle of an example."""
    help_text = command.help or ""
    assert all(len(line) <= 78 for line in help_text.splitlines()[1:]), name
    for parameter in command.get_params(click.Context(command)):
        if isinstance(parameter, click.Argument):
            # click 8.5 drops the help of typer's arguments, so the help text of the command must explain them.
            assert (parameter.metavar or parameter.name.upper()).removesuffix("...") in help_text, name
        else:
            assert parameter.help, (name, parameter.name)


def test_every_option_of_train_is_in_a_panel_but_the_first_four():
    train = typer.main.get_command(app).commands["train"]
    loose = [p.name for p in train.get_params(click.Context(train)) if not getattr(p, "rich_help_panel", None)]
    assert loose[:-1] == ["preset", "config", "json"]  # the last one is --help, which click names


def test_no_arguments_show_the_help(bqsgd):
    result = bqsgd()
    assert result.code == 2
    assert "Usage:" in result.out + result.err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nonsense"], "No such command 'nonsense'"),
        (["plan", "--bits", "eight"], "eight"),
        (["plan", "--bits", 8, "--epsilon", 1, "--delta", 1e-4], "--dimension"),
        (
            ["paper", "plan", "--bits", 40, "--epsilon", 1, "--delta", 1e-4, *CLIENT],
            "bits must be from 2 to 20",
        ),
        (["paper", "plan", "--bits", 8, "--epsilon", "nan", "--delta", 1e-4, *CLIENT], "epsilon must be"),
        (["plan", "--bits", 8, "--epsilon", 3, "--delta", 1e-4, "--l2", 0.1, *CLIENT], "give both, or leave"),
        (["paper", "plan", "--bits", 8, "--epsilon", 3, "--delta", 1e-4, *CLIENT[:2], *CLIENT[4:]], "--batch-size"),
        (["account", "--levels", 0, "--trials", 9, "--rounds", 1, "--delta", 1e-4, *CLIENT], "levels must be from 1"),
        (["account", "--levels", 1, "--trials", 9, "--rounds", 1, "--delta", 2, *CLIENT], "delta must be above 0"),
        (["account", "--levels", 1, "--trials", 9, "--rounds", 0, "--delta", 1e-4, *CLIENT], "rounds must be from 1"),
        (["plan", "--bits", 8, "--epsilon", 1, "--delta", 1e-4, "--clients", 0, *CLIENT], "clients must be from 1"),
        (["plan", "--bits", 8, "--epsilon", 1, "--delta", 1e-4, "--rounds", 0, *CLIENT], "rounds must be from 1"),
        (["audit", "--levels", 1, "--trials", 9, "--delta", 1e-4, "--samples", 1, *CLIENT], "samples must be from 4"),
        (["audit", "--levels", 1, "--trials", 9, "--delta", 1e-4, "--rounds", 0, *CLIENT], "rounds must be from 1"),
        (
            ["paper", "account", "--levels", 1, "--trials", 0, "--rounds", 1, "--delta", 1e-4, *CLIENT],
            "trials must be at least 1",
        ),
        (
            ["account", "--levels", 1, "--trials", 9, "--rounds", 1, "--delta", 1e-4, "--relation", "replace", *CLIENT],
            "Poisson sampling is accounted under add/remove",
        ),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(bqsgd, arguments, says):
    result = bqsgd(*arguments)
    assert result.code == 2
    assert result.out == ""
    assert says in result.err
    assert result.err.startswith("bqsgd: ")
    assert result.err.count("\n") == 1


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (["tradeoffs", "--out", "x"], "bqsgd paper tradeoffs"),
        (["reproduce", "table2"], "python -m experiments.reproduce"),
        (["plan", "--dim", 3], "--dimension"),
        (["plan", "--batch", 3], "--batch-size"),
        (["plan", "--method", "paper"], "bqsgd paper plan"),
        (["plan", "--rounding", "nearest"], "bqsgd paper plan --rounding"),
        (["account", "--dim=3"], "--dimension"),
        (["account", "--method", "paper"], "bqsgd paper account"),
        (["account", "--nominal-dim", 3000], "bqsgd paper account --dimension"),
        (["account", "--nominal"], "bqsgd paper account"),
        (["plan", "--nominal"], "bqsgd paper account"),
        (["train", "--nominal"], "bqsgd paper account"),
        (["audit", "--audit-dim", 3], "--audit-dimension"),
        (["train", "--optimiser", "adam"], "--optimizer"),
        (["paper", "tradeoffs", "--nominal-dim", 3], "--nominal-dimension"),
    ],
    ids=lambda words: " ".join(map(str, words)) if isinstance(words, list) else None,
)
def test_an_old_spelling_is_refused_with_the_new_one(bqsgd, old, new):
    result = bqsgd(*old)
    assert (result.code, result.out) == (2, "")
    assert f"has been replaced by {new}" in result.err.replace("`", "").replace("bqsgd plan (proven) and ", "").replace(
        "bqsgd account (proven) and ", ""
    )


def test_every_old_option_belongs_to_a_command_that_lacks_it():
    command = typer.main.get_command(app)
    for path, options in OPTIONS.items():
        found = command
        for word in path.split():
            found = found.commands[word]
        known = {name for parameter in found.get_params(click.Context(found)) for name in parameter.opts}
        assert not known & options.keys(), path
        assert all(new in known for new in options.values() if new.startswith("--")), path


def test_train_has_about_forty_options_and_says_where_the_other_settings_are(bqsgd):
    from bqsgd._src.tasks.named import ALL_GROUPS

    train = typer.main.get_command(app).commands["train"]
    options = {name for option in train.get_params(click.Context(train)) for name in option.opts}
    assert len(options) <= 45
    assert "docs/training.md" in bqsgd("train", "--help").out
    for table, group in ALL_GROUPS.items():
        for name, key in group.keys().items():
            option = f"--{name.replace('_', '-')}"
            if option not in options:
                error = bqsgd("train", option, 1).err
                assert f"{option} is not an option: set {key} under [{table}]" in error


def test_help_loads_no_heavy_library():
    """What makes `bqsgd --help` quick: the numeric stack is imported by the command that needs it."""
    script = (
        "import sys\nfrom bqsgd._src.cli.app import main\nmain(['--help'])\n"
        "heavy = {'numpy', 'scipy', 'torch', 'flwr', 'matplotlib', 'numba', 'dp_accounting', 'sklearn'}\n"
        "sys.exit(','.join(sorted(heavy & set(sys.modules))) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_installed_command_exits_with_the_code():
    script = "import sys; from bqsgd._src.cli.app import main; sys.exit(main(['nonsense']))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")


@pytest.mark.parametrize(("width", "clock"), [(40, False), (60, True), (80, True), (130, True)])
def test_a_narrow_terminal_shows_the_round_and_what_fits_of_the_figures(monkeypatch, width, clock):
    terminal = io.StringIO()
    monkeypatch.setattr(
        output, "_console", lambda: Console(file=terminal, force_terminal=True, width=width, color_system=None)
    )
    records = [{"round": 0, "bytes_up": 5000, "test_accuracy": 0.71, "test_loss": 0.6, "epsilon_max": 1.2, "time": 3.0}]
    for _ in output.shown(map(RoundRecord.from_dict, records), config=Config.of(clients=2, rounds=300), first_round=0):
        pass
    last = [line for line in re.split(r"[\r\n]|\x1b\[[0-9;?]*[A-Za-z]", terminal.getvalue()) if line.strip()][-1]
    assert last.startswith("round 1/300 ")
    assert "test accuracy 71.00%" in last
    assert ("left" in last) is clock
    assert len(last) <= width
