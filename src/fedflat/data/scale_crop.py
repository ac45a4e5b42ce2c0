"""Augmentation of images together with their masks: random scale and crop, and mirror images."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from fedflat.data.dataset import IGNORED
from fedflat.data.parts import Draws, Part, Uniforms, taken, whole
from fedflat.text import param


@dataclass(frozen=True)
class ScaleCrop(Part):
    """The image is scaled by a factor drawn evenly from ``low`` to ``high``, then a window of ``height`` x ``width`` is cut out of it.

    Where the scaled image is smaller than the window it lies somewhere inside, and around it is the mean, which the mask ignores.
    Images are interpolated bilinearly, masks take the nearest id (Caldarola et al. 2022, appendix C.1: 0.5 to 1.5 on Cityscapes).
    """

    low: float = param(0.5, "the smallest scale", above=0)
    high: float = param(1.5, "the largest scale", above=0)
    height: int | None = param(None, "height of the window in pixels; none: that of the image", low=1)
    width: int | None = param(None, "width of the window in pixels; none: that of the image", low=1)
    moves_masks = True
    needs_masks = True
    per_example = 3

    def draws(self, per_step: Uniforms, per_example: Uniforms, shape: tuple[int, ...]) -> Draws:
        """Height and width of the scaled image, and where the window begins in it: negative where the image begins inside the window."""
        image, window = np.array(shape[1:]), np.array(self._window(shape))
        scale = self.low + (self.high - self.low) * per_example[..., :1]
        scaled = np.maximum(np.rint(scale * image), 1).astype(np.int64)
        room = scaled - window
        corner = np.minimum(room, 0) + whole(per_example[..., 1:], np.abs(room) + 1)
        return {"scaled": torch.from_numpy(scaled), "origin": torch.from_numpy(corner)}

    def on_values(self, values: torch.Tensor, draws: Draws) -> torch.Tensor:
        """The windows of the scaled images."""
        wide = values if values.dtype == torch.float64 else values.float()  # places in bfloat16 would be off by pixels
        places, inside = [], []
        for axis, (size, number) in enumerate(zip(values.shape[2:], self._window(values.shape[1:]), strict=True)):
            at, scaled = self._at(axis, number, draws, len(values))
            source = ((at + 0.5) * (size / scaled.to(wide.dtype)) - 0.5).clamp(0, size - 1)
            places.append((2 * source + 1) / size - 1)
            inside.append((at >= 0) & (at < scaled))
        shape = (len(values), *self._window(values.shape[1:]))
        grid = torch.stack([places[1][:, None, :].expand(shape), places[0][:, :, None].expand(shape)], -1)
        cut = F.grid_sample(wide, grid, mode="bilinear", padding_mode="border", align_corners=False)
        return torch.where((inside[0][:, :, None] & inside[1][:, None, :])[:, None], cut, 0).to(values.dtype)

    def on_masks(self, masks: torch.Tensor, draws: Draws) -> torch.Tensor:
        """The windows of the scaled masks."""
        places, inside = [], []
        for axis, (size, number) in enumerate(zip(masks.shape[1:], self._window((1, *masks.shape[1:])), strict=True)):
            at, scaled = self._at(axis, number, draws, len(masks))
            places.append(((2 * at + 1) * size // (2 * scaled)).clamp(0, size - 1))
            inside.append((at >= 0) & (at < scaled))
        cut = taken(masks[:, None], *places)[:, 0]
        return torch.where(inside[0][:, :, None] & inside[1][:, None, :], cut, IGNORED)

    def _window(self, shape: tuple[int, ...]) -> tuple[int, int]:
        return self.height or shape[1], self.width or shape[2]

    def _at(self, axis: int, number: int, draws: Draws, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """For each line of the window, which line of the scaled image it is; and how many the scaled image has."""
        first, scaled = (draws[name][:size, axis : axis + 1] for name in ("origin", "scaled"))
        return first + torch.arange(number, device=first.device), scaled


@dataclass(frozen=True)
class Flip(Part):
    """Every other image is mirrored, left to right."""

    moves_masks = True
    per_example = 1

    def draws(self, per_step: Uniforms, per_example: Uniforms, shape: tuple[int, ...]) -> Draws:
        """Whether it is mirrored."""
        return {"flipped": torch.from_numpy(per_example[..., 0] < 0.5)}

    def on_values(self, values: torch.Tensor, draws: Draws) -> torch.Tensor:
        """The images, mirrored where they are."""
        return torch.where(draws["flipped"][: len(values), None, None, None], values.flip(-1), values)

    def on_masks(self, masks: torch.Tensor, draws: Draws) -> torch.Tensor:
        """The masks, mirrored where their images are."""
        return torch.where(draws["flipped"][: len(masks), None, None], masks.flip(-1), masks)
