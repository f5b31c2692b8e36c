"""Markdown with prose of at most 120 characters per line: what is generated reads like what is written by hand."""

from __future__ import annotations

import re
import textwrap

WIDTH = 120
_ITEM = re.compile(r"(\s*)((?:[-*]|\d+\.)\s+)?")
_GLUE = "\0"
"""Stands for a space inside a code span while lines are filled: a span stays on one line."""


def wrapped(markdown: str) -> str:
    """The same text with every paragraph refilled that has a longer line; tables, headings and code stay as they are.

    >>> print(wrapped("- " + "word " * 40))  # doctest: +ELLIPSIS
    - word word ... word
      word word ... word
    """
    done: list[str] = []
    paragraph: list[str] = []
    code = False
    for line in markdown.split("\n"):
        fence = line.lstrip().startswith("```")
        if fence or code or not line.strip() or line.startswith(("|", "#")):
            done += [*_filled(paragraph), line]
            paragraph, code = [], code != fence
        elif _ITEM.match(line)[2]:  # type: ignore[index]
            done += _filled(paragraph)
            paragraph = [line]
        else:
            paragraph.append(line)
    return "\n".join(done + _filled(paragraph))


def _filled(paragraph: list[str]) -> list[str]:
    if all(len(line) <= WIDTH for line in paragraph):
        return paragraph
    indent, bullet = _ITEM.match(paragraph[0]).groups(default="")  # type: ignore[union-attr]
    body = " ".join(line.strip() for line in paragraph).removeprefix(bullet)
    glued = re.sub(r"`[^`]+`", lambda span: span[0].replace(" ", _GLUE), body)
    lines = textwrap.wrap(
        glued,
        WIDTH,
        initial_indent=indent + bullet,
        subsequent_indent=indent + " " * len(bullet),
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace(_GLUE, " ") for line in lines]
