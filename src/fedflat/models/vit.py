"""Vision transformers (Dosovitskiy et al. 2021), with timm's parameter names, so that its weights load unchanged.

An image becomes a class token and a sequence of patch embeddings, plus learned positions. Each block computes

    x <- x + proj(attention(norm1(x)))
    x <- x + fc2(gelu(fc1(norm2(x))))

and a linear layer classifies the normalised class token of the last block. Attention uses torch's kernel, which has no
second derivative; Hessian-vector products need ``torch.nn.attention.sdpa_kernel(SDPBackend.MATH)``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedflat.errors import UserError
from fedflat.models.registry import ImageModelSpec, ModelExample, shape_text
from fedflat.models.vit_weights import convert_weights
from fedflat.text import param

EPSILON = 1e-6
"""Epsilon of every LayerNorm, as in the authors' code and in timm; Hugging Face uses 1e-12."""
INIT_STD = 0.02
"""Standard deviation of the truncated normal initialisation of linear layers and positions, as in timm."""
PATCH_HELP = "height and width of a patch in pixels; must divide those of the image"
WIDTH_HELP = "dimensions per token"
HEADS_HELP = "attention heads; must divide the width"


@dataclass(frozen=True)
class VisionTransformerSpec(ImageModelSpec):
    """Base class of vision transformers, which differ only in the defaults of these options."""

    patch: int = param(16, PATCH_HELP, low=1)
    width: int = param(768, WIDTH_HELP, low=1)
    depth: int = param(12, "number of blocks", low=1, high=1000)
    heads: int = param(12, HEADS_HELP, low=1)
    mlp: int = param(4, "hidden units of each block, in multiples of the width", low=1)

    def smallest_side(self) -> int:
        return self.patch

    def check(self, input_shape: tuple[int, ...]) -> None:
        """Raise a ``UserError`` unless the patches tile the image and the heads divide the width."""
        super().check(input_shape)
        if any(side % self.patch for side in input_shape[1:]):
            raise UserError(
                f"{self.name}: patch={self.patch} does not divide images of {shape_text(input_shape[1:])} pixels; "
                f"expected a divisor of both sides, for example {self.name}(patch={_fitting_patch(input_shape[1:])})"
            )
        if self.width % self.heads:
            raise UserError(f"{self.name}: heads={self.heads} does not divide width={self.width}; expected a divisor")

    def network(self, input_shape: tuple[int, ...], classes: int) -> nn.Module:
        channels, height, width = input_shape
        return VisionTransformer(self, channels, (height // self.patch, width // self.patch), classes)


@dataclass(frozen=True)
class VitB16(VisionTransformerSpec):
    """ViT-B/16: twelve blocks of width 768 on patches of 16 pixels (timm's vit_base_patch16_224)."""

    name = "vit-b16"
    dataset = "'tiny_imagenet(size=224)'"
    examples = (ModelExample("vit-b16", (3, 224, 224), 200, "Dosovitskiy et al. 2021; FedSWA (2025) on Tiny ImageNet"),)


@dataclass(frozen=True)
class VitS16(VisionTransformerSpec):
    """ViT-S/16: twelve blocks of width 384 on patches of 16 pixels (timm's vit_small_patch16_224)."""

    name = "vit-s16"
    dataset = "'tiny_imagenet(size=224)'"
    examples = (ModelExample("vit-s16", (3, 224, 224), 200, "Touvron et al. 2021; Steiner et al. 2022"),)
    width: int = param(384, WIDTH_HELP, low=1)
    heads: int = param(6, HEADS_HELP, low=1)


@dataclass(frozen=True)
class VitTiny(VisionTransformerSpec):
    """ViT-Tiny for small images: twelve blocks of width 192 on patches of 4 pixels.

    With patch=16 it is timm's vit_tiny_patch16_224.
    """

    name = "vit-tiny"
    examples = (ModelExample("vit-tiny", (3, 32, 32), 10, "Touvron et al. 2021, with smaller patches"),)
    patch: int = param(4, PATCH_HELP, low=1)
    width: int = param(192, WIDTH_HELP, low=1)
    heads: int = param(3, HEADS_HELP, low=1)


class VisionTransformer(nn.Module):
    """Maps images [n, channels, height, width] to logits [n, classes]."""

    def __init__(self, spec: VisionTransformerSpec, channels: int, grid: tuple[int, int], classes: int) -> None:
        """Build the network for images with ``grid`` rows and columns of patches."""
        super().__init__()
        self.grid = grid
        rows, columns = grid
        self.patch_embed = PatchEmbedding(channels, spec.patch, spec.width)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, spec.width))
        self.pos_embed = nn.Parameter(torch.zeros(1, 1 + rows * columns, spec.width))
        blocks = [Block(spec.width, spec.heads, spec.mlp * spec.width) for _ in range(spec.depth)]
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.LayerNorm(spec.width, EPSILON)
        self.head = nn.Linear(spec.width, classes)
        self._initialise()

    def _initialise(self) -> None:
        """Initialise the class token, the position embeddings and all linear layers as timm does."""
        nn.init.normal_(self.cls_token, std=1e-6)
        nn.init.trunc_normal_(self.pos_embed, std=INIT_STD)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=INIT_STD)
                nn.init.zeros_(module.bias)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits [n, classes], computed from the class token of the last block."""
        patches: Tensor = self.patch_embed(images)
        class_tokens = self.cls_token.expand(patches.shape[0], -1, -1)
        tokens = torch.cat([class_tokens, patches], 1) + self.pos_embed
        class_output = self.blocks(tokens)[:, 0]
        # LayerNorm acts on each token separately, so normalising the class token suffices.
        logits: Tensor = self.head(self.norm(class_output))
        return logits

    def convert_weights(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Rename weights of timm or Hugging Face to this model's names, and resize positions to its grid."""
        return convert_weights(tensors, self.grid)


class PatchEmbedding(nn.Module):
    """A linear layer applied to each patch, written as a convolution."""

    def __init__(self, channels: int, patch: int, width: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(channels, width, patch, patch)

    def forward(self, images: Tensor) -> Tensor:
        """Return tokens [n, patches, width], with patches in row-major order."""
        tokens: Tensor = self.proj(images).flatten(2).transpose(1, 2)
        return tokens


class Block(nn.Module):
    """A pre-norm transformer block: attention and an MLP, each with a residual connection."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, EPSILON)
        self.attn = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width, EPSILON)
        self.mlp = FeedForward(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Transform tokens [n, tokens, width]."""
        x = x + self.attn(self.norm1(x))
        y: Tensor = x + self.mlp(self.norm2(x))
        return y


class Attention(nn.Module):
    """Multi-head attention softmax(q k^T / sqrt(d)) v; one linear layer computes q, k and v, as in timm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Transform tokens [n, tokens, width]."""
        qkv = self.qkv(x).unflatten(-1, (3, self.heads, -1))  # [n, tokens, 3, heads, width / heads]
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # each [n, heads, tokens, width / heads]
        attended = F.scaled_dot_product_attention(q, k, v)
        y: Tensor = self.proj(attended.transpose(1, 2).flatten(2))
        return y


class FeedForward(nn.Module):
    """Two linear layers with the exact GELU in between."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.fc2 = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc2(F.gelu(self.fc1(x)))
        return y


def _fitting_patch(sides: tuple[int, ...]) -> int:
    """Return the largest patch size up to 16 that divides both sides."""
    return max(patch for patch in range(1, 17) if all(side % patch == 0 for side in sides))
