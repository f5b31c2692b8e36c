"""The command line as a whole: help, version, one line and exit code 2 on bad input."""

import subprocess
import sys

import pytest

from bqsgd import __version__

CLIENT = ["--dim", 3000, "--batch", 32, "--dataset-size", 15000]


def test_version(bqsgd):
    result = bqsgd("--version")
    assert (result.code, result.out) == (0, f"bqsgd {__version__}\n")


@pytest.mark.parametrize("command", [[], ["plan"], ["account"], ["tradeoffs"]])
def test_help_explains_every_option(bqsgd, command):
    result = bqsgd(*command, "--help")
    assert result.code == 0
    assert "Usage:" in result.out


def test_no_arguments_show_the_help(bqsgd):
    result = bqsgd()
    assert result.code == 2
    assert "Usage:" in result.out + result.err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nonsense"], "No such command 'nonsense'"),
        (["plan", "--bits", "eight"], "eight"),
        (["plan", "--bits", 8, "--epsilon", 1, "--delta", 1e-4], "--dim"),
        (
            ["plan", "--method", "paper", "--bits", 40, "--epsilon", 1, "--delta", 1e-4, *CLIENT],
            "bits must be from 2 to 20",
        ),
        (["plan", "--method", "paper", "--bits", 8, "--epsilon", "nan", "--delta", 1e-4, *CLIENT], "epsilon must be"),
        (["plan", "--bits", 8, "--epsilon", 3, "--delta", 1e-4, "--l2", 0.1, *CLIENT], "give both, or leave out"),
        (
            ["plan", "--method", "paper", "--bits", 8, "--epsilon", 3, "--delta", 1e-4, *CLIENT[:2], *CLIENT[4:]],
            "--batch is needed by --method paper",
        ),
        (
            ["plan", "--bits", 8, "--epsilon", 3, "--delta", 1e-4, "--rounds", 1, "--rounding", "nearest", *CLIENT],
            "--rounding belongs to --method paper",
        ),
        (["account", "--levels", 0, "--trials", 9, "--rounds", 1, "--delta", 1e-4, *CLIENT], "levels must be from 1"),
        (["account", "--levels", 1, "--trials", 9, "--rounds", 1, "--delta", 2, *CLIENT], "delta must be above 0"),
        (
            ["account", "--method", "paper", "--levels", 1, "--trials", 0, "--rounds", 1, "--delta", 1e-4, *CLIENT],
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


def test_help_loads_no_heavy_library():
    """What makes `bqsgd --help` quick: the numeric stack is imported by the command that needs it."""
    script = (
        "import sys\nfrom bqsgd.cli.app import main\nmain(['--help'])\n"
        "heavy = {'numpy', 'scipy', 'torch', 'flwr', 'matplotlib', 'numba', 'dp_accounting', 'sklearn'}\n"
        "sys.exit(','.join(sorted(heavy & set(sys.modules))) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_installed_command_exits_with_the_code():
    script = "import sys; from bqsgd.cli.app import main; sys.exit(main(['nonsense']))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
