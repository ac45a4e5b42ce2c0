"""Datasets of pictures in files: listed, decoded once to one size, and from then on read through a memory map."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from fedflat.cores import usable_cores
from fedflat.data.arrays import statistics_of_sums
from fedflat.data.cache import Room, entry, fingerprint, open_kept, rows_of
from fedflat.data.dataset import Dataset, Examples
from fedflat.data.mapped import ArrayWriter
from fedflat.data.tree import Tree
from fedflat.errors import UserError
from fedflat.text import param

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
TEST_EVERY = 5
"""Where nothing says what to test on, every fifth picture of a class is."""
AT_ONCE = 256

Pixels = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class PictureOptions:
    """How pictures are brought to one size."""

    size: int = param(64, "height and width in pixels to which pictures are brought", low=1)
    fit: Literal["squash", "crop"] = param(
        "squash", "squash the whole picture into the square, or cut the largest square from its middle"
    )


@dataclass
class Listing:
    """Which pictures a dataset is made of: the file of each, its class, where it comes from, and whether it is for testing."""

    names: list[str] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)
    groups: list[int] = field(default_factory=list)
    is_test: list[bool] = field(default_factory=list)

    def add(self, names: Sequence[str], target: int, group: int = 0, test: bool | None = None) -> None:
        """Some pictures of one class; where nothing says whether they are for testing, every fifth is."""
        self.names += names
        self.targets += [target] * len(names)
        self.groups += [group] * len(names)
        self.is_test += [place % TEST_EVERY == TEST_EVERY - 1 if test is None else test for place in range(len(names))]


def is_picture(name: str) -> bool:
    """Whether a file is a picture, by its name."""
    return name.lower().endswith(SUFFIXES)


def picture_dataset(
    name: str,
    folder: Path,
    tree: Tree,
    listing: Listing,
    classes: Sequence[str],
    options: PictureOptions,
    group_names: Sequence[str] = (),
) -> Dataset:
    """The dataset of a listing: decoded into the cache below ``folder`` unless that was done before."""
    stamps = [f"{file} {tree.stamps[file]}" for file in listing.names]
    short = name.partition("(")[0]
    kept = entry(
        folder,
        f"{short}-{options.size}",
        fingerprint((options.size, options.fit, *stamps)),
        partial(_decode_all, tree, listing.names, options),
        Room(len(listing.names) * 3 * options.size**2, name, "take a smaller size"),
    )
    inputs, sums = open_kept(kept, "inputs"), open_kept(kept, "sums").numpy()
    is_test = np.array(listing.is_test, dtype=bool)
    parts = []
    for rows in (np.flatnonzero(~is_test), np.flatnonzero(is_test)):
        images = rows_of(inputs, rows, folder, f"{short}-{options.size}-rows")
        parts.append(labelled(listing, rows, images, bool(group_names)))
    mean, std = statistics_of_sums(sums[~is_test].sum(0), options.size**2 * int((~is_test).sum()))
    return Dataset(name, parts[0], parts[1], tuple(classes), mean, std, group_names=tuple(group_names))


def labelled(listing: Listing, rows: npt.NDArray[np.int64], images: torch.Tensor, grouped: bool) -> Examples:
    """Some pictures of a listing, with their classes and, where they have any, their groups."""
    targets, groups = (
        torch.from_numpy(np.array(values, dtype=np.int64)[rows]) for values in (listing.targets, listing.groups)
    )
    return Examples(images, targets, groups if grouped else None)


def _decode_all(tree: Tree, names: list[str], options: PictureOptions, side: Path) -> None:
    """Write the pictures, and per picture and channel the sum of its values and of their squares: the statistics of any part of them."""
    threads = usable_cores()
    one = partial(decode_picture, tree, options=options)
    with (
        ArrayWriter(side / "inputs.npy", (3, options.size, options.size), np.uint8) as inputs,
        ArrayWriter(side / "sums.npy", (2, 3), np.int64) as sums,
        ThreadPoolExecutor(threads) as pool,
    ):
        for start in range(0, len(names), AT_ONCE):
            pictures = np.stack(list(pool.map(one, names[start : start + AT_ONCE])))
            inputs.append(pictures)
            sums.append(np.stack([channel_sums(picture) for picture in pictures]))


def channel_sums(picture: Pixels) -> npt.NDArray[np.int64]:
    """Per channel the sum of a picture's values and of their squares, one picture at a time: whole numbers are eight times as wide."""
    wide = picture.reshape(len(picture), -1).astype(np.int64)
    return np.stack([wide.sum(1), np.square(wide).sum(1)])


def decode_picture(tree: Tree, name: str, options: PictureOptions) -> Pixels:
    """One picture as [3, size, size]."""
    from PIL import Image

    try:
        with tree.open(name) as stream, Image.open(stream) as image:
            return to_pixels(image, options)
    except Exception as error:  # a damaged picture can fail in any way that its format can
        raise UserError(f"{tree.where}/{name} is not a whole picture ({error}); replace it or take it away") from error


def to_pixels(image: Any, options: PictureOptions, mode: Literal["RGB", "L"] = "RGB") -> Pixels:
    """A Pillow image as [channels, size, size]."""
    from PIL import Image

    side = options.size
    image.draft(mode, (2 * side, 2 * side))  # JPEG can be decoded at a fraction of its size, which is many times faster
    image = in_bytes(image).convert(mode)
    width, height = image.size
    if (width, height) != (side, side):
        edge = min(width, height)
        left, top = (width - edge) / 2, (height - edge) / 2
        box = (left, top, left + edge, top + edge) if options.fit == "crop" else None
        image = image.resize((side, side), Image.Resampling.BILINEAR, box)
    return channels_first(image)


def in_bytes(image: Any) -> Any:
    """A Pillow image with a byte for each channel of each pixel: without palette, and with the upper byte of 16 bits."""
    from PIL import Image

    has_16_bits = image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PNG")
    if has_16_bits:  # Pillow itself would turn all but the 256 darkest of 65,536 shades white
        return Image.fromarray((np.asarray(image).astype(np.int64) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise UserError(
            "its pixels are numbers of 32 bits, of which it does not say what is white; save it with 8 or 16 bits"
        )
    return image.convert({"1": "L", "P": "RGB"}[image.mode]) if image.mode in ("1", "P") else image


def channels_first(image: Any) -> Pixels:
    """The pixels of a Pillow image as [channels, height, width]."""
    pixels = np.asarray(image)
    return np.ascontiguousarray(pixels.transpose(2, 0, 1) if pixels.ndim == 3 else pixels[None])
