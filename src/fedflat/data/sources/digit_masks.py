"""The scikit-learn digits as a segmentation task: each pixel is background or part of one of ten digits.

Five artificial weather conditions serve as domains. The dataset needs no download and is meant for quick experiments;
results say nothing about street scenes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from fedflat.data.batches import channel_statistics
from fedflat.data.dataset import Dataset, Examples
from fedflat.data.sources.digits import DIGITS
from fedflat.data.sources.source import DatasetCard, DatasetSource
from fedflat.errors import one_of
from fedflat.text import param

UPSCALING = 4
"""8x8 pixels become 32x32, the smallest size that BiSeNetV2 accepts."""
STROKE = 0.5
"""Grey level above which a pixel belongs to the digit."""


def _noise(images: Tensor) -> Tensor:
    return torch.rand(images.shape, generator=torch.Generator().manual_seed(0))


WEATHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "clear": lambda images: images,
    "dusk": lambda images: 0.5 * images,
    "fog": lambda images: 0.5 + 0.3 * images,
    "snow": lambda images: 0.7 * images + 0.3 * _noise(images),
    "night": lambda images: 1 - images,
}
"""Effect of each weather on grey levels from 0 to 1."""


@dataclass(frozen=True)
class WeatherOptions:
    """Which domain is unseen in training."""

    unseen: str | None = param(None, f"weather used only for testing: {', '.join(WEATHERS)} or none")


@dataclass(frozen=True)
class DigitMasks(DatasetSource):
    """There are 1,797 greyscale images of 32x32 pixels with masks; images cycle through five weather conditions."""

    options: WeatherOptions = field(default=WeatherOptions(), kw_only=True)

    def read(self, data_dir: Path) -> Dataset:
        """Derive images and masks from the dataset ``digits``, and drop training examples of the unseen weather."""
        if self.options.unseen not in (None, *WEATHERS):
            raise one_of("weather", self.options.unseen, (*WEATHERS, "none"), owner=self.name)
        digits = DIGITS.read(data_dir)
        train, test = _add_weather_and_masks(digits.train), _add_weather_and_masks(digits.test)
        if self.options.unseen is not None:
            assert train.groups is not None
            is_seen = train.groups != list(WEATHERS).index(self.options.unseen)
            train = train.take(torch.nonzero(is_seen).flatten())
        mean, std = channel_statistics(train.inputs)
        classes = ("background", *digits.classes)
        return Dataset(self.text, train, test, classes, mean, std, kind="segmentation", group_names=tuple(WEATHERS))


def _add_weather_and_masks(examples: Examples) -> Examples:
    """Enlarge the digits, derive a mask from the strokes of each, and simulate a weather condition in each.

    Mask pixels are 0 for the background and the digit plus 1 on its strokes; the weather is the natural client.
    """
    grey = F.interpolate(examples.inputs.float() / 255, scale_factor=UPSCALING, mode="bilinear")
    groups = torch.arange(len(examples)) % len(WEATHERS)
    masks = torch.where(grey[:, 0] > STROKE, (examples.targets + 1)[:, None, None], 0).to(torch.uint8)
    for number, apply_weather in enumerate(WEATHERS.values()):
        grey[groups == number] = apply_weather(grey[groups == number])
    return Examples((255 * grey).round().clamp(0, 255).to(torch.uint8), masks, groups)


DIGIT_MASKS = DigitMasks(
    "digit_masks",
    "semantic segmentation of scikit-learn's digits under five simulated weather conditions; 11 classes",
    card=DatasetCard(
        examples="1,442 / 355",
        shape="1x32x32, masks",
        classes="11",
        clients="5 weather conditions; one may be unseen in training",
        citation="derived from `digits`",
        licence="that of `digits`",
        model="'bisenetv2(width=0.25,auxiliary=false)'",
    ),
)
SOURCES = (DIGIT_MASKS,)
