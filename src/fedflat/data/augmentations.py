"""Augmentation steps and their registry. To add one, write a class here and register it at the end of this module.

A step is a function of uniform random numbers drawn in advance; see ``fedflat.data.augment``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from fedflat.data.dataset import IGNORED
from fedflat.errors import UserError
from fedflat.registry import Registry
from fedflat.text import param

Uniforms = npt.NDArray[np.float64]
Draws = dict[str, torch.Tensor]
"""Random quantities by name: [steps, batch, ...] as drawn, [batch, ...] when applied to one step's batch."""


class AugmentationStep(ABC):
    """One augmentation; a frozen dataclass whose fields are the parameters of its text.

    Attributes:
        needs_images: whether it applies to images only.
        moves_masks: whether it transforms segmentation masks along with their images.
        needs_masks: whether it applies to segmentation only.
        per_step: random numbers per training step.
        per_example: random numbers per example.
    """

    needs_images: ClassVar[bool] = True
    moves_masks: ClassVar[bool] = False
    needs_masks: ClassVar[bool] = False
    per_step: ClassVar[int] = 0
    per_example: ClassVar[int] = 0

    @abstractmethod
    def draws(self, per_step: Uniforms, per_example: Uniforms, shape: tuple[int, ...]) -> Draws:
        """Convert uniform random numbers to the quantities that the other methods use.

        Args:
            per_step: uniforms [steps, self.per_step].
            per_example: uniforms [steps, batch, self.per_example].
            shape: shape of one example.
        """

    def on_pixels(self, pixels: torch.Tensor, draws: Draws) -> torch.Tensor:
        """Transform a batch [n, channels, height, width] before normalisation."""
        return pixels

    def on_values(self, values: torch.Tensor, draws: Draws) -> torch.Tensor:
        """Transform a batch after normalisation."""
        return values

    def on_masks(self, masks: torch.Tensor, draws: Draws) -> torch.Tensor:
        """Transform the masks [n, height, width] like their images."""
        return masks


@dataclass(frozen=True)
class CropFlip(AugmentationStep):
    """A random window of the padded image, flipped horizontally with probability 1/2.

    Style ``pixel`` pads with black before normalisation and always crops (FedSWA; Caldarola et al.); style ``mean``
    pads with the mean and crops with probability 1/2 (FL-Simulator, FedWMSAM).
    """

    padding: int = param(4, "pixels of padding on each side", low=0)
    style: Literal["pixel", "mean"] = param(
        "pixel", "pixel: pad with black, always crop; mean: pad with the mean, crop with probability 1/2"
    )
    moves_masks = True
    per_example = 4

    def draws(self, per_step: Uniforms, per_example: Uniforms, shape: tuple[int, ...]) -> Draws:
        """Upper left corner of the window in the padded image, and whether to flip."""
        row, column, mirrored, moved = np.moveaxis(per_example, -1, 0)
        corner = uniform_integers(np.stack([row, column], -1), 2 * self.padding + 1)
        if self.style == "mean":
            corner = np.where(moved[..., None] < 0.5, corner, self.padding)
        return {"corner": torch.from_numpy(corner), "mirrored": torch.from_numpy(mirrored < 0.5)}

    def on_pixels(self, pixels: torch.Tensor, draws: Draws) -> torch.Tensor:
        return self._window(pixels, draws) if self.style == "pixel" else pixels

    def on_values(self, values: torch.Tensor, draws: Draws) -> torch.Tensor:
        return self._window(values, draws) if self.style == "mean" else values

    def on_masks(self, masks: torch.Tensor, draws: Draws) -> torch.Tensor:
        return self._window(masks[:, None], draws, IGNORED)[:, 0]

    def _window(self, images: torch.Tensor, draws: Draws, fill: int = 0) -> torch.Tensor:
        size, _, height, width = images.shape
        corner, mirrored = draws["corner"][:size], draws["mirrored"][:size]
        down, across = (torch.arange(n, device=images.device) for n in (height, width))
        rows = corner[:, :1] + down
        columns = corner[:, 1:] + torch.where(mirrored[:, None], width - 1 - across, across)
        return gather_pixels(F.pad(images, [self.padding] * 4, value=fill), rows, columns)


