"""Conversion of published weights of vision transformers, from timm or Hugging Face, to timm's names.

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
"""timm's names of the layers outside the blocks, by Hugging Face's names."""
IN_BLOCK = {
    "attention.output.dense": "attn.proj",
    "intermediate.dense": "mlp.fc1",
    "output.dense": "mlp.fc2",
    "layernorm_before": "norm1",
    "layernorm_after": "norm2",
}
"""timm's names of the layers inside a block, by Hugging Face's names."""
_BLOCK = re.compile(r"encoder\.layer\.(\d+)\.(.+)\.(weight|bias)")
_QUERY = re.compile(r"(blocks\.\d+\.attn)\.query\.(weight|bias)")


def convert_weights(tensors: Mapping[str, Tensor], grid: tuple[int, int]) -> dict[str, Tensor]:
    """Rename tensors to timm's names, and resize position embeddings to a ``grid`` of (rows, columns) patches."""
    converted = join_qkv({timm_name(name): tensor for name, tensor in tensors.items()})
    positions = converted.get("pos_embed")
    if positions is not None and positions.ndim == 3:
        converted["pos_embed"] = resize_positions(positions, grid)
    return converted


def timm_name(name: str) -> str:
    """Convert Hugging Face's name of a tensor to timm's; other names stay unchanged.

    Query, key and value stay separate tensors, which ``join_qkv`` joins.

    >>> timm_name("vit.encoder.layer.3.intermediate.dense.bias"), timm_name("blocks.3.mlp.fc1.bias")
    ('blocks.3.mlp.fc1.bias', 'blocks.3.mlp.fc1.bias')
    """
    short = name.removeprefix("vit.")
    block = _BLOCK.fullmatch(short)
    if block:
        number, layer, kind = block.groups()  # kind: weight or bias
        timm_layer = IN_BLOCK.get(layer) or layer.replace("attention.attention.", "attn.")
        return f"blocks.{number}.{timm_layer}.{kind}"
    if short in HUGGING_FACE:
        return HUGGING_FACE[short]
    layer, _, kind = short.rpartition(".")
    return f"{HUGGING_FACE[layer]}.{kind}" if layer in HUGGING_FACE else name


def join_qkv(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Concatenate the tensors of query, key and value, in every block that has all three, into timm's ``qkv``."""
    joined = dict(tensors)
    for name in tensors:
        match = _QUERY.fullmatch(name)
        if match:
            attention, kind = match.groups()
            parts = [f"{attention}.{part}.{kind}" for part in ("query", "key", "value")]
            if all(part in joined for part in parts):
                joined[f"{attention}.qkv.{kind}"] = torch.cat([joined.pop(part) for part in parts])
    return joined


def resize_positions(positions: Tensor, grid: tuple[int, int]) -> Tensor:
    """Resize position embeddings [1, 1 + patches, width] to a grid of (rows, columns), keeping the class token's.

    As in timm: bicubic interpolation with antialiasing and ``align_corners=False``, in float32. Embeddings that are not
    a class token and a square grid are returned unchanged.
    """
    rows, columns = grid
    count = positions.shape[1] - 1
    side = math.isqrt(max(count, 0))
    if count == rows * columns or side * side != count or count < 1:
        return positions
    class_token, patches = torch.split(positions, [1, count], 1)
    as_image = patches.float().reshape(len(patches), side, side, -1).permute(0, 3, 1, 2)
    resized = F.interpolate(as_image, (rows, columns), mode="bicubic", antialias=True, align_corners=False)
    return torch.cat([class_token, resized.flatten(2).transpose(1, 2).to(positions.dtype)], 1)
