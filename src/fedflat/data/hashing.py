"""Hashes of examples, computed in blocks, since tensors may exceed memory."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch

BLOCK_BYTES = 1 << 24
MAX_HASHED_BYTES, SAMPLED_EXAMPLES = 2**28, 200
"""``bounded_hash`` reads only 200 examples of a tensor larger than 256 MiB."""
Tensors = Mapping[str, torch.Tensor]


def content_hash(*splits: Tensors) -> str:
    """Return the sha256 over names, types, shapes and values of all tensors."""
    digest = hashlib.sha256()
    for name, tensor in (item for split in splits for item in split.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        for block in row_blocks(tensor):
            digest.update(_bytes(block))
    return digest.hexdigest()


def bounded_hash(constants: Sequence[Sequence[float]], *splits: Tensors) -> str:
    """Return a short hash over constants and tensors; it samples large tensors and rounds floats to float32."""
    digest = hashlib.sha256()
    for values in constants:
        digest.update(f"{len(values)}:".encode() + np.asarray(values, np.float32).tobytes())
    for name, tensor in (item for split in splits for item in split.items()):
        dtype = torch.float32 if tensor.is_floating_point() else tensor.dtype
        digest.update(f"{name} {dtype} {tuple(tensor.shape)}\n".encode())
        is_large = tensor.numel() * dtype.itemsize > MAX_HASHED_BYTES
        for block in _sampled_rows(tensor) if is_large else row_blocks(tensor):
            digest.update(_bytes(block.to(dtype)))
    return digest.hexdigest()[:12]


def row_blocks(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the rows of a tensor in blocks of about 16 MB; an empty tensor is one empty block."""
    rows = max(1, BLOCK_BYTES // max(1, tensor[:1].nbytes))
    for start in range(0, max(1, len(tensor)), rows):
        yield tensor[start : start + rows]


def _sampled_rows(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield evenly spaced rows of a tensor."""
    for row in np.linspace(0, len(tensor) - 1, SAMPLED_EXAMPLES).astype(np.int64).tolist():
        yield tensor[row : row + 1]


def _bytes(block: torch.Tensor) -> memoryview:
    """Return the values of a tensor as bytes, in the order of their indices."""
    contiguous = block.detach().cpu().flatten().clone(memory_format=torch.contiguous_format)
    return contiguous.view(torch.uint8).numpy().data
