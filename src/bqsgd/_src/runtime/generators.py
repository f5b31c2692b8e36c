"""The generators of torch, NumPy and Python, from which models, losses and data sets draw: one of each for the process,
and one more of torch's for every accelerator in use.

Threads share them. Whoever relies on what is drawn next holds them `alone`. However threads overlap, nobody draws from
the program's own states as long as anybody else has set others.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from bqsgd._src.errors import InvalidParameter

alone = threading.RLock()
"""Held while what is drawn must depend on nobody else, and whenever states are set: whoever holds it may compare them.
"""
_kept: list[list[Any]] = []
"""The states to be put back by each of those that have set others, in the order in which they came."""


def accelerator_generators() -> list[torch.Generator]:
    """Torch's generator of every accelerator that is in use (cuda, xpu, mps and the like); none on a CPU.

    An accelerator that is not initialised has drawn nothing, and asking for its state would initialise it, after which
    the process could no longer be forked.
    """
    device = torch.accelerator.current_accelerator()
    if device is None:
        return []
    module: Any = torch.get_device_module(device)
    if not (module.is_initialized() if hasattr(module, "is_initialized") else module.is_available()):
        return []
    if device.type == "mps":
        return [torch.mps._get_default_mps_generator()]
    return list(getattr(module, "default_generators", ()))


def check_lent(device: torch.device) -> None:
    """Raise InvalidParameter if models draw on this device from a generator that cannot be lent: the seed of a program
    would then decide its dropout masks, and they must be secret."""
    accelerator = torch.accelerator.current_accelerator()
    shown = accelerator is not None and accelerator.type == device.type and bool(accelerator_generators())
    if device.type != "cpu" and not shown:
        raise InvalidParameter(
            f"the model draws random numbers on {device}, whose generator torch does not show, so the masks could not "
            "be kept secret: use a model without dropout there, or train on the processor"
        )


def states() -> tuple[object, ...]:
    """Of all of them, to be compared."""
    numpy: Any = np.random.get_state()  # noqa: NPY002  (the ones that models and data use)
    own = torch.get_rng_state().numpy().tobytes(), numpy[1].tobytes(), numpy[2:], random.getstate()
    return *own, *(generator.get_state().numpy().tobytes() for generator in accelerator_generators())


@contextmanager
def generators_kept() -> Iterator[None]:
    """Put back the states at the end; one who ends before another that came later leaves it to that one."""
    with alone:
        others = [(generator, generator.get_state()) for generator in accelerator_generators()]
        own: list[Any] = [torch.get_rng_state(), np.random.get_state(), random.getstate(), others]  # noqa: NPY002
        _kept.append(own)
    try:
        yield
    finally:
        with alone:
            place = next(n for n, kept in enumerate(_kept) if kept is own)
            del _kept[place]
            if place < len(_kept):
                # The next one came while these states were already replaced. It will put back what was there before
                # this one came, because nobody but this one knows it.
                _kept[place][:] = own
            else:
                torch.set_rng_state(own[0])
                np.random.set_state(own[1])  # noqa: NPY002
                random.setstate(own[2])
                for generator, state in own[3]:
                    generator.set_state(state)
