"""Figure of a dataset: its examples per class, and one image of each class."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from matplotlib.figure import Figure

from fedflat.reporting.figures.style import COLOURS, open_frame

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from fedflat.data import Dataset

MOST_IMAGES = 10
"""Maximum number of classes with an image."""
MOST_LABELS = 30
"""Maximum number of classes with a name on the axis; more would overlap."""


def dataset_picture(dataset: Dataset) -> Figure:
    """Draw the distribution of targets in the training and the test set and, for images, one example per class."""
    images = _first_images(dataset)
    rows = 2 if images else 1
    figure = Figure(figsize=(8.0, 2.9 + 1.1 * (rows - 1)), layout="constrained")
    grid = figure.add_gridspec(rows, max(1, len(images)), height_ratios=[1, 2.6] if images else [1])
    for column, (name, pixels) in enumerate(images.items()):
        axes = figure.add_subplot(grid[0, column])
        axes.imshow(pixels, cmap="gray_r" if pixels.ndim == 2 else None)
        axes.set_title(name, fontsize=8)
        axes.set_axis_off()
    axes = figure.add_subplot(grid[-1, :])
    _draw_targets(axes, dataset)
    open_frame(axes)
    axes.legend(frameon=False, fontsize=9)
    figure.suptitle(dataset.name, fontsize=11, fontweight="bold", x=0.01, ha="left")
    return figure


def _first_images(dataset: Dataset) -> dict[str, np.ndarray]:
    """Return the first training image [H, W] or [H, W, 3] of each of the first classes; empty for other data."""
    inputs, targets = dataset.train.inputs, dataset.train.targets
    if inputs.ndim != 4 or inputs.shape[1] not in (1, 3) or targets.ndim != 1:  # not grey or RGB images with a class
        return {}
    images = {}
    for number, name in enumerate(dataset.classes[:MOST_IMAGES]):
        positions = torch.nonzero(targets == number)
        if len(positions):
            pixels = inputs[int(positions[0, 0])].float()
            scaled = (pixels - pixels.min()) / (pixels.max() - pixels.min()).clamp_min(1e-9)
            images[name] = scaled.permute(1, 2, 0).squeeze(-1).numpy()
    return images


def _draw_targets(axes: Axes, dataset: Dataset) -> None:
    """Draw bars of the examples per class (for segmentation: pixels), or a histogram of numeric targets."""
    sets = {"training": dataset.train.targets, "test": dataset.test.targets}
    if dataset.train.targets.is_floating_point():
        bins = np.histogram_bin_edges(torch.cat([*sets.values()]).numpy(), bins=40).tolist()
        for number, (name, targets) in enumerate(sets.items()):
            axes.hist(targets.flatten().numpy(), bins, color=COLOURS[number], alpha=0.7, label=name)
        axes.set_xlabel("target")
        axes.set_ylabel("examples")
        return
    positions = np.arange(dataset.num_classes)
    for number, (name, targets) in enumerate(sets.items()):
        counts = _class_counts(targets, dataset.num_classes).numpy()
        axes.bar(positions + 0.4 * number - 0.2, counts, 0.4, color=COLOURS[number], label=name)
    if dataset.num_classes <= MOST_LABELS:
        is_long = max(map(len, dataset.classes)) * dataset.num_classes > 100
        axes.set_xticks(positions, list(dataset.classes), fontsize=8, rotation=60 if is_long else 0)
    axes.set_xlabel("class")
    axes.set_ylabel("pixels" if dataset.kind == "segmentation" else "examples")


def _class_counts(targets: torch.Tensor, classes: int) -> torch.Tensor:
    """Return how often each class occurs, [classes].

    Targets are class numbers of any shape or, with several labels per example, bool [n, classes].
    """
    if targets.dtype == torch.bool:
        return targets.sum(0)
    # Ignored pixels have a number above all classes, which the slice drops; ignored tokens have a negative one.
    return torch.bincount(targets[targets >= 0], minlength=classes)[:classes]
