"""The embedded digits as a segmentation: each pixel is background or a stroke of one of ten digits; five weathers are the domains.

A dense task that needs no file, to try things out on: what is learnt on it says nothing about street scenes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from fedflat.data.arrays import channel_statistics
from fedflat.data.dataset import Dataset, Examples
from fedflat.data.sources.digits import DIGITS
from fedflat.data.sources.source import Source
from fedflat.errors import one_of
from fedflat.text import param

ENLARGED = 4
"""By how much: 8x8 pixels become 32x32, the least that BiSeNetV2 takes."""
STROKE = 0.5
"""The ink from which on a pixel belongs to the digit."""


def _noise(images: Tensor) -> Tensor:
    return torch.rand(images.shape, generator=torch.Generator().manual_seed(0))


WEATHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "clear": lambda images: images,
    "dusk": lambda images: 0.5 * images,
    "fog": lambda images: 0.5 + 0.3 * images,
    "snow": lambda images: 0.7 * images + 0.3 * _noise(images),
    "night": lambda images: 1 - images,
}
"""What a weather does to grey values from 0 to 1."""


@dataclass(frozen=True)
class WeatherOptions:
    """Which domain is unseen."""

    unseen: str | None = param(None, "the weather that is for testing alone: " + ", ".join(WEATHERS) + " or none")


@dataclass(frozen=True)
class DigitMasks(Source):
    """1,797 grey images of 32x32 pixels with their masks, one after another in each of the weathers."""

    options: WeatherOptions = field(default=WeatherOptions(), kw_only=True)

    def read(self, folder: Path) -> Dataset:
        """The digits, enlarged, with masks; of an unseen weather there are no training examples."""
        if self.options.unseen not in (None, *WEATHERS):
            raise one_of("weather of digit_masks", self.options.unseen, (*WEATHERS, "none"))
        digits = DIGITS.read(folder)
        train, test = _dense(digits.train), _dense(digits.test)
        if self.options.unseen is not None:
            assert train.groups is not None
            train = train.take(torch.nonzero(train.groups != list(WEATHERS).index(self.options.unseen)).flatten())
        mean, std = channel_statistics(train.inputs)
        classes = ("background", *digits.classes)
        return Dataset(self.text, train, test, classes, mean, std, kind="segmentation", group_names=tuple(WEATHERS))


def _dense(examples: Examples) -> Examples:
    grey = F.interpolate(examples.inputs.float() / 255, scale_factor=ENLARGED, mode="bilinear")
    groups = torch.arange(len(examples)) % len(WEATHERS)
    masks = torch.where(grey[:, 0] > STROKE, (examples.targets + 1)[:, None, None], 0).to(torch.uint8)
    for number, change in enumerate(WEATHERS.values()):
        grey[groups == number] = change(grey[groups == number])
    return Examples((255 * grey).round().clamp(0, 255).to(torch.uint8), masks, groups)


DIGIT_MASKS = DigitMasks("digit_masks", "the digits of scikit-learn in five weathers, each pixel of one of 11 classes")
