"""Full float32 precision of matrix products on a GPU, regardless of global settings.

Since torch 2.9 there are two sets of switches. Setting an old one also sets the new ones, but not vice versa, and
torch refuses to read an old one that disagrees. Hence the old switches are set first, then the new ones where they
are in use.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

SETTINGS: dict[str, tuple[Any, Any]] = {"allow_tf32": (False, True), "fp32_precision": ("ieee", "tf32")}
"""Values of the old and the new switch: full precision, TF32."""


def allow_tf32(allowed: bool) -> None:
    """Allow or forbid rounding float32 products and convolutions to TF32."""
    _set(list(_switches()), allowed)


@contextmanager
def rounding(allowed: bool = False) -> Iterator[None]:
    """Allow or forbid TF32 within the context, then restore the previous setting."""
    if not torch.cuda.is_available():
        yield
        return
    switches = list(_switches())
    before = [(holder, name, getattr(holder, name)) for holder, name in switches if _readable(holder, name)]
    try:
        _set(switches, allowed)
        yield
    finally:
        for holder, name, value in before:
            setattr(holder, name, value)


def _set(switches: list[tuple[Any, str]], allowed: bool) -> None:
    for holder, name in switches:
        setattr(holder, name, SETTINGS[name][allowed])


def _switches() -> Iterator[tuple[Any, str]]:
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    older = [(matmul, "allow_tf32"), (cudnn, "allow_tf32")]
    newer_used = getattr(torch.backends, "fp32_precision", "none") != "none" or not all(
        _readable(*switch) for switch in older
    )
    yield from older
    for holder in (matmul, getattr(cudnn, "conv", None), getattr(cudnn, "rnn", None)):
        if newer_used and hasattr(holder, "fp32_precision"):
            yield holder, "fp32_precision"


def _readable(holder: Any, name: str) -> bool:
    try:
        getattr(holder, name)
    except RuntimeError:
        return False
    return True
