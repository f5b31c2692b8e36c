"""Old spellings of commands and options: each is refused with an error that names the new one."""

from __future__ import annotations

import click
import typer.core

_DIMENSION_AND_BATCH = {"--dim": "--dimension", "--batch": "--batch-size"}
COMMANDS = {
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


class Commands(typer.core.TyperGroup):
    """The top-level group; it refuses an old command with the new one."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Look the command up, as click does."""
        if args and args[0] in COMMANDS:
            ctx.fail(f"{args[0]} has been replaced by {COMMANDS[args[0]]}")
        return super().resolve_command(ctx, args)


def new_option(error: click.NoSuchOption) -> str | None:
    """What to say about an unknown option that an earlier version knew; None for any other."""
    words: list[str] = []
    context = error.ctx
    while context is not None and context.parent is not None:  # the outermost context is the program itself
        words.insert(0, str(context.info_name))
        context = context.parent
    new = OPTIONS.get(" ".join(words), {}).get(error.option_name)
    return None if new is None else f"{error.option_name} has been replaced by {new}"
