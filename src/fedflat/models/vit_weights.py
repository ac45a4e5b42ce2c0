"""Weights of vision transformers as timm and Hugging Face publish them, under the names of timm.

Hugging Face keeps query, key and value apart, which timm has as one layer in that order, and calls everything else differently.
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
"""Their names outside of the blocks, and timm's."""
IN_BLOCK = {
    "attention.output.dense": "attn.proj",
    "intermediate.dense": "mlp.fc1",
    "output.dense": "mlp.fc2",
    "layernorm_before": "norm1",
    "layernorm_after": "norm2",
}
"""Their names inside of a block, and timm's."""
JOINED = ("query", "key", "value")
"""What timm's qkv is made of, in its order."""
_BLOCK = re.compile(r"encoder\.layer\.(\d+)\.(.+)\.(weight|bias)")
_APART = re.compile(rf"blocks\.\d+\.attn\.({'|'.join(JOINED)})\.(weight|bias)")


def translated(tensors: Mapping[str, Tensor], grid: tuple[int, int]) -> dict[str, Tensor]:
    """Tensors under timm's names, with positions for a grid of so many rows and columns of patches."""
    named = joined({timm_name(name): tensor for name, tensor in tensors.items()})
    positions = named.get("pos_embed")
    if positions is not None and positions.ndim == 3:
        named["pos_embed"] = resized_positions(positions, grid)
    return named


def timm_name(name: str) -> str:
    """A tensor's name in timm, from its name in Hugging Face; query, key and value are still apart.

    >>> timm_name("vit.encoder.layer.3.intermediate.dense.bias"), timm_name("blocks.3.mlp.fc1.bias")
    ('blocks.3.mlp.fc1.bias', 'blocks.3.mlp.fc1.bias')
    """
    theirs = name.removeprefix("vit.")
    block = _BLOCK.fullmatch(theirs)
    if block:
        number, layer, kind = block.groups()
        inside = IN_BLOCK.get(layer) or layer.replace("attention.attention.", "attn.")
        return f"blocks.{number}.{inside}.{kind}"
    if theirs in HUGGING_FACE:
        return HUGGING_FACE[theirs]
    layer, _, kind = theirs.rpartition(".")
    return f"{HUGGING_FACE[layer]}.{kind}" if layer in HUGGING_FACE else name


def joined(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Query, key and value of every block as one tensor, where all three are there."""
    found = dict(tensors)
    for name in tensors:
        apart = _APART.fullmatch(name)
        if apart and apart[1] == JOINED[0]:
            three = [name.replace(f".{JOINED[0]}.", f".{part}.") for part in JOINED]
            if all(one in found for one in three):
                found[name.replace(f".{JOINED[0]}.", ".qkv.")] = torch.cat([found.pop(one) for one in three])
    return found


def resized_positions(positions: Tensor, grid: tuple[int, int]) -> Tensor:
    """Position embeddings [1, 1 + patches, width] for another grid; the class token's stays as it is.

    As timm does it: bicubic interpolation with antialiasing, pixels being areas (``align_corners=False``), in float32. What is no
    square grid with a class token is left alone.
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
