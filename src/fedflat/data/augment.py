"""Augmentation of whole batches, drawn apart from being applied.

All random numbers of a client's round are drawn beforehand on the host (``draw``) and then used step by step on whatever device the
batch is (``inputs``). So a step has no randomness of its own: every engine sees the same pictures, a step can be captured in a graph
or lifted by ``torch.func.vmap``, and the two passes of SAM share one draw.

Each part has its own stream and takes its numbers step by step: crops stay the same when mixup is added, and the first steps
stay the same when there are more of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F

from fedflat.data.dataset import IGNORED, Dataset
from fedflat.data.parts import Draws, Part, Uniforms, taken, whole
from fedflat.data.scale_crop import Flip, ScaleCrop
from fedflat.errors import UserError, one_of
from fedflat.text import changed, make, param, parse, show

Statistics = torch.Tensor | Sequence[float]


@dataclass(frozen=True)
class CropFlip(Part):
    """A random window of the padded image, mirrored every other time.

    Style ``pixel`` pads with black before normalisation and always moves the window (FedSWA; Caldarola et al.); style ``mean`` pads
    with the mean and moves it every other time (FL-Simulator, FedWMSAM).
    """

    padding: int = param(4, "by how many pixels the image is padded on each side", low=0)
    style: Literal["pixel", "mean"] = param(
        "pixel", "pad with black and always crop, or with the mean and crop every other time"
    )
    moves_masks = True
    per_example = 4

    def draws(self, per_step: Uniforms, per_example: Uniforms, shape: tuple[int, ...]) -> Draws:
        """Upper left corner of the window in the padded image, and whether it is mirrored."""
        row, column, mirrored, moved = np.moveaxis(per_example, -1, 0)
        corner = whole(np.stack([row, column], -1), 2 * self.padding + 1)
        if self.style == "mean":
            corner = np.where(moved[..., None] < 0.5, corner, self.padding)
        return {"corner": torch.from_numpy(corner), "mirrored": torch.from_numpy(mirrored < 0.5)}

    def on_pixels(self, pixels: torch.Tensor, draws: Draws) -> torch.Tensor:
        """The window, where padding is black."""
        return self._window(pixels, draws) if self.style == "pixel" else pixels

    def on_values(self, values: torch.Tensor, draws: Draws) -> torch.Tensor:
        """The window, where padding is the mean."""
        return self._window(values, draws) if self.style == "mean" else values

    def on_masks(self, masks: torch.Tensor, draws: Draws) -> torch.Tensor:
        """The window, where padding is ignored."""
        return self._window(masks[:, None], draws, IGNORED)[:, 0]

    def _window(self, images: torch.Tensor, draws: Draws, around: int = 0) -> torch.Tensor:
        size, _, height, width = images.shape
        corner, mirrored = draws["corner"][:size], draws["mirrored"][:size]
        down, across = (torch.arange(n, device=images.device) for n in (height, width))
        rows = corner[:, :1] + down
        columns = corner[:, 1:] + torch.where(mirrored[:, None], width - 1 - across, across)
        return taken(F.pad(images, [self.padding] * 4, value=around), rows, columns)


@dataclass(frozen=True)
class Cutout(Part):
    """A square around a random pixel is set to the mean, as far as it lies in the image (DeVries and Taylor 2017)."""

    size: int = param(16, "side of the square in pixels", low=0)
    per_example = 2

    def draws(self, per_step: Uniforms, per_example: Uniforms, shape: tuple[int, ...]) -> Draws:
        """The centre of the square."""
        return {"centre": torch.from_numpy(np.stack([whole(per_example[..., i], shape[1 + i]) for i in (0, 1)], -1))}

    def on_values(self, values: torch.Tensor, draws: Draws) -> torch.Tensor:
        """The batch with the squares cut out."""
        size, _, height, width = values.shape
        first = draws["centre"][:size] - self.size // 2
        down, across = (torch.arange(n, device=values.device) for n in (height, width))
        rows = (down >= first[:, :1]) & (down < first[:, :1] + self.size)
        columns = (across >= first[:, 1:]) & (across < first[:, 1:] + self.size)
        return torch.where((rows[:, :, None] & columns[:, None, :])[:, None], 0, values)


@dataclass(frozen=True)
class Mixup(Part):
    """Every example is blended with another of its batch: lam X + (1 - lam) X[pi], lam ~ Beta(alpha, alpha) (Zhang et al. 2018)."""

    alpha: float = param(1.0, "parameter of the beta distribution of lam", above=0)
    needs_images = False
    per_step = 1
    per_example = 1

    def draws(self, per_step: Uniforms, per_example: Uniforms, shape: tuple[int, ...]) -> Draws:
        """lam, and numbers whose order is the permutation, so that the first of them are a permutation of a shorter batch."""
        lam = per_step[:, 0]
        if self.alpha != 1:
            from scipy.special import betaincinv

            lam = betaincinv(self.alpha, self.alpha, lam)
        return {"lam": torch.from_numpy(lam).float(), "order": torch.from_numpy(per_example[..., 0]).float()}

    def on_values(self, values: torch.Tensor, draws: Draws) -> torch.Tensor:
        """The blended batch."""
        if not values.is_floating_point():
            raise UserError("mixup blends numbers, but these inputs are tokens; use 'none'")
        lam, order = draws["lam"].to(values.dtype), permutation(draws, len(values))
        return lam * values + (1 - lam) * values[order]


@dataclass(frozen=True)
class RandomResizedCrop(Part):
    """A window of random area and shape, stretched to the size of the image (Szegedy et al. 2015).

    Its area is a share ``scale`` to 1 of the image's, its width over height between 1/``ratio`` and ``ratio``, evenly in the logarithm. As
    in torchvision, a window that does not fit is drawn again up to ten times and then replaced by the largest one in the middle. Mirror
    images are ``crop-flip(padding=0)``.
    """

    scale: float = param(0.08, "the smallest area of the window, as a share of the image's", above=0, high=1)
    ratio: float = param(4 / 3, "the largest ratio of width to height, and of height to width", low=1)
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
        corner = np.where(any_fits, whole(per_example[..., -2:], size - window + 1), (size - window) // 2)
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
        down, across = places
        shape = (len(pixels), *pixels.shape[2:])
        grid = torch.stack([across[:, None, :].expand(shape), down[:, :, None].expand(shape)], -1)
        values = pixels if pixels.is_floating_point() else pixels.to(torch.float32)
        cut = F.grid_sample(values, grid.to(values.dtype), mode="bilinear", padding_mode="border", align_corners=False)
        # Halves are frequent: they are lifted a little, so that it is not rounding errors that decide which way they go.
        return cut if pixels.is_floating_point() else (cut + 2**-10).round().to(pixels.dtype)


# In the order in which they are applied, first all on pixels and then all on values; the place of a part is also the number of its
# stream, so that new ones go to the end.
AUGMENTATIONS: dict[str, type[Part]] = {
    "crop-flip": CropFlip,
    "cutout": Cutout,
    "mixup": Mixup,
    "random-resized-crop": RandomResizedCrop,
    "scale-crop": ScaleCrop,
    "flip": Flip,
}
"""The parts of augmentations, by name."""


@dataclass(frozen=True)
class Augmentation:
    """The parts of an augmentation, in the order of the table."""

    parts: tuple[Part, ...] = ()

    @property
    def text(self) -> str:
        """The shortest text that names it."""
        names = {kind: name for name, kind in AUGMENTATIONS.items()}
        return "+".join(show(names[type(part)], changed(part)) for part in self.parts) or "none"

    def check(self, dataset: Dataset) -> None:
        """Refuse what has no meaning for a dataset."""
        names = {kind: name for name, kind in AUGMENTATIONS.items()}
        for part in self.parts:
            name = names[type(part)]
            if dataset.kind == "segmentation" and not part.moves_masks:
                able = ", ".join(known for known, kind in AUGMENTATIONS.items() if kind.moves_masks)
                raise UserError(
                    f"{name} does not move masks along with their images, and {dataset.name} has masks; use {able} or 'none'"
                )
            if part.needs_masks and dataset.kind == "image":
                raise UserError(
                    f"{name} is for segmentations, and {dataset.name} has a class for each image; use random-resized-crop"
                )
            if dataset.kind == "text" or (part.needs_images and dataset.kind == "vector"):
                raise UserError(
                    f"{dataset.name} holds {dataset.kind} inputs, so that '{self.text}' cannot be applied; use 'none'"
                )
            if isinstance(part, ScaleCrop) and part.low > part.high:
                raise UserError(
                    f"scale-crop has low={part.low:g} above high={part.high:g}; expected the smaller scale first"
                )

    def draw(self, rng: np.random.Generator, steps: int, batch: int, shape: tuple[int, ...]) -> Draws:
        """All random numbers of a client's round, with leading dimension [steps]; ``shape`` is that of one example."""
        draws: Draws = {}
        if not self.parts:
            return draws
        for kind, stream in zip(AUGMENTATIONS.values(), rng.spawn(len(AUGMENTATIONS)), strict=True):
            for part in self.parts:
                if type(part) is not kind:
                    continue
                if part.needs_images and len(shape) != 3:
                    raise UserError(f"'{self.text}' needs images, but these inputs have shape {shape}; use 'none'")
                uniforms = stream.random((steps, part.per_step + batch * part.per_example))
                of_examples = uniforms[:, part.per_step :].reshape(steps, batch, part.per_example)
                draws |= part.draws(uniforms[:, : part.per_step], of_examples, shape)
        return draws

    def inputs(
        self, raw: torch.Tensor, draws: Draws, mean: Statistics, std: Statistics, dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        """A batch augmented and normalised, by the draws of one step; a batch may be shorter than was drawn for."""
        for part in self.parts:
            raw = part.on_pixels(raw, draws)
        values = normalise(raw, mean, std, dtype)
        for part in self.parts:
            values = part.on_values(values, draws)
        return values

    def targets(self, raw: torch.Tensor, draws: Draws) -> torch.Tensor:
        """The targets of an augmented batch: masks move with their images, and everything else stays."""
        if raw.ndim == 3:
            for part in self.parts:
                raw = part.on_masks(raw, draws)
        return raw

    def mix(self, draws: Draws, size: int | None = None) -> tuple[torch.Tensor, torch.Tensor] | None:
        """lam and the permutation pi of a batch of ``size``: the loss is lam CE(f, Y) + (1 - lam) CE(f, Y[pi]); None without mixup."""
        return (draws["lam"], permutation(draws, size)) if "lam" in draws else None


def augmentation(text: str) -> Augmentation:
    """The augmentation of a text such as ``crop-flip(padding=4)+mixup``, or ``none``.

    >>> augmentation("mixup+crop-flip(padding=4)").text
    'crop-flip+mixup'
    """
    calls = parse(text)
    names = [call.name for call in calls]
    for name in names:
        if name not in AUGMENTATIONS and name != "none":
            raise one_of("augmentation", name, (*AUGMENTATIONS, "none"))
        if names.count(name) > 1 or (name == "none" and len(names) > 1):
            raise UserError(f"'{text}' is not possible; expected different augmentations joined by +, or 'none' alone")
    order = list(AUGMENTATIONS)
    parts = sorted((call for call in calls if call.name != "none"), key=lambda call: order.index(call.name))
    return Augmentation(tuple(make(AUGMENTATIONS[call.name], call, "augmentation") for call in parts))


def normalise(raw: torch.Tensor, mean: Statistics, std: Statistics, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """uint8 images as (x / 255 - mean) / std per channel; floats only change their type, and tokens not even that."""
    if raw.is_floating_point():
        return raw.to(dtype)
    if raw.dtype != torch.uint8:
        return raw
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    shift, scale = (_per_channel(torch.as_tensor(values, dtype=exact, device=raw.device)) for values in (mean, std))
    return raw.to(exact).div_(255).sub_(shift).div_(scale).to(dtype)


def _per_channel(values: torch.Tensor) -> torch.Tensor:
    """A value per channel so that it meets images; where there is one per pixel, it does already."""
    return values if values.ndim == 3 else values.reshape(-1, 1, 1)


def permutation(draws: Draws, size: int | None = None) -> torch.Tensor:
    """The permutation of a batch; examples that only fill a batch up go last when their ``order`` is set to infinity."""
    return draws["order"][:size].argsort()
