"""Which precisions a device has, and whether a GPU may round float32 matrix products to TF32.

The latter holds regardless of torch's global settings.

Since torch 2.9 there are two sets of switches: ``allow_tf32`` (old) and ``fp32_precision`` (new). Setting an old one
also sets the new ones, but not vice versa, and torch refuses to read an old switch that disagrees with the new ones.
Hence the old switches are set first, then the new ones if they are in use.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import torch

Switch = tuple[Any, str]
"""A torch backend and the name of its attribute."""

P = ParamSpec("P")
T = TypeVar("T")


class HasTf32(Protocol):
    """An object, such as a problem, that says whether a GPU may round its float32 matrix products to TF32."""

    tf32: bool


Owner = TypeVar("Owner", bound=HasTf32)


def gpu_has_tf32() -> bool:
    """Whether the current GPU can compute in TF32: NVIDIA's GPUs from compute capability 8.0 (2020) on."""
    return torch.version.hip is None and torch.cuda.get_device_capability() >= (8, 0)


def has_bf16(device: str) -> bool:
    """Whether a device (``cuda`` or ``cpu``) computes in bf16: recent GPUs, and x86 CPUs with AMX or AVX-512 BF16."""
    if device == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    checks = (getattr(torch.cpu, f"_is_{feature}_supported", bool) for feature in ("amx_tile", "avx512_bf16"))
    return any(check() for check in checks)


def allow_tf32(allowed: bool) -> None:
    """Allow or forbid a GPU to round float32 matrix products and convolutions to TF32, until the next call."""
    # torch has two generations of switches: ``allow_tf32`` is a bool, ``fp32_precision`` a string.
    for backend, attribute in _switches():
        value = allowed if attribute == "allow_tf32" else "tf32" if allowed else "ieee"
        setattr(backend, attribute, value)


@contextmanager
def tf32_allowed(allowed: bool) -> Iterator[None]:
    """Allow or forbid TF32 within the context, then restore the previous setting."""
    if not torch.cuda.is_available():  # TF32 exists only on GPUs
        yield
        return
    # A switch is a pair of an object and the name of its attribute, the arguments of getattr and setattr.
    previous = [(switch, getattr(*switch)) for switch in _switches() if _is_readable(switch)]
    try:
        allow_tf32(allowed)
        yield
    finally:
        for switch, value in previous:
            setattr(*switch, value)


def at_own_precision(function: Callable[Concatenate[Owner, P], T]) -> Callable[Concatenate[Owner, P], T]:
    """Decorate a function or method so that a GPU uses TF32 in it exactly if its first argument, a problem, allows it.

    Torch's own setting, which is global, is restored afterwards: another run in the same process may differ.
    """

    @functools.wraps(function)
    def scoped(owner: Owner, /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Call the decorated function with the problem's precision."""
        with tf32_allowed(owner.tf32):
            return function(owner, *args, **kwargs)

    return scoped


def _switches() -> list[Switch]:
    """Return torch's switches for TF32 as (backend, attribute).

    They are the old ones, ``allow_tf32``, and the new ones, ``fp32_precision``, if this torch has them and uses them.
    """
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    old_switches: list[Switch] = [(matmul, "allow_tf32"), (cudnn, "allow_tf32")]
    global_precision = getattr(torch.backends, "fp32_precision", "none")
    if global_precision == "none" and all(_is_readable(switch) for switch in old_switches):
        return old_switches  # the new ones do not exist or were never set
    backends = (matmul, getattr(cudnn, "conv", None), getattr(cudnn, "rnn", None))
    return old_switches + [(backend, "fp32_precision") for backend in backends if hasattr(backend, "fp32_precision")]


def _is_readable(switch: Switch) -> bool:
    """Whether torch lets the switch be read; it refuses an old one that disagrees with the new ones."""
    try:
        getattr(*switch)
    except RuntimeError:
        return False
    return True