@dataclass(frozen=True)
class Cutout(AugmentationStep):
    """Sets a square around a random pixel to the mean, clipped at the border (DeVries and Taylor 2017)."""

    size: int = param(16, "side of the square in pixels", low=0)
    per_example = 2

    def draws(self, per_step: Uniforms, per_example: Uniforms, shape: tuple[int, ...]) -> Draws:
        """Centre of the square."""
        centre = np.stack([uniform_integers(per_example[..., i], shape[1 + i]) for i in (0, 1)], -1)
        return {"centre": torch.from_numpy(centre)}

    def on_values(self, values: torch.Tensor, draws: Draws) -> torch.Tensor:
        size, _, height, width = values.shape
        first = draws["centre"][:size] - self.size // 2
        down, across = (torch.arange(n, device=values.device) for n in (height, width))
        rows = (down >= first[:, :1]) & (down < first[:, :1] + self.size)
        columns = (across >= first[:, 1:]) & (across < first[:, 1:] + self.size)
        return torch.where((rows[:, :, None] & columns[:, None, :])[:, None], 0, values)


@dataclass(frozen=True)
class Mixup(AugmentationStep):
    """Blends each example with another of its batch (Zhang et al. 2018).

    The batch becomes lam X + (1 - lam) X[pi], with lam ~ Beta(alpha, alpha) and a random permutation pi.
    """

    alpha: float = param(1.0, "parameter of the beta distribution of lam", above=0)
    needs_images = False
    per_step = 1
    per_example = 1

    def draws(self, per_step: Uniforms, per_example: Uniforms, shape: tuple[int, ...]) -> Draws:
        """lam, and sort keys of the permutation; a prefix of the keys permutes a shorter batch."""
        lam = per_step[:, 0]
        if self.alpha != 1:
            from scipy.special import betaincinv

            lam = betaincinv(self.alpha, self.alpha, lam)
        return {"lam": torch.from_numpy(lam).float(), "order": torch.from_numpy(per_example[..., 0]).float()}

    def on_values(self, values: torch.Tensor, draws: Draws) -> torch.Tensor:
        if not values.is_floating_point():
            raise UserError("mixup blends numbers, but these inputs are tokens; use augmentation 'none'")
        lam, order = draws["lam"].to(values.dtype), permutation(draws, len(values))
        return lam * values + (1 - lam) * values[order]


