"""Datasets of image files: listed, decoded once to one size into the cache, then read through a memory map."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from fedflat.data.batches import statistics_of_sums
from fedflat.data.dataset import Dataset, Examples, every_fifth
from fedflat.data.files.cache import DiskSpace, cache_entry, fingerprint, open_cached, select_rows
from fedflat.data.files.mapped import ArrayWriter
from fedflat.data.files.tree import Tree
from fedflat.errors import UserError
from fedflat.processes import usable_cores
from fedflat.text import param

if TYPE_CHECKING:
    from PIL.Image import Image as PillowImage

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
BATCH = 64
"""Number of images decoded before they are written."""

Pixels = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class ImageOptions:
    """How images are resized."""

    size: int = param(64, "height and width in pixels to which images are resized", low=1)
    fit: Literal["squash", "crop"] = param(
        "squash", "how images become square: resize the whole image (squash), or use its largest centred square (crop)"
    )


@dataclass
class ImageList:
    """The image files of a dataset, in parallel lists.

    Attributes:
        tree: the folder or archive with the files.
        classes: class names.
        group_names: names of the natural clients; empty if there are none.
        files: file name of each image in the tree.
        targets: class of each image (classification).
        masks: file name of each image's mask (segmentation).
        groups: natural client of each image.
        is_test: whether the image is a test example.
    """

    tree: Tree
    classes: Sequence[str]
    group_names: Sequence[str] = ()
    files: list[str] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)
    masks: list[str] = field(default_factory=list)
    groups: list[int] = field(default_factory=list)
    is_test: list[bool] = field(default_factory=list)

    def add(self, files: Sequence[str], target: int, group: int = 0, test: bool | None = None) -> None:
        """Add images of one class and one natural client.

        Args:
            files: their names in the tree.
            target: their class.
            group: their natural client.
            test: whether they are test examples; None: only every fifth of them is.
        """
        targets = [target] * len(files)
        self.files += files
        self.targets += targets
        self.groups += [group] * len(files)
        self.is_test += every_fifth(np.array(targets)).tolist() if test is None else [test] * len(files)

    def add_masked(self, file: str, mask: str, group: int = 0, test: bool = False) -> None:
        """Add an image for segmentation.

        Args:
            file: name of the image in the tree.
            mask: name of its mask in the tree.
            group: its natural client.
            test: whether it is a test example.
        """
        self.files.append(file)
        self.masks.append(mask)
        self.groups.append(group)
        self.is_test.append(test)

    def with_versions(self, files: Sequence[str]) -> list[str]:
        """Return each file name followed by the file's version, which changes with its content, for a fingerprint."""
        return [f"{file} {self.tree.files[file]}" for file in files]

    def examples(
        self, rows: npt.NDArray[np.int64], inputs: torch.Tensor, masks: torch.Tensor | None = None
    ) -> Examples:
        """Return the examples at positions ``rows``.

        Args:
            rows: positions [n] in this list.
            inputs: the decoded images at these positions, [n, 3, height, width].
            masks: the decoded masks [n, height, width], for segmentation.
        """
        targets = torch.from_numpy(np.array(self.targets, dtype=np.int64)[rows]) if masks is None else masks
        groups = torch.from_numpy(np.array(self.groups, dtype=np.int64)[rows]) if self.group_names else None
        return Examples(inputs, targets, groups)


def is_image(name: str) -> bool:
    """Whether a file name has the suffix of an image."""
    return name.lower().endswith(SUFFIXES)


def image_dataset(name: str, data_dir: Path, images: ImageList, options: ImageOptions) -> Dataset:
    """Build a classification dataset from image files.

    Args:
        name: canonical text of the dataset.
        data_dir: directory whose cache holds the decoded images.
        images: the files, with their classes and natural clients.
        options: how images are resized.

    Returns:
        A dataset with inputs [n, 3, size, size] uint8 and targets [n] int64.
    """

    if not any(images.is_test):
        raise UserError(f"{name} has too few images to test on every fifth of a class; add images or a test set")

    def decode(file: str) -> dict[str, npt.NDArray[Any]]:
        image = decode_image(images.tree, file, options)
        return {"inputs": image, "sums": channel_sums(image)}

    size = options.size
    prefix = f"{name.partition('(')[0]}-{size}"  # the name without its parameters
    # A changed file or option gives another key, so the images are decoded again.
    content_key = fingerprint((size, options.fit, *images.with_versions(images.files)))
    # Per image: its pixels, and the sum and sum of squares of each channel for the dataset's mean and std.
    shapes = {"inputs": (3, size, size), "sums": (2, 3)}
    write = partial(write_decoded, decode, images.files, shapes)
    space = DiskSpace(len(images.files) * 3 * size**2, name, "choose a smaller size")
    entry = cache_entry(data_dir, prefix, content_key, write, space)
    return decoded_dataset(name, data_dir, entry, prefix, images)


