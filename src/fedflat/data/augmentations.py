"""Augmentation steps and their registry. To add one, write a class here and register it at the end of this module.

A step is a function of uniform random numbers drawn in advance; see ``fedflat.data.batches``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
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
"""Random quantities by name: [training steps, ...] as drawn; [...] in methods that transform the batch of one step."""


class AugmentationStep(ABC):
    """One augmentation; a frozen dataclass whose fields are the parameters of its text.

    Attributes:
        needs_images: whether it applies to images only.
        moves_masks: whether it transforms segmentation masks along with their images.
        needs_masks: whether it applies to segmentation only.
        per_step: how many random numbers it needs per training step.
        per_example: how many random numbers it needs per example.
    """

    needs_images: ClassVar[bool] = True
    moves_masks: ClassVar[bool] = False
    needs_masks: ClassVar[bool] = False
    per_step: ClassVar[int] = 0
    per_example: ClassVar[int] = 0

    def check(self, shape: tuple[int, ...]) -> None:  # noqa: B027
        """Raise a ``UserError`` if the parameters make no sense for examples of this shape."""

    @abstractmethod
    def draws(self, per_step: Uniforms, per_example: Uniforms, shape: tuple[int, ...]) -> Draws:
        """Convert uniform random numbers to what the other methods use, e.g. the corner of each crop.

        Args:
            per_step: numbers uniform on [0, 1), [training steps, self.per_step].
            per_example: numbers uniform on [0, 1), [training steps, batch, self.per_example].
            shape: shape of one example.

        Returns:
            Tensors [training steps, ...] by name.
        """

    def on_pixels(self, pixels: torch.Tensor, draws: Draws) -> torch.Tensor:
        """Transform a batch [n, channels, height, width] before normalisation."""
        return pixels

    def on_values(self, values: torch.Tensor, draws: Draws) -> torch.Tensor:
        """Transform a batch of normalised inputs [n, ...]."""
        return values

    def on_masks(self, masks: torch.Tensor, draws: Draws) -> torch.Tensor:
        """Transform the masks [n, height, width] like their images."""
        return masks


@dataclass(frozen=True)
class CropFlip(AugmentationStep):
    """Cuts a random window out of the padded image, and flips it horizontally with probability 1/2.

    The window has the size of the original image. Style ``pixel`` pads with black before normalisation and always
    crops (FedSWA; Caldarola et al.); style ``mean`` pads with the mean and crops with probability 1/2 (FL-Simulator,
    FedWMSAM).
    """

    padding: int = param(4, "pixels of padding on each side", low=0, positional=True)
    style: Literal["pixel", "mean"] = param(
        "pixel", "padding and cropping: black, always crop (pixel), or the mean, crop with probability 1/2 (mean)"
    )
    moves_masks = True
    per_example = 4

    def draws(self, per_step: Uniforms, per_example: Uniforms, shape: tuple[int, ...]) -> Draws:
        """Return each window's upper left corner in the padded image (``corner``), and whether to flip (``mirrored``).

        A corner at (padding, padding) leaves the image unmoved. ``per_example`` holds four uniform numbers per example.
        """
        row, column, flip, crop = np.moveaxis(per_example, -1, 0)  # four numbers per example
        corner = uniform_integers(np.stack([row, column], -1), 2 * self.padding + 1)
        if self.style == "mean":
            corner = np.where(crop[..., None] < 0.5, corner, self.padding)
        return {"corner": torch.from_numpy(corner), "mirrored": torch.from_numpy(flip < 0.5)}

    def on_pixels(self, pixels: torch.Tensor, draws: Draws) -> torch.Tensor:
        return self._crop_and_flip(pixels, draws) if self.style == "pixel" else pixels

    def on_values(self, values: torch.Tensor, draws: Draws) -> torch.Tensor:
        return self._crop_and_flip(values, draws) if self.style == "mean" else values

    def on_masks(self, masks: torch.Tensor, draws: Draws) -> torch.Tensor:
        return self._crop_and_flip(masks[:, None], draws, IGNORED)[:, 0]

    def _crop_and_flip(self, images: torch.Tensor, draws: Draws, padding_value: int = 0) -> torch.Tensor:
        """Cut the drawn windows out of the padded images [n, C, H, W], and mirror those drawn to be mirrored.

        Windows have the size of the original images. Both operations are one gather of rows and columns of pixels.
        """
        batch, _, height, width = images.shape
        corner, mirrored = draws["corner"][:batch], draws["mirrored"][:batch]
        window_rows = torch.arange(height, device=images.device)
        window_columns = torch.arange(width, device=images.device)
        rows = corner[:, :1] + window_rows
        columns = corner[:, 1:] + torch.where(mirrored[:, None], width - 1 - window_columns, window_columns)
        return gather_pixels(F.pad(images, [self.padding] * 4, value=padding_value), rows, columns)


@dataclass(frozen=True)
class Cutout(AugmentationStep):
    """Sets a square around a random pixel to the mean (DeVries and Taylor 2017).

    Its side is ``size`` pixels, and it is clipped at the border of the image.
    """

    size: int = param(16, "side of the square in pixels", low=0)
    per_example = 2

    def check(self, shape: tuple[int, ...]) -> None:
        """Reject a square that covers the whole image wherever its centre is."""
        side = max(shape[1:])
        if self.size >= 2 * side:
            raise UserError(f"cutout(size={self.size}) erases images of {side} pixels a side; use a smaller size")

    def draws(self, per_step: Uniforms, per_example: Uniforms, shape: tuple[int, ...]) -> Draws:
        """Return the row and column of each square's centre (``centre``), uniform over the image.

        ``per_example`` holds two uniform numbers for each example, and ``shape`` is [channels, height, width].
        """
        centre = uniform_integers(per_example, np.array(shape[1:]))
        return {"centre": torch.from_numpy(centre)}

    def on_values(self, values: torch.Tensor, draws: Draws) -> torch.Tensor:
        """Set the drawn squares of normalised images [n, C, H, W] to 0, which is the mean."""
        batch, _, height, width = values.shape
        corner = draws["centre"][:batch] - self.size // 2
        top, left = corner[:, :1], corner[:, 1:]
        rows, columns = torch.arange(height, device=values.device), torch.arange(width, device=values.device)
        in_rows = (rows >= top) & (rows < top + self.size)
        in_columns = (columns >= left) & (columns < left + self.size)
        return torch.where(outer_and(in_rows, in_columns)[:, None], 0, values)


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
        """Return the weight ``lam`` of each training step, and one sort key per example (``order``).

        Sorting the keys gives the permutation; a smaller batch sorts only its first keys. ``per_step`` and
        ``per_example`` hold one uniform number for each training step and each example.
        """
        lam = per_step[:, 0]  # uniform, i.e. Beta(1, 1)
        if self.alpha != 1:
            from scipy.special import betaincinv

            lam = betaincinv(self.alpha, self.alpha, lam)  # inverse of the Beta distribution function
        return {"lam": torch.from_numpy(lam).float(), "order": torch.from_numpy(per_example[..., 0]).float()}

    def on_values(self, values: torch.Tensor, draws: Draws) -> torch.Tensor:
        """Blend the normalised inputs X [n, ...] with a permutation of themselves: lam X + (1 - lam) X[pi].

        The weight lam and the permutation pi come from ``draws``.
        """
        if not values.is_floating_point():
            raise UserError("mixup blends numbers, but these inputs are tokens; use augmentation 'none'")
        lam, order = draws["lam"].to(values.dtype), permutation(draws, len(values))
        return lam * values + (1 - lam) * values[order]


@dataclass(frozen=True)
class RandomResizedCrop(AugmentationStep):
    """Resizes a window of random area and aspect ratio to the size of the image (Szegedy et al. 2015).

    Its area is a share between ``scale`` and 1 of the image, its aspect ratio log-uniform between 1/``ratio`` and
    ``ratio``. As in torchvision, a window that does not fit is redrawn up to ten times, then replaced by the largest
    centred one. It does not flip; add ``crop-flip(padding=0)``.
    """

    scale: float = param(0.08, "smallest area of the window relative to the image", above=0, high=1)
    ratio: float = param(4 / 3, "largest ratio of width to height, and of height to width", low=1)
    attempts: ClassVar[int] = 10
    per_example = 2 * attempts + 2

    def draws(self, per_step: Uniforms, per_example: Uniforms, shape: tuple[int, ...]) -> Draws:
        """Return the top, left, height and width of each window in pixels (``window``).

        A window has a random size and a random corner. Sizes are drawn for all attempts at once; the first that fits
        into the image is used. If none fits, the window is the largest centred one. ``per_example``
        holds the uniform numbers of each example, and ``shape`` is [channels, height, width].
        """
        image_size = np.array(shape[1:])  # height, width
        # The numbers of an example: one area per attempt, one aspect ratio per attempt, two for the corner.
        area_uniforms, aspect_uniforms, corner_uniforms = np.split(
            per_example, [self.attempts, 2 * self.attempts], axis=-1
        )
        area = image_size.prod() * (self.scale + (1 - self.scale) * area_uniforms)
        aspect = np.exp((2 * aspect_uniforms - 1) * np.log(self.ratio))  # width / height, from 1 / ratio to ratio
        attempted_sizes = np.rint(np.sqrt(np.stack([area / aspect, area * aspect], -1)))  # [..., attempts, 2]
        fits = ((attempted_sizes >= 1) & (attempted_sizes <= image_size)).all(-1)
        any_fits = fits.any(-1)[..., None]
        first_fit = fits.argmax(-1)[..., None, None]  # index of the first attempt that fits
        fitting_size = np.take_along_axis(attempted_sizes, first_fit, -2)[..., 0, :]
        # Each side is limited by the image and, through the largest aspect ratio, by the other side.
        largest_size = np.minimum(image_size, np.rint(image_size[::-1] * self.ratio))
        window_size = np.where(any_fits, fitting_size, largest_size).astype(np.int64)
        random_corner = uniform_integers(corner_uniforms, image_size - window_size + 1)
        centred_corner = (image_size - window_size) // 2
        corner = np.where(any_fits, random_corner, centred_corner)
        return {"window": torch.from_numpy(np.concatenate([corner, window_size], -1))}

    def on_pixels(self, pixels: torch.Tensor, draws: Draws) -> torch.Tensor:
        """Resize the drawn windows to the size of the images [n, C, H, W], interpolating bilinearly inside them."""
        top, left, height, width = draws["window"][: len(pixels)].to(torch.float32)[..., None].unbind(1)
        values = pixels if pixels.is_floating_point() else pixels.to(torch.float32)
        coordinates = []
        for start, length, size in ((top, height, pixels.shape[2]), (left, width, pixels.shape[3])):
            # Where the centre of each output pixel lies, in pixels of the window and then of the image.
            in_window = (torch.arange(size, device=pixels.device) + 0.5) * (length / size) - 0.5
            in_image = start + torch.minimum(in_window.clamp(min=0), length - 1)
            coordinates.append(to_grid(in_image, size).to(values.dtype))
        resized = sample_bilinear(values, *coordinates)
        # Many results lie halfway between two integers; the offset rounds them up despite floating-point errors.
        return resized if pixels.is_floating_point() else (resized + 2**-10).round().to(pixels.dtype)


@dataclass(frozen=True)
class ScaleCrop(AugmentationStep):
    """Scales image and mask by a factor uniform from ``low`` to ``high``, then cuts a window of ``height`` x ``width``.

    By default the window has the size of the image. If the scaled image is smaller than the window, it is placed at
    random inside; the rest of the image is set to the mean, and that of the mask to "ignored". Images are interpolated
    bilinearly, masks by nearest neighbour (Caldarola et al. 2022, appendix C.1: 0.5 to 1.5 on Cityscapes).
    """

    low: float = param(0.5, "smallest scale", above=0)
    high: float = param(1.5, "largest scale", above=0)
    height: int | None = param(None, "height of the window in pixels; none means that of the image", low=1)
    width: int | None = param(None, "width of the window in pixels; none means that of the image", low=1)
    moves_masks = True
    needs_masks = True
    per_example = 3

    def __post_init__(self) -> None:
        """Raise a ``UserError`` if the range of scales is empty."""
        if self.low > self.high:
            raise UserError(f"scale-crop has low={self.low:g} above high={self.high:g}; expected low <= high")

    def draws(self, per_step: Uniforms, per_example: Uniforms, shape: tuple[int, ...]) -> Draws:
        """Return the height and width of each scaled image (``scaled``), and the window's corner in it (``origin``).

        The origin is 0 or negative if the scaled image is smaller than the window. ``per_example`` holds three uniform
        numbers for each example, and ``shape`` is [channels, height, width].
        """
        image_size = np.array(shape[1:])
        window_size = np.array([self.height or shape[1], self.width or shape[2]])
        # The numbers of an example: one for the scale, two for the corner.
        scale = self.low + (self.high - self.low) * per_example[..., :1]
        scaled_size = np.maximum(np.rint(scale * image_size), 1).astype(np.int64)
        excess = scaled_size - window_size
        # Uniform from 0 to excess, or from excess to 0 if it is negative.
        origin = np.minimum(excess, 0) + uniform_integers(per_example[..., 1:], np.abs(excess) + 1)
        return {"scaled": torch.from_numpy(scaled_size), "origin": torch.from_numpy(origin)}

    def on_values(self, values: torch.Tensor, draws: Draws) -> torch.Tensor:
        """Scale and cut normalised images [n, C, H, W]; pixels outside the image become 0, the mean."""
        # Interpolate in float32 or float64: positions in bfloat16 would be off by pixels.
        precise = values if values.dtype == torch.float64 else values.float()
        coordinates, inside = [], []  # per axis: source positions, and whether they lie in the scaled image
        for size, scaled_size, positions in self._axes(values.shape[2:], draws, len(values)):
            source = ((positions + 0.5) * (size / scaled_size.to(precise.dtype)) - 0.5).clamp(0, size - 1)
            coordinates.append(to_grid(source, size))
            inside.append((positions >= 0) & (positions < scaled_size))
        windows = sample_bilinear(precise, *coordinates)
        return torch.where(outer_and(*inside)[:, None], windows, 0).to(values.dtype)

    def on_masks(self, masks: torch.Tensor, draws: Draws) -> torch.Tensor:
        """Scale and cut masks [n, H, W] like their images; pixels outside the image are ignored."""
        coordinates, inside = [], []  # per axis: source positions, and whether they lie in the scaled image
        for size, scaled_size, positions in self._axes(masks.shape[1:], draws, len(masks)):
            # The nearest source pixel, in exact integer arithmetic.
            coordinates.append(((2 * positions + 1) * size // (2 * scaled_size)).clamp(0, size - 1))
            inside.append((positions >= 0) & (positions < scaled_size))
        windows = gather_pixels(masks[:, None], *coordinates)[:, 0]
        return torch.where(outer_and(*inside), windows, IGNORED)

    def _axes(self, sizes: torch.Size, draws: Draws, batch: int) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """Yield three values for the rows of images with the given ``sizes``, then for their columns.

        They are their number in the image and in the scaled image [n, 1], and the window's positions in that [n, m].
        """
        for axis, (size, window_size) in enumerate(zip(sizes, (self.height, self.width), strict=True)):
            origin, scaled_size = (draws[name][:batch, axis : axis + 1] for name in ("origin", "scaled"))
            yield size, scaled_size, origin + torch.arange(window_size or size, device=origin.device)


@dataclass(frozen=True)
class Flip(AugmentationStep):
    """Flips the image horizontally with probability 1/2."""

    moves_masks = True
    per_example = 1

    def draws(self, per_step: Uniforms, per_example: Uniforms, shape: tuple[int, ...]) -> Draws:
        """Return whether to flip each example (``flipped``), from one uniform number per example."""
        return {"flipped": torch.from_numpy(per_example[..., 0] < 0.5)}

    def on_values(self, values: torch.Tensor, draws: Draws) -> torch.Tensor:
        return torch.where(draws["flipped"][: len(values), None, None, None], values.flip(-1), values)

    def on_masks(self, masks: torch.Tensor, draws: Draws) -> torch.Tensor:
        return torch.where(draws["flipped"][: len(masks), None, None], masks.flip(-1), masks)


AUGMENTATIONS: Registry[type[AugmentationStep]] = Registry("augmentation", see="fedflat data list")
"""Augmentation steps by name, in the order in which they are applied.

