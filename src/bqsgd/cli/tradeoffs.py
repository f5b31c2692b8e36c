"""Placeholder until the command lands."""


def tradeoffs() -> None:
    """Not built yet."""
    raise NotImplementedError
