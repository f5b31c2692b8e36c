"""The `bqsgd` command: one module per command or command group, each registered here in one line.

A command's module imports only typer at the top and everything heavy inside the function, so that `bqsgd --help` is
quick. A command raises `bqsgd._src.errors`; `main` turns each of them into one line on stderr and exit code 2. Commands
and options of earlier versions are refused with the name of what replaced them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import click
import typer
import typer.core

from bqsgd import __version__
from bqsgd._src.cli.audit import audit
from bqsgd._src.cli.check import check
from bqsgd._src.cli.compare import compare
from bqsgd._src.cli.flower import flower
from bqsgd._src.cli.ledger import ledger
from bqsgd._src.cli.paper import paper
from bqsgd._src.cli.plan import account, plan
from bqsgd._src.cli.report import report
from bqsgd._src.cli.secure import secure
from bqsgd._src.cli.train import SettingsCommand, demo, train
from bqsgd._src.cli.watch import watch
from bqsgd._src.errors import BqsgdError
from bqsgd._src.text import one_line

_DIMENSION_AND_BATCH = {"--dim": "--dimension", "--batch": "--batch-size"}
_COMMANDS = {
    "tradeoffs": "`bqsgd paper tradeoffs`",
    "reproduce": "`python -m experiments.reproduce`, run in a checkout of the repository",
}
"""Old command -> what replaced it."""
OPTIONS = {
    "account": _DIMENSION_AND_BATCH
    | {
        "--nominal": "`bqsgd paper account`",
        "--nominal-dim": "`bqsgd paper account --dimension`",
        "--method": "`bqsgd account` (proven) and `bqsgd paper account` (as published)",
    },
    "plan": _DIMENSION_AND_BATCH
    | {
        "--nominal": "`bqsgd paper account`",
        "--rounding": "`bqsgd paper plan --rounding`",
        "--method": "`bqsgd plan` (proven) and `bqsgd paper plan` (as published)",
    },
    "audit": _DIMENSION_AND_BATCH | {"--audit-dim": "--audit-dimension"},
    "train": {"--front-end": "--features", "--optimiser": "--optimizer", "--nominal": "`bqsgd paper account`"},
    "paper tradeoffs": _DIMENSION_AND_BATCH | {"--nominal-dim": "--nominal-dimension"},
}
"""Command -> its old options -> the option or command that replaced each."""


class _Commands(typer.core.TyperGroup):
    """The top-level group. It refuses an old command and names the one that replaced it."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Look the command up, as click does."""
        if args and args[0] in _COMMANDS:
            ctx.fail(f"{args[0]} has been replaced by {_COMMANDS[args[0]]}")
        return super().resolve_command(ctx, args)


def _new_option(error: click.NoSuchOption) -> str | None:
    """The message for an unknown option that was an option before, or is a setting without one; None for any other."""
    assert error.ctx is not None
    # Without the program's own name, which may be "python -m bqsgd".
    program = error.ctx.find_root().command_path
    command, option = error.ctx.command_path.removeprefix(program).strip(), error.option_name
    replacement = OPTIONS.get(command, {}).get(option)
    if replacement is not None:
        return f"{option} has been replaced by {replacement}"
    return _in_settings_file(option) if command == "train" else None


def _in_settings_file(option: str) -> str | None:
    """The message that says where to set a setting of `bqsgd train` without an option; None if it is not a setting."""
    from bqsgd._src.settings.group import table_of
    from bqsgd._src.tasks.named import ALL_GROUPS

    # A setting that is true or false also has the spelling --no-NAME.
    name = option.removeprefix("--").removeprefix("no-").replace("-", "_")
    table = table_of(ALL_GROUPS, name)
    if table is None:
        return None
    key = ALL_GROUPS[table].keys()[name]
    return (
        f"{option} is not an option: set {key} under [{table}] in a TOML file, and give the file with --config "
        "(docs/training.md lists all settings)"
    )


# Typer would format a traceback with the values of local variables, which may be private data.
app = typer.Typer(
    name="bqsgd",
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    suggest_commands=False,  # click suggests too
)


def _print_version(requested: bool) -> None:
    if requested:
        typer.echo(f"bqsgd {__version__}")
        raise typer.Exit


@app.callback()
def _about(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Train models across clients with differential privacy and few bits.

    Each client quantises its gradient and adds noise in one integer step. Its
    epsilon is a proven upper bound. Start with `bqsgd demo`.
    """


app.command()(demo)
app.command(cls=SettingsCommand)(train)
app.command()(plan)
app.command()(account)
app.command()(audit)
app.command()(check)
app.add_typer(compare, name="compare")
app.add_typer(ledger, name="ledger")
app.add_typer(flower, name="flower")
app.command()(report)
app.command()(watch)
app.add_typer(secure, name="secure")
app.add_typer(paper, name="paper")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit code.

    0 done, 1 nothing was learnt, 2 bad input (one line says what), 3 privacy budgets are spent, 130 interrupted.
    """
    try:
        # Not standalone: click would print its own errors and exit, also from a program that called `main`.
        code = app(args=arguments, standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as shown:
        shown.show()  # the help page
        return 2
    except click.NoSuchOption as error:
        return _refuse(_new_option(error) or error.format_message())
    except click.ClickException as error:
        return _refuse(error.format_message())
    except (BqsgdError, OSError) as error:  # OSError: a file or directory that cannot be read or written
        return _refuse(str(error))
    except (KeyboardInterrupt, click.Abort):
        print("bqsgd: interrupted", file=sys.stderr)
        return 130
    return code if isinstance(code, int) else 0


def _refuse(message: str) -> int:
    # Always one line: scripts and logs read it, and a message may quote text with line breaks.
    print("bqsgd: " + one_line(" ".join(message.split()), limit=None), file=sys.stderr)
    return 2
