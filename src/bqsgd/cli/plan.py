"""Placeholder until the command lands."""


def plan() -> None:
    """Not built yet."""
    raise NotImplementedError
