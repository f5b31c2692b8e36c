"""Settings by name: the points of the frontier (docs/frontier.md), each found on held-out training data."""

from __future__ import annotations

import tomllib
from functools import lru_cache
from importlib import resources
from typing import Any

from bqsgd.errors import InvalidParameter


@lru_cache(maxsize=1)
def presets() -> dict[str, dict[str, Any]]:
    """Every preset as plain settings for `Config.from_dict`, by name."""
    text = resources.files("bqsgd.training").joinpath("presets.toml").read_text(encoding="utf-8")
    read = tomllib.loads(text)
    shared = {name: value for name, value in read.items() if not isinstance(value, dict)}
    return {name: shared | table for name, table in read.items() if isinstance(table, dict)}


def preset(name: str) -> dict[str, Any]:
    """A copy of the settings called `name`, to be overridden at will.

    >>> preset("mnist-eps1")["epsilon"]
    1.16
    """
    known = presets()
    if name not in known:
        raise InvalidParameter(f"preset must be one of {', '.join(known)}, got {name!r}")
    return dict(known[name])