@dataclass(frozen=True)
class RandomResizedCrop(AugmentationStep):
    """A window of random area and aspect ratio, resized to the size of the image (Szegedy et al. 2015).

    Its area is a share between ``scale`` and 1 of the image, its aspect ratio log-uniform between 1/``ratio`` and
    ``ratio``. As in torchvision, a window that does not fit is redrawn up to ten times, then replaced by the largest
    centred one. It does not flip; add ``crop-flip(padding=0)``.
    """

    scale: float = param(0.08, "smallest area of the window relative to the image", above=0, high=1)
    ratio: float = param(4 / 3, "largest ratio of width to height, and of height to width", low=1)
    attempts: ClassVar[int] = 10
    per_example = 2 * attempts + 2

    def draws(self, per_step: Uniforms, per_example: Uniforms, shape: tuple[int, ...]) -> Draws:
        """Top, left, height and width of the window."""
        size = np.array(shape[1:])
        shares, shapes = np.split(per_example[..., : 2 * self.attempts], 2, axis=-1)
        area = size.prod() * (self.scale + (1 - self.scale) * shares)
        aspect = np.exp((2 * shapes - 1) * np.log(self.ratio))
        windows = np.rint(np.sqrt(np.stack([area / aspect, area * aspect], -1)))
        fits = ((windows >= 1) & (windows <= size)).all(-1)
        first = np.take_along_axis(windows, fits.argmax(-1)[..., None, None], -2)[..., 0, :]
        any_fits = fits.any(-1)[..., None]
        window = np.where(any_fits, first, np.minimum(size, np.rint(size[::-1] * self.ratio))).astype(np.int64)
        random_corner = uniform_integers(per_example[..., -2:], size - window + 1)
        corner = np.where(any_fits, random_corner, (size - window) // 2)
        return {"window": torch.from_numpy(np.concatenate([corner, window], -1))}

    def on_pixels(self, pixels: torch.Tensor, draws: Draws) -> torch.Tensor:
        """The windows, bilinearly interpolated from pixels inside them."""
        window = draws["window"][: len(pixels)].to(torch.float32)
        places = []
        for axis, size in enumerate(pixels.shape[2:]):
            first, length = window[:, axis : axis + 1], window[:, 2 + axis : 3 + axis]
            centres = (torch.arange(size, device=pixels.device) + 0.5) * (length / size) - 0.5
            source = first + torch.minimum(centres.clamp(min=0), length - 1)
            places.append((2 * source + 1) / size - 1)
        values = pixels if pixels.is_floating_point() else pixels.to(torch.float32)
        cut = sample_bilinear(values, places[0].to(values.dtype), places[1].to(values.dtype))
        # Halves are frequent; the small offset keeps rounding errors from deciding their direction.
        return cut if pixels.is_floating_point() else (cut + 2**-10).round().to(pixels.dtype)


@dataclass(frozen=True)
class ScaleCrop(AugmentationStep):
    """Scales image and mask by a factor uniform from ``low`` to ``high``, then cuts a window of ``height`` x ``width``.

    If the scaled image is smaller than the window, it is placed at random inside; the rest is the mean, which the mask
    ignores. Images are interpolated bilinearly, masks by nearest neighbour (Caldarola et al. 2022, appendix C.1: 0.5 to
    1.5 on Cityscapes).
    """

    low: float = param(0.5, "smallest scale", above=0)
    high: float = param(1.5, "largest scale", above=0)
    height: int | None = param(None, "height of the window in pixels; none: that of the image", low=1)
    width: int | None = param(None, "width of the window in pixels; none: that of the image", low=1)
    moves_masks = True
    needs_masks = True
    per_example = 3

    def __post_init__(self) -> None:
        if self.low > self.high:
            raise UserError(f"scale-crop has low={self.low:g} above high={self.high:g}; expected low <= high")

    def draws(self, per_step: Uniforms, per_example: Uniforms, shape: tuple[int, ...]) -> Draws:
        """Size of the scaled image, and the window's origin in it; negative if the image starts inside the window."""
        image, window = np.array(shape[1:]), np.array(self._window(shape))
        scale = self.low + (self.high - self.low) * per_example[..., :1]
        scaled = np.maximum(np.rint(scale * image), 1).astype(np.int64)
        room = scaled - window
        corner = np.minimum(room, 0) + uniform_integers(per_example[..., 1:], np.abs(room) + 1)
        return {"scaled": torch.from_numpy(scaled), "origin": torch.from_numpy(corner)}

    def on_values(self, values: torch.Tensor, draws: Draws) -> torch.Tensor:
        # Positions in bfloat16 would be off by pixels.
        precise = values if values.dtype == torch.float64 else values.float()
        places, inside = [], []
        for axis, (size, number) in enumerate(zip(values.shape[2:], self._window(values.shape[1:]), strict=True)):
            at, scaled = self._scaled_positions(axis, number, draws, len(values))
            source = ((at + 0.5) * (size / scaled.to(precise.dtype)) - 0.5).clamp(0, size - 1)
            places.append((2 * source + 1) / size - 1)
            inside.append((at >= 0) & (at < scaled))
        cut = sample_bilinear(precise, *places)
        return torch.where((inside[0][:, :, None] & inside[1][:, None, :])[:, None], cut, 0).to(values.dtype)

    def on_masks(self, masks: torch.Tensor, draws: Draws) -> torch.Tensor:
        places, inside = [], []
        for axis, (size, number) in enumerate(zip(masks.shape[1:], self._window((1, *masks.shape[1:])), strict=True)):
            at, scaled = self._scaled_positions(axis, number, draws, len(masks))
            places.append(((2 * at + 1) * size // (2 * scaled)).clamp(0, size - 1))
            inside.append((at >= 0) & (at < scaled))
        cut = gather_pixels(masks[:, None], *places)[:, 0]
        return torch.where(inside[0][:, :, None] & inside[1][:, None, :], cut, IGNORED)

    def _window(self, shape: tuple[int, ...]) -> tuple[int, int]:
        return self.height or shape[1], self.width or shape[2]

    def _scaled_positions(self, axis: int, number: int, draws: Draws, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Line of the scaled image for each line of the window [n, number], and the scaled image's length [n, 1]."""
        first, scaled = (draws[name][:size, axis : axis + 1] for name in ("origin", "scaled"))
        return first + torch.arange(number, device=first.device), scaled


@dataclass(frozen=True)
class Flip(AugmentationStep):
    """Flips the image horizontally with probability 1/2."""

    moves_masks = True
    per_example = 1

    def draws(self, per_step: Uniforms, per_example: Uniforms, shape: tuple[int, ...]) -> Draws:
        """Whether to flip."""
        return {"flipped": torch.from_numpy(per_example[..., 0] < 0.5)}

    def on_values(self, values: torch.Tensor, draws: Draws) -> torch.Tensor:
        return torch.where(draws["flipped"][: len(values), None, None, None], values.flip(-1), values)

    def on_masks(self, masks: torch.Tensor, draws: Draws) -> torch.Tensor:
        return torch.where(draws["flipped"][: len(masks), None, None], masks.flip(-1), masks)


AUGMENTATIONS: Registry[type[AugmentationStep]] = Registry("augmentation", see="fedflat data list")
"""Augmentation steps by name, in the order in which they are applied.

The position of a step is also the number of its random stream, so new ones go to the end.
"""
_BUILT_IN: dict[str, type[AugmentationStep]] = {
    "crop-flip": CropFlip,
    "cutout": Cutout,
    "mixup": Mixup,
    "random-resized-crop": RandomResizedCrop,
    "scale-crop": ScaleCrop,
    "flip": Flip,
}
for _name, _step in _BUILT_IN.items():
    AUGMENTATIONS.register(_name, _step)


def uniform_integers(uniforms: Uniforms, count: int | npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Integers uniform on 0, ..., ``count`` - 1 from uniforms on [0, 1)."""
    return np.minimum((uniforms * count).astype(np.int64), count - 1)


def gather_pixels(images: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """The pixels of images [n, C, H, W] at rows [n, h] and columns [n, w], as [n, C, h, w]."""
    size, channels, _, width = images.shape
    places = (rows[:, :, None] * width + columns[:, None, :]).flatten(1)
    pixels = images.flatten(2).gather(2, places[:, None].expand(-1, channels, -1))
    return pixels.view(size, channels, rows.shape[1], columns.shape[1])


def sample_bilinear(images: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """As ``gather_pixels``, interpolated at positions from -1 to 1, as ``F.grid_sample`` defines them."""
    shape = (len(images), rows.shape[1], columns.shape[1])
    grid = torch.stack([columns[:, None, :].expand(shape), rows[:, :, None].expand(shape)], -1)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="border", align_corners=False)


def permutation(draws: Draws, size: int | None = None) -> torch.Tensor:
    """Mixup's permutation of a batch; padding examples go last if their ``order`` is infinite."""
    return draws["order"][:size].argsort()
