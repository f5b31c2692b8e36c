"""Placeholder until the command lands."""


def account() -> None:
    """Not built yet."""
    raise NotImplementedError
