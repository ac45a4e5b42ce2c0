"""Products of matrices in full precision on a GPU, whatever was allowed before.

From torch 2.9 on there are two kinds of switches. Setting an older one sets the newer ones with it, but not the other way round, and where
the two disagree, torch refuses to read the older: so all are set, the newer last.
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
    for holder, name in _switches():
        setattr(holder, name, SETTINGS[name][allowed])


@contextmanager
def rounding(allowed: bool = False) -> Iterator[None]:
    """Within it, float32 products and convolutions on a GPU may or may not be rounded to TF32; afterwards all is as before."""
    if not torch.cuda.is_available():
        yield
        return
    before = [(holder, name, getattr(holder, name)) for holder, name in _switches() if _readable(holder, name)]
    try:
        allow_tf32(allowed)
        yield
    finally:
        for holder, name, value in before:
            setattr(holder, name, value)


def _switches() -> Iterator[tuple[Any, str]]:
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    yield from ((matmul, "allow_tf32"), (cudnn, "allow_tf32"))
    for holder in (matmul, getattr(cudnn, "conv", None), getattr(cudnn, "rnn", None)):
        if hasattr(holder, "fp32_precision"):
            yield holder, "fp32_precision"


def _readable(holder: Any, name: str) -> bool:
    try:
        getattr(holder, name)
    except RuntimeError:
        return False
    return True