def write_decoded(
    decode: Callable[[Any], Mapping[str, npt.NDArray[Any]]],
    items: Sequence[Any],
    shapes: Mapping[str, tuple[int, ...]],
    folder: Path,
) -> None:
    """Decode ``items`` in parallel and write the arrays of each as one row of ``<name>.npy`` in ``folder``.

    Args:
        decode: maps an item to arrays by name; an array named ``sums`` is int64, all others are uint8.
        items: what to decode, one per row.
        shapes: shape of a row of each array.
        folder: where to write.
    """
    with ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(usable_cores()))
        writers = {}
        for name, shape in shapes.items():
            dtype = np.int64 if name == "sums" else np.uint8
            writers[name] = stack.enter_context(ArrayWriter(folder / f"{name}.npy", shape, dtype))
        for start in range(0, len(items), BATCH):
            rows = list(pool.map(decode, items[start : start + BATCH]))
            for name, writer in writers.items():
                writer.append(np.stack([row[name] for row in rows]))


def decoded_dataset(name: str, data_dir: Path, entry: Path, prefix: str, images: ImageList) -> Dataset:
    """Build the dataset of a cache entry written by ``write_decoded``, with the statistics of the training images.

    Args:
        name: canonical text of the dataset.
        data_dir: data directory; its cache keeps the rows of each split, if they have to be copied.
        entry: folder of the cache entry.
        prefix: start of the names of the cached rows.
        images: the decoded files, with their classes or masks and natural clients.
    """
    inputs = open_cached(entry, "inputs")
    sums = open_cached(entry, "sums").numpy()  # per image and channel: sum of the pixels and of their squares
    is_test = np.array(images.is_test, dtype=bool)
    splits = []
    train_rows, test_rows = np.flatnonzero(~is_test), np.flatnonzero(is_test)
    for rows in (train_rows, test_rows):
        selected = select_rows(inputs, rows, data_dir, f"{prefix}-rows")
        masks = None
        if images.masks:
            masks = select_rows(open_cached(entry, "masks"), rows, data_dir, f"{prefix}-mask-rows")
        splits.append(images.examples(rows, selected, masks))
    train_pixels = int(np.prod(inputs.shape[2:])) * len(train_rows)
    mean, std = statistics_of_sums(sums[train_rows].sum(0), train_pixels)
    kind: Literal["segmentation", "image"] = "segmentation" if images.masks else "image"
    return Dataset(name, splits[0], splits[1], tuple(images.classes), mean, std, kind, tuple(images.group_names))


def channel_sums(image: Pixels) -> npt.NDArray[np.int64]:
    """Return the sum and sum of squares of each channel of an image [channels, height, width], as [2, channels]."""
    values = image.reshape(len(image), -1).astype(np.int64)
    return np.stack([values.sum(1), np.square(values).sum(1)])


@contextmanager
def open_image(tree: Tree, name: str) -> Iterator[PillowImage]:
    """Open the image file ``name`` of a tree; any error in the ``with`` statement is reported as a damaged image."""
    from PIL import Image

    try:
        with tree.open(name) as stream, Image.open(stream) as image:
            yield image
    except Exception as error:  # a damaged image can fail with any exception
        raise UserError(f"{tree.path}/{name} is not a complete image ({error}); replace or remove it") from error


def decode_image(tree: Tree, name: str, options: ImageOptions) -> Pixels:
    """Decode the image file ``name`` of a tree to pixels [3, size, size] uint8, resized according to ``options``."""
    with open_image(tree, name) as image:
        return to_pixels(image, options)


def to_pixels(image: Any, options: ImageOptions, mode: Literal["RGB", "L"] = "RGB") -> Pixels:
    """Resize a Pillow image to [channels, size, size] uint8, with size and fit from ``options``; ``L`` is greyscale."""
    from PIL import Image

    side = options.size
    image.draft(mode, (2 * side, 2 * side))  # JPEG decodes many times faster at a fraction of its size
    image = as_8_bit(image).convert(mode)
    width, height = image.size
    if (width, height) != (side, side):
        square = min(width, height)
        left, top = (width - square) / 2, (height - square) / 2
        box = (left, top, left + square, top + square) if options.fit == "crop" else None  # None: the whole image
        image = image.resize((side, side), Image.Resampling.BILINEAR, box)
    return channels_first(image)


def as_8_bit(image: Any) -> Any:
    """Convert a Pillow image to one byte per channel: resolve palettes, keep the upper byte of 16-bit values."""
    from PIL import Image

    has_16_bits = image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PNG")
    if has_16_bits:  # Pillow itself clips all but the 256 darkest of 65,536 shades to white
        return Image.fromarray((np.asarray(image).astype(np.int64) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise UserError("it has 32-bit pixels without a defined white level; save it with 8 or 16 bits")
    if image.mode in ("1", "P"):  # black and white, palette
        return image.convert("L" if image.mode == "1" else "RGB")
    return image


def channels_first(image: Any) -> Pixels:
    """Return the pixels of a Pillow image as [channels, height, width]."""
    pixels = np.asarray(image)
    return np.ascontiguousarray(pixels.transpose(2, 0, 1) if pixels.ndim == 3 else pixels[None])
