"""Datasets of images with segmentation masks: both decoded once to one size, then read through memory maps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from fedflat.data.dataset import IGNORED, Dataset
from fedflat.data.files.cache import cache_entry, fingerprint
from fedflat.data.files.images import (
    ImageList,
    channel_sums,
    channels_first,
    decoded_dataset,
    open_image,
    write_decoded,
)
from fedflat.data.files.tree import Tree
from fedflat.errors import UserError
from fedflat.text import param

if TYPE_CHECKING:
    from PIL.Image import Image as PillowImage


@dataclass(frozen=True)
class MaskOptions:
    """How images and masks are resized."""

    size: int | None = param(
        None, "height in pixels to which images are resized, keeping their shape; none keeps the original size", low=1
    )


def decode_pair(
    tree: Tree, classes: Mapping[int, int], height: int, width: int, files: tuple[str, str]
) -> dict[str, npt.NDArray[np.generic]]:
    """Decode an image and its mask, resize both, and map the ids of the mask to classes.

    Args:
        tree: the folder or archive with the files.
        classes: class of each valid id in the mask files; ``IGNORED`` for pixels that do not count.
        height: height of the resized image and mask.
        width: their width.
        files: names of the image file and its mask file in the tree.

    Returns:
        ``inputs`` [3, height, width] (bilinear), ``masks`` [height, width] (nearest), and ``sums`` [2, 3], the sum and
        sum of squares of each channel.
    """
    from PIL import Image

    file, mask_file = files
    image, mask_image = _load(tree, file), _load(tree, mask_file)
    if image.size != mask_image.size:
        raise UserError(
            f"{tree.path}/{file} has {_size_text(image)} pixels, but its mask {mask_file} has "
            f"{_size_text(mask_image)}; expected the same size: replace one of them"
        )
    pixels = channels_first(image.convert("RGB").resize((width, height), Image.Resampling.BILINEAR))
    ids = np.asarray(mask_image)
    ids = ids[..., 0] if ids.ndim == 3 else ids  # some publishers store the id in the first colour channel
    unknown = sorted(set(np.unique(ids).tolist()) - set(classes))
    if unknown:
        raise UserError(
            f"{tree.path}/{mask_file} has the unknown class id {unknown[0]}; "
            f"expected ids from {min(classes)} to {max(classes)}: replace the mask"
        )
    class_of_id = np.full(256, IGNORED, np.uint8)  # a lookup table for all possible bytes
    class_of_id[list(classes)] = list(classes.values())
    rows, columns = _nearest(ids.shape[0], height), _nearest(ids.shape[1], width)
    return {"inputs": pixels, "masks": class_of_id[ids[np.ix_(rows, columns)]], "sums": channel_sums(pixels)}


def _load(tree: Tree, name: str) -> PillowImage:
    """Read an image file completely, so that it can be used after the file is closed."""
    with open_image(tree, name) as image:
        image.load()
        return image


def mask_dataset(
    name: str, data_dir: Path, images: ImageList, class_of_id: Mapping[int, int], options: MaskOptions
) -> Dataset:
    """Build a segmentation dataset from image and mask files.

    Args:
        name: canonical text of the dataset.
        data_dir: directory whose cache holds the decoded images.
        images: the files, with their masks and natural clients.
        class_of_id: class of each id in the mask files, ``IGNORED`` for pixels that do not count.
        options: how images are resized.

    Returns:
        A dataset with inputs [n, 3, height, width] uint8 and masks [n, height, width] uint8.
    """
    height, width = _target_size(images.tree, images.files[0], options)
    pairs = list(zip(images.files, images.masks, strict=True))
    file_versions = images.with_versions([file for pair in pairs for file in pair])
    content_key = fingerprint((height, width, sorted(class_of_id.items()), *file_versions))
    # Per image: its pixels, its mask, and the sum and sum of squares of each channel for the dataset's mean and std.
    shapes = {"inputs": (3, height, width), "masks": (height, width), "sums": (2, 3)}
    write = partial(write_decoded, partial(decode_pair, images.tree, class_of_id, height, width), pairs, shapes)
    prefix = f"{name.partition('(')[0]}-{height}x{width}"  # the name without its parameters
    return decoded_dataset(name, data_dir, cache_entry(data_dir, prefix, content_key, write), prefix, images)


def _target_size(tree: Tree, first: str, options: MaskOptions) -> tuple[int, int]:
    """Return the height and width of all images: those of the file ``first``, scaled to ``options.size`` if set."""
    with open_image(tree, first) as image:
        width, height = image.size
    return (height, width) if options.size is None else (options.size, max(1, round(options.size * width / height)))


def _nearest(size: int, new_size: int) -> npt.NDArray[np.int64]:
    """Return, for each row (or column) of a mask resized from ``size`` to ``new_size``, the row to copy, [new_size].

    It is the row that contains the new row's centre, as in Pillow's nearest-neighbour resizing.
    """
    return (2 * np.arange(new_size) + 1) * size // (2 * new_size)


def _size_text(image: PillowImage) -> str:
    return f"{image.size[1]}x{image.size[0]}"