The position of a step is also the number of its random stream, so append new steps at the end.
"""
AUGMENTATIONS.register("crop-flip", CropFlip)
AUGMENTATIONS.register("cutout", Cutout)
AUGMENTATIONS.register("mixup", Mixup)
AUGMENTATIONS.register("random-resized-crop", RandomResizedCrop)
AUGMENTATIONS.register("scale-crop", ScaleCrop)
AUGMENTATIONS.register("flip", Flip)


def uniform_integers(uniforms: Uniforms, count: int | npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Convert uniforms on [0, 1) to integers uniform on 0, ..., ``count`` - 1; ``count`` may be one per entry."""
    return np.minimum((uniforms * count).astype(np.int64), count - 1)


def outer_and(rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Combine flags of rows [n, h] and columns [n, w] to flags of pixels [n, h, w]."""
    return rows[:, :, None] & columns[:, None, :]


def gather_pixels(images: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Return the pixels of images [n, C, H, W] at rows [n, h] and columns [n, w], as [n, C, h, w]."""
    batch, channels, _, width = images.shape
    flat_positions = (rows[:, :, None] * width + columns[:, None, :]).flatten(1)
    pixels = images.flatten(2).gather(2, flat_positions[:, None].expand(-1, channels, -1))
    return pixels.view(batch, channels, rows.shape[1], columns.shape[1])


def to_grid(positions: torch.Tensor, size: int) -> torch.Tensor:
    """Convert pixel positions 0, ..., ``size`` - 1 to the coordinates from -1 to 1 of ``F.grid_sample``."""
    return (2 * positions + 1) / size - 1


def sample_bilinear(images: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Interpolate images [n, C, H, W] at rows [n, h] and columns [n, w], and return the values [n, C, h, w].

    Rows and columns are coordinates from -1 to 1, as ``to_grid`` computes them.
    """
    shape = (len(images), rows.shape[1], columns.shape[1])
    grid = torch.stack([columns[:, None, :].expand(shape), rows[:, :, None].expand(shape)], -1)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="border", align_corners=False)


def permutation(draws: Draws, size: int | None = None) -> torch.Tensor:
    """Return mixup's permutation of ``size`` examples (None: a full batch); padding has infinite keys and is last."""
    return draws["order"][:size].argsort()
