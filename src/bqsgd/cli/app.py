"""The `bqsgd` command: one module per command or command group, each registered here in one line.

A command's module imports only typer at the top and everything heavy inside the function, so that `bqsgd --help` is
quick. A command raises `bqsgd.errors`; `main` turns any of them into one line on stderr and exit code 2. An old
spelling of a command or option is refused with an error that names the new one.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import click
import typer
import typer.core

from bqsgd import __version__
from bqsgd.cli.audit import audit
from bqsgd.cli.flower import flower
from bqsgd.cli.ledger import ledger
from bqsgd.cli.paper import paper
from bqsgd.cli.plan import account, plan
from bqsgd.cli.report import report
from bqsgd.cli.secure import secure
from bqsgd.cli.train import SettingsCommand, demo, train
from bqsgd.errors import BqsgdError

_DIMENSION_AND_BATCH = {"--dim": "--dimension", "--batch": "--batch-size"}
_COMMANDS = {
    "tradeoffs": "`bqsgd paper tradeoffs`",
    "reproduce": "`python -m experiments.reproduce`, run in a checkout of the repository",
    "compare": "`python -m experiments.compare`, run in a checkout of the repository",
}
"""Old command -> what to type now."""
OPTIONS = {
    "account": _DIMENSION_AND_BATCH
    | {
        "--nominal-dim": "`bqsgd paper account --dimension`",
        "--method": "`bqsgd account` (proven) and `bqsgd paper account` (as published)",
    },
    "plan": _DIMENSION_AND_BATCH
    | {
        "--rounding": "`bqsgd paper plan --rounding`",
        "--method": "`bqsgd plan` (proven) and `bqsgd paper plan` (as published)",
    },
    "audit": _DIMENSION_AND_BATCH | {"--audit-dim": "--audit-dimension"},
    "train": {"--front-end": "--features"},
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
    """What to say about an unknown option that an earlier version knew; None for any other."""
    words: list[str] = []
    context = error.ctx
    while context is not None and context.parent is not None:  # the outermost context is the program itself
        words.insert(0, str(context.info_name))
        context = context.parent
    new = OPTIONS.get(" ".join(words), {}).get(error.option_name)
    return None if new is None else f"{error.option_name} has been replaced by {new}"


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
