"""A simulated accelerator in pure Python: device "sim", whose memory only its own operations read.

Its kernels are the processor's, so values are equal bit for bit. Mixing devices raises, `.numpy()` raises, it has a
random generator of its own, and `left` notes every copy that leaves it: code that quietly moves work to the processor
shows. `lies` replaces one of its kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

aten = torch.ops.aten
_COPIES = (aten._to_copy.default, aten.copy_.default, aten._copy_from.default)
_generator = torch.Generator()
_lies: dict[Any, Callable[..., Any]] = {}
left: list[torch.Size] = []
"""The shape of every tensor that was copied from the device to the processor, numbers included."""


class Sim(torch.Tensor):
    """A tensor in the memory of the simulated device."""

    @staticmethod
    def __new__(cls, raw: torch.Tensor, requires_grad: bool = False) -> Sim:
        return torch.Tensor._make_wrapper_subclass(
            cls, raw.size(), strides=raw.stride(), storage_offset=raw.storage_offset(), dtype=raw.dtype, device=DEVICE,
            requires_grad=requires_grad,
        )  # fmt: skip

    def __init__(self, raw: torch.Tensor, requires_grad: bool = False) -> None:
        self.raw = raw

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, dict(kwargs or {}))


def _raw(value: Any) -> Any:
    return value.raw if isinstance(value, Sim) else value


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
    here = [each for each in tensors if isinstance(each, Sim)]
    if func not in _COPIES and here and any(not isinstance(each, Sim) and each.dim() for each in tensors):
        raise RuntimeError(f"{func}: expected all tensors to be on the same device, found sim:0 and cpu")
    device = kwargs.get("device")
    to_sim = bool(here) if device is None else torch.device(device).type == "sim"
    if device is not None:
        kwargs["device"] = "cpu"
    if here and (func is aten._local_scalar_dense.default or not to_sim):
        left.append(here[0].shape)
    if func is aten.copy_.default and here and not isinstance(args[0], Sim):
        left.append(here[0].shape)
    if torch.Tag.nondeterministic_seeded in func.tags and "generator" in {each.name for each in func._schema.arguments}:
        kwargs["generator"] = _generator
    run = _lies.get(func, func)
    with _own_draws(func):
        out = run(*tree_map(_raw, args), **tree_map(_raw, kwargs))
    if func is aten.copy_.default or func._schema.name.endswith("_"):
        return args[0]
    return tree_map(lambda each: Sim(each) if isinstance(each, torch.Tensor) and to_sim else each, out)


@contextmanager
def _own_draws(func: Any) -> Iterator[None]:
    """Operations without an argument for a generator (native_dropout) draw from the device's own too."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        yield
        return
    before = torch.get_rng_state()
    torch.set_rng_state(_generator.get_state())
    try:
        yield
    finally:
        _generator.set_state(torch.get_rng_state())
        torch.set_rng_state(before)


class _Module:
    """What torch calls a device module: torch.sim."""

    default_generators = (_generator,)

    initialized = False
    """Turned on by the fixture `sim`, so that other tests of this process see no accelerator."""

    def is_initialized(self) -> bool:
        return self.initialized

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        _generator.manual_seed(seed)

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return _generator.get_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        _generator.set_state(state)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


def _empty(
    size: Any, *, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None,
    memory_format: Any = None,
) -> Sim:  # fmt: skip
    return Sim(torch.empty(size, dtype=dtype, memory_format=memory_format))


def _empty_strided(
    size: Any, stride: Any, *, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None
) -> Sim:
    return Sim(torch.empty_strided(size, stride, dtype=dtype))


def _copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    if isinstance(source, Sim) and not isinstance(target, Sim):
        left.append(source.shape)
    _raw(target).copy_(_raw(source))
    return target


@contextmanager
def lies(kernel: Any, wrong: Callable[..., Any]) -> Iterator[None]:
    """Meanwhile an operation of the device does something else."""
    _lies[kernel] = wrong
    try:
        yield
    finally:
        del _lies[kernel]


module = _Module()
_setup_privateuseone_for_python_backend("sim", backend_module=module)
DEVICE = torch.device("sim:0")
_library, _others = torch.library.Library("aten", "IMPL"), torch.library.Library("_", "IMPL")
_others.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
for _name, _function in {
    "empty.memory_format": _empty, "empty_strided": _empty_strided, "_copy_from": _copy_from,
}.items():  # fmt: skip
    _library.impl(_name, _function, "PrivateUse1")


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """The one operation that autocast runs in half precision on this device."""
    kind = torch.get_autocast_dtype("sim")
    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)):
        return torch.nn.functional.linear(x.to(kind), weight.to(kind), None if bias is None else bias.to(kind))


_library.impl("linear", _linear, "AutocastPrivateUse1")
