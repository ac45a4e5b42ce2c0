"""Vision transformers (Dosovitskiy et al. 2021), with the names of timm's parameters, so that its weights fit as they are.

An image becomes a sequence of patch embeddings with a class token in front and learned positions added. Each block adds to it

    x <- x + proj(attention(norm1(x)))
    x <- x + fc2(gelu(fc1(norm2(x))))

and the class token of the last block, normalised, is classified. Attention is torch's own kernel, which has no second derivative:
for products with the Hessian use its plain one, ``torch.nn.attention.sdpa_kernel(SDPBackend.MATH)``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedflat.errors import UserError
from fedflat.models.spec import ImageModelSpec
from fedflat.models.vit_weights import translated
from fedflat.text import param

EPSILON = 1e-6
"""Of every LayerNorm, as in the authors' code and in timm; Hugging Face has 1e-12."""
DEVIATION = 0.02
"""Of the truncated normal distribution from which linear layers and positions are drawn, as in timm."""


@dataclass(frozen=True)
class VisionTransformerSpec(ImageModelSpec):
    """The description of a vision transformer: how images are cut, and how wide and deep it is."""

    patch: int = param(16, "height and width of a patch in pixels, which must divide those of the image", low=1)
    width: int = param(768, "numbers per token", low=1)
    depth: int = param(12, "number of blocks", low=1)
    heads: int = param(12, "attention heads, which must divide the width", low=1)
    mlp: int = param(4, "width of the hidden layer of each block, in multiples of the width", low=1)

    def smallest_side(self) -> int:
        """The least height and width in pixels: one patch."""
        return self.patch

    def check(self, input_shape: tuple[int, ...]) -> None:
        """Refuse images that cannot be cut into whole patches, and widths that cannot be cut into whole heads."""
        super().check(input_shape)
        if any(side % self.patch for side in input_shape[1:]):
            shown = "x".join(map(str, input_shape[1:]))
            raise UserError(
                f"{self.name} cuts images into patches of {self.patch}x{self.patch} pixels, which do not fill {shown}; "
                f"expected a patch that divides both, for example {self.name}(patch={_divisor(input_shape[1:])})"
            )
        if self.width % self.heads:
            raise UserError(f"{self.name}: heads={self.heads} does not divide width={self.width}; expected a divisor")

    def network(self, input_shape: tuple[int, ...], classes: int) -> nn.Module:
        """Patches, blocks, and a linear layer on the class token."""
        channels, height, width = input_shape
        grid = (height // self.patch, width // self.patch)
        return VisionTransformer(
            channels, self.patch, grid, self.width, self.depth, self.heads, self.mlp * self.width, classes
        )


@dataclass(frozen=True)
class VitB16(VisionTransformerSpec):
    """ViT-B/16: twelve blocks of width 768 on patches of 16 pixels (timm's vit_base_patch16_224)."""

    name = "vit-b16"


@dataclass(frozen=True)
class VitS16(VisionTransformerSpec):
    """ViT-S/16: twelve blocks of width 384 on patches of 16 pixels (timm's vit_small_patch16_224)."""

    name = "vit-s16"
    width: int = param(384, "numbers per token", low=1)
    heads: int = param(6, "attention heads, which must divide the width", low=1)


@dataclass(frozen=True)
class VitTiny(VisionTransformerSpec):
    """The tiny ViT, for small images: twelve blocks of width 192 on patches of 4 pixels (with patch=16 timm's vit_tiny_patch16_224)."""

    name = "vit-tiny"
    patch: int = param(4, "height and width of a patch in pixels, which must divide those of the image", low=1)
    width: int = param(192, "numbers per token", low=1)
    heads: int = param(3, "attention heads, which must divide the width", low=1)


class VisionTransformer(nn.Module):
    """Images to logits."""

    def __init__(
        self,
        channels: int,
        patch: int,
        grid: tuple[int, int],
        width: int,
        depth: int,
        heads: int,
        hidden: int,
        classes: int,
    ) -> None:
        super().__init__()
        self.grid = grid
        self.patch_embed = PatchEmbedding(channels, patch, width)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.pos_embed = nn.Parameter(torch.zeros(1, 1 + grid[0] * grid[1], width))
        self.blocks = nn.Sequential(*(Block(width, heads, hidden) for _ in range(depth)))
        self.norm = nn.LayerNorm(width, EPSILON)
        self.head = nn.Linear(width, classes)
        self._initialise()

    def _initialise(self) -> None:
        nn.init.normal_(self.cls_token, std=1e-6)
        nn.init.trunc_normal_(self.pos_embed, std=DEVIATION)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=DEVIATION)
                nn.init.zeros_(module.bias)

    def forward(self, images: Tensor) -> Tensor:
        """Logits of a batch of images."""
        patches: Tensor = self.patch_embed(images)
        tokens = torch.cat([self.cls_token.expand(patches.shape[0], -1, -1), patches], 1) + self.pos_embed
        # Only the class token is classified, and LayerNorm treats each token alone.
        logits: Tensor = self.head(self.norm(self.blocks(tokens)[:, 0]))
        return logits

    def translated(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Weights of timm or Hugging Face under the names of this model, with positions resized to its grid."""
        return translated(tensors, self.grid)


class PatchEmbedding(nn.Module):
    """Each patch of an image through the same linear layer, written as a convolution."""

    def __init__(self, channels: int, patch: int, width: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(channels, width, patch, patch)

    def forward(self, images: Tensor) -> Tensor:
        """Tokens [batch, patches, width], row by row."""
        tokens: Tensor = self.proj(images).flatten(2).transpose(1, 2)
        return tokens


class Block(nn.Module):
    """Attention and a hidden layer, each on normalised tokens and added to what came in."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, EPSILON)
        self.attn = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width, EPSILON)
        self.mlp = HiddenLayer(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """The tokens after this block."""
        x = x + self.attn(self.norm1(x))
        after: Tensor = x + self.mlp(self.norm2(x))
        return after


class Attention(nn.Module):
    """softmax(q k^T / sqrt(d)) v in each head; q, k and v are one linear layer, as in timm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """What every token collects from all tokens."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        collected: Tensor = self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return collected


class HiddenLayer(nn.Module):
    """Two linear layers with the exact GELU between them."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.fc2 = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        """Each token through the hidden layer."""
        y: Tensor = self.fc2(F.gelu(self.fc1(x)))
        return y


def _divisor(sides: tuple[int, ...]) -> int:
    """The largest patch of at most 16 pixels that divides both sides."""
    return max(patch for patch in range(1, 17) if all(side % patch == 0 for side in sides))
