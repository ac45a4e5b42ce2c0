"""What every kind of augmentation has in common: it is a function of uniform random numbers that were drawn beforehand."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch

Uniforms = npt.NDArray[np.float64]
Draws = dict[str, torch.Tensor]


class Part(ABC):
    """One kind of augmentation: a function of uniform random numbers, so many per step and so many per example."""

    needs_images: ClassVar[bool] = True
    moves_masks: ClassVar[bool] = False
    """Whether the masks of a segmentation can follow their images."""
    needs_masks: ClassVar[bool] = False
    """Whether it is for segmentations alone."""
    per_step: ClassVar[int] = 0
    per_example: ClassVar[int] = 0

    @abstractmethod
    def draws(self, per_step: Uniforms, per_example: Uniforms, shape: tuple[int, ...]) -> Draws:
        """What ``on_pixels``, ``on_values`` and ``on_masks`` need, from uniforms [steps, per_step] and [steps, batch, per_example]."""

    def on_pixels(self, pixels: torch.Tensor, draws: Draws) -> torch.Tensor:
        """The batch before normalisation."""
        return pixels

    def on_values(self, values: torch.Tensor, draws: Draws) -> torch.Tensor:
        """The batch after normalisation."""
        return values

    def on_masks(self, masks: torch.Tensor, draws: Draws) -> torch.Tensor:
        """The masks [n, H, W] of the batch, moved as its images are."""
        return masks


def whole(uniforms: Uniforms, count: int | npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Whole numbers from 0 to ``count`` - 1, equally likely."""
    return np.minimum((uniforms * count).astype(np.int64), count - 1)


def taken(images: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """The pixels of [n, C, H, W] where given rows [n, h] and columns [n, w] cross, as [n, C, h, w]."""
    size, channels, _, width = images.shape
    places = (rows[:, :, None] * width + columns[:, None, :]).flatten(1)
    cut = images.flatten(2).gather(2, places[:, None].expand(-1, channels, -1))
    return cut.view(size, channels, rows.shape[1], columns.shape[1])
