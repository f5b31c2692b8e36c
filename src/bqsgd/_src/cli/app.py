"""The `bqsgd` command: one module per command or command group, each registered here in one line.

A command's module imports only typer at the top and everything heavy inside the function, so that `bqsgd --help` is
quick. A command raises `bqsgd._src.errors`; `main` turns any of them into one line on stderr and exit code 2. The error
about a command or option of an earlier version says what to use instead.
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
from bqsgd._src.cli.flower import flower
from bqsgd._src.cli.ledger import ledger
from bqsgd._src.cli.paper import paper
from bqsgd._src.cli.plan import account, plan
from bqsgd._src.cli.report import report
from bqsgd._src.cli.secure import secure
from bqsgd._src.cli.train import SettingsCommand, demo, train
from bqsgd._src.errors import BqsgdError

_DIMENSION_AND_BATCH = {"--dim": "--dimension", "--batch": "--batch-size"}
_COMMANDS = {
    "tradeoffs": "`bqsgd paper tradeoffs`",
    "reproduce": "`python -m experiments.reproduce`, run in a checkout of the repository",
    "compare": "`python -m experiments.reproduce compare`, run in a checkout of the repository",
}
"""Old command -> what to type now."""
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
"""Command -> its old options -> the new option, or the command that took over."""


class _Commands(typer.core.TyperGroup):
    """The top-level group; it refuses an old command with the new one."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Look the command up, as click does."""
        if args and args[0] in _COMMANDS:
            ctx.fail(f"{args[0]} has been replaced by {_COMMANDS[args[0]]}")
        return super().resolve_command(ctx, args)


def _new_option(error: click.NoSuchOption) -> str | None:
    """What to say about an unknown option that is a setting or was an option before; None for any other."""
    words: list[str] = []
    context = error.ctx
    while context is not None and context.parent is not None:  # the outermost context is the program itself
        words.insert(0, str(context.info_name))
        context = context.parent
    command, option = " ".join(words), error.option_name
    new = OPTIONS.get(command, {}).get(option)
    if new is not None:
        return f"{option} has been replaced by {new}"
    return _in_settings_file(option) if command == "train" else None


def _in_settings_file(option: str) -> str | None:
    """Where a setting of `bqsgd train` that has no option is set; None for what is not a setting."""
    from bqsgd._src.settings.group import table_of
    from bqsgd._src.tasks.named import ALL_GROUPS

    name = option.removeprefix("--").removeprefix("no-").replace("-", "_")
    table = table_of(ALL_GROUPS, name)
    if table is None:
        return None
    key = ALL_GROUPS[table].keys()[name]
    return (
        f"{option} is not an option: set {key} under [{table}] in a settings file, and give the file with --config "
        "(docs/training.md lists all settings)"
    )


app = typer.Typer(
    name="bqsgd", cls=_Commands, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"bqsgd {__version__}")
        raise typer.Exit


@app.callback()
def _about(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Private, compressed distributed learning: one integer step that quantises gradients and gives differential
    privacy, with a proven bound on it."""


app.command()(demo)
app.command(cls=SettingsCommand)(train)
app.command()(plan)
app.command()(account)
app.command()(audit)
app.add_typer(ledger, name="ledger")
app.add_typer(flower, name="flower")
app.command()(report)
app.add_typer(secure, name="secure")
app.add_typer(paper, name="paper")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code: 0 done, 2 bad input (one line says what), 130 interrupted."""
    try:
        code = app(args=arguments, standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as shown:
        shown.show()  # the help page, as asked for by giving no arguments
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
    print("bqsgd: " + " ".join(message.split()), file=sys.stderr)
    return 2
