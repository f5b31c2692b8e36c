"""Examples in docstrings are shown as code on the site, wherever they stand in the text."""

from __future__ import annotations

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"^(?P<indent> *)>>> .*(?:\n *\S.*)*", re.M)


class FencedDoctests(griffe.Extension):
    """Puts a fence around each run of `>>>` lines and what they print."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrite the docstring of one class, function, module or attribute."""
        if obj.docstring is not None:
            fenced = r"\g<indent>```pycon\n\g<0>\n\g<indent>```"
            obj.docstring.value = EXAMPLE.sub(fenced, obj.docstring.value)
