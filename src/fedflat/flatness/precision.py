"""Products of matrices in full precision on a GPU, whatever was allowed before.

From torch 2.9 on there are two kinds of switches. Setting an older one sets the newer ones with it, but not the other way round, and where
the two disagree, torch refuses to read the older. So the older are set, and where the newer have been used, these too, and last.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

SETTINGS: dict[str, tuple[Any, Any]] = {"allow_tf32": (False, True), "fp32_precision": ("ieee", "tf32")}
"""The older and the newer switch: in full, and rounded."""


def allow_tf32(allowed: bool) -> None:
    """Let float32 products and convolutions on a GPU be rounded to TF32, or not."""
    _set(list(_switches()), allowed)


@contextmanager
def rounding(allowed: bool = False) -> Iterator[None]:
    """Within it, float32 products and convolutions on a GPU may or may not be rounded to TF32; afterwards all is as before."""
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
