"""Published weights of vision transformers (timm, Hugging Face) under timm's names.

Hugging Face uses other names, and separate layers for query, key and value, which timm joins in that order.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

HUGGING_FACE = {
    "embeddings.cls_token": "cls_token",
    "embeddings.position_embeddings": "pos_embed",
    "embeddings.patch_embeddings.projection": "patch_embed.proj",
    "layernorm": "norm",
    "classifier": "head",
}
"""Hugging Face's names outside the blocks, and timm's."""
IN_BLOCK = {
    "attention.output.dense": "attn.proj",
    "intermediate.dense": "mlp.fc1",
    "output.dense": "mlp.fc2",
    "layernorm_before": "norm1",
    "layernorm_after": "norm2",
}
"""Hugging Face's names inside a block, and timm's."""
JOINED = ("query", "key", "value")
"""The parts of timm's qkv, in order."""
_BLOCK = re.compile(r"encoder\.layer\.(\d+)\.(.+)\.(weight|bias)")
_SEPARATE = re.compile(rf"blocks\.\d+\.attn\.({'|'.join(JOINED)})\.(weight|bias)")


def translated(tensors: Mapping[str, Tensor], grid: tuple[int, int]) -> dict[str, Tensor]:
    """Rename tensors to timm's names, and resize position embeddings to a ``grid`` of (rows, columns) patches."""
    named = joined({timm_name(name): tensor for name, tensor in tensors.items()})
    positions = named.get("pos_embed")
    if positions is not None and positions.ndim == 3:
        named["pos_embed"] = resized_positions(positions, grid)
    return named


def timm_name(name: str) -> str:
    """timm's name of a tensor, given Hugging Face's; query, key and value stay separate.

    >>> timm_name("vit.encoder.layer.3.intermediate.dense.bias"), timm_name("blocks.3.mlp.fc1.bias")
    ('blocks.3.mlp.fc1.bias', 'blocks.3.mlp.fc1.bias')
    """
    short = name.removeprefix("vit.")
    block = _BLOCK.fullmatch(short)
    if block:
        number, layer, kind = block.groups()
        inside = IN_BLOCK.get(layer) or layer.replace("attention.attention.", "attn.")
        return f"blocks.{number}.{inside}.{kind}"
    if short in HUGGING_FACE:
        return HUGGING_FACE[short]
    layer, _, kind = short.rpartition(".")
    return f"{HUGGING_FACE[layer]}.{kind}" if layer in HUGGING_FACE else name


def joined(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Concatenate query, key and value of every block that has all three."""
    result = dict(tensors)
    for name in tensors:
        match = _SEPARATE.fullmatch(name)
        if match and match[1] == JOINED[0]:
            parts = [name.replace(f".{JOINED[0]}.", f".{part}.") for part in JOINED]
            if all(part in result for part in parts):
                result[name.replace(f".{JOINED[0]}.", ".qkv.")] = torch.cat([result.pop(part) for part in parts])
    return result


def resized_positions(positions: Tensor, grid: tuple[int, int]) -> Tensor:
    """Resize position embeddings [1, 1 + patches, width] to another grid, keeping the class token's.

    As in timm: bicubic interpolation with antialiasing and ``align_corners=False``, in float32. Embeddings that are not
    a class token and a square grid are returned unchanged.
    """
    rows, columns = grid
    count = positions.shape[1] - 1
    side = math.isqrt(max(count, 0))
    if count == rows * columns or side * side != count or count < 1:
        return positions
    token, patches = torch.split(positions, [1, count], 1)
    image = patches.float().reshape(len(patches), side, side, -1).permute(0, 3, 1, 2)
    resized = F.interpolate(image, (rows, columns), mode="bicubic", antialias=True, align_corners=False)
    return torch.cat([token, resized.flatten(2).transpose(1, 2).to(positions.dtype)], 1)
