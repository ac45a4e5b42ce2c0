"""Products of matrices in full precision on a GPU, whatever was allowed before."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def rounding(allowed: bool = False) -> Iterator[None]:
    """Within it, float32 products and convolutions may or may not be rounded to TF32; afterwards all is as before."""
    holders: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.cudnn)
    before = [holder.allow_tf32 for holder in holders]
    try:
        for holder in holders:
            holder.allow_tf32 = allowed
        yield
    finally:
        for holder, value in zip(holders, before, strict=True):
            holder.allow_tf32 = value
