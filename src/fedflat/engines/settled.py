"""Numbers that lie in memory, where several functions can read them."""

from __future__ import annotations

import torch
from torch import Tensor


def settled(values: Tensor) -> Tensor:
    """Values as they lie in memory, contiguous.

    What is not computed by a layer, torch's compiler would compute again for each of the functions that read it; this asks for it once.
    """
    if values.requires_grad or not torch.compiler.is_compiling():
        return values.contiguous()
    from torch._inductor.inductor_prims import force_stride_order

    strides = [1]
    for size in values.shape[:0:-1]:
        strides.insert(0, strides[0] * size)
    in_memory: Tensor = force_stride_order(values, strides)
    return in_memory
