"""Text that a peer, a file or a setting may have chosen, made safe to print, to log and to write into a page."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping


def one_line(words: object, *, limit: int | None = 300) -> str:
    r"""`str(words)` as one line of bounded length in which everything that does not print shows as an escape.

    A terminal obeys escape sequences, a log takes a line break for a new entry, and an override of direction shows
    one text and means another.

    >>> one_line("two\nlines, \x1b[2J and \u202eleft-to-right")
    'two\\nlines, \\x1b[2J and \\u202eleft-to-right'
    """
    text = str(words)
    # Cut first: the text may be megabytes long.
    shown = text if limit is None else text[: limit + 1]
    line = "".join(sign if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in shown)
    return line if limit is None or len(line) <= limit else line[: limit - 3] + "..."


def volume(count: float) -> str:
    """A number of bytes, to four digits.

    >>> volume(579_123), volume(1.2e9), volume(0)
    ('579.1 kB', '1.2 GB', '0 B')
    """
    steps = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
    size, name = next((step for step in steps if count >= step[0]), (1, "B"))
    return f"{count / size:.4g} {name}"


def aligned(title: str, lines: Mapping[str, str], *, width: int) -> str:
    """A title and, below it, one aligned line per label. Long lines wrap within the width."""
    indent = 4 + max(map(len, lines), default=0)
    wrapped = (
        textwrap.fill(
            text,
            width,
            initial_indent=f"  {label}".ljust(indent),
            subsequent_indent=" " * indent,
            # Commands and figures must stay whole, so that a reader can copy them.
            break_on_hyphens=False,
            break_long_words=False,
        )
        for label, text in lines.items()
    )
    return "\n".join((title, *wrapped))
