"""Datasets of pictures with masks: both decoded once to one size, and from then on read through memory maps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from fedflat.cores import usable_cores
from fedflat.data.arrays import statistics_of_sums
from fedflat.data.cache import entry, fingerprint, open_kept, rows_of
from fedflat.data.dataset import IGNORED, Dataset, Examples
from fedflat.data.mapped import ArrayWriter
from fedflat.data.tree import Tree
from fedflat.errors import UserError
from fedflat.text import param

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

Bytes = npt.NDArray[np.uint8]
AT_ONCE = 64


@dataclass(frozen=True)
class MaskOptions:
    """How large pictures and masks are."""

    size: int | None = param(
        None, "height in pixels to which pictures are brought, their shape kept; none: as they are", low=1
    )


@dataclass
class Pairs:
    """Which pictures and masks a dataset is made of, where they come from, and whether they are for testing."""

    pictures: list[str] = field(default_factory=list)
    masks: list[str] = field(default_factory=list)
    groups: list[int] = field(default_factory=list)
    is_test: list[bool] = field(default_factory=list)

    def add(self, picture: str, mask: str, group: int = 0, test: bool = False) -> None:
        """One picture and its mask."""
        self.pictures.append(picture)
        self.masks.append(mask)
        self.groups.append(group)
        self.is_test.append(test)


@dataclass(frozen=True)
class Decoder:
    """Brings a picture and its mask to one size, and the mask's ids to classes."""

    tree: Tree
    classes: Mapping[int, int]
    """The class of each id that a mask may have; IGNORED for pixels that do not count."""
    height: int
    width: int

    def __call__(self, picture: str, mask: str) -> tuple[Bytes, Bytes]:
        """The picture as [3, height, width], bilinearly, and its classes as [height, width], each that of the nearest pixel."""
        from PIL import Image

        wanted = (self.width, self.height)
        image, ids = self._open(picture), self._open(mask)
        if image.size != ids.size:
            raise UserError(
                f"{self.tree.where}/{picture} has {_shown(image.size)} pixels, but its mask {mask} has {_shown(ids.size)}; "
                "expected the same size: replace one of them"
            )
        small = image.convert("RGB").resize(wanted, Image.Resampling.BILINEAR)
        numbers = np.asarray(ids)
        numbers = (
            numbers[..., 0] if numbers.ndim == 3 else numbers
        )  # some publishers write the id into the first colour
        self._check(numbers, mask)
        table = np.full(256, IGNORED, np.uint8)
        for number, label in self.classes.items():
            table[number] = label
        # Nearest, as Pillow rounds: the pixel that holds the middle of the new one.
        rows, columns = (
            ((2 * np.arange(n) + 1) * old // (2 * n))
            for n, old in zip((self.height, self.width), numbers.shape, strict=True)
        )
        return np.ascontiguousarray(np.asarray(small).transpose(2, 0, 1)), table[numbers[np.ix_(rows, columns)]]

    def _check(self, numbers: npt.NDArray[np.generic], mask: str) -> None:
        found = np.unique(numbers)
        unknown = sorted(set(found.tolist()) - set(self.classes))
        if unknown:
            known = sorted(self.classes)
            raise UserError(
                f"{self.tree.where}/{mask} has id {unknown[0]}, which is no class of this dataset; "
                f"expected ids from {known[0]} to {known[-1]}: replace the mask"
            )

    def _open(self, name: str) -> Picture:
        from PIL import Image

        try:
            with self.tree.open(name) as stream:
                image = Image.open(stream)
                image.load()
                return image
        except Exception as error:  # a damaged picture can fail in any way that its format can
            raise UserError(
                f"{self.tree.where}/{name} is not a whole picture ({error}); replace it or take it away"
            ) from error


def mask_dataset(
    name: str,
    folder: Path,
    tree: Tree,
    pairs: Pairs,
    ids: Mapping[int, int],
    classes: Sequence[str],
    options: MaskOptions,
    group_names: Sequence[str] = (),
) -> Dataset:
    """The dataset of some pairs: decoded into the cache below ``folder`` unless that was done before."""
    height, width = _size(tree, pairs, options)
    stamps = [f"{file} {tree.stamps[file]}" for pair in zip(pairs.pictures, pairs.masks, strict=True) for file in pair]
    short = f"{name.partition('(')[0]}-{height}x{width}"
    decoder = Decoder(tree, ids, height, width)
    kept = entry(
        folder, short, fingerprint((height, width, sorted(ids.items()), *stamps)), partial(_decode_all, decoder, pairs)
    )
    inputs, masks, sums = (open_kept(kept, part) for part in ("inputs", "masks", "sums"))
    is_test = np.array(pairs.is_test, dtype=bool)
    parts = []
    for rows in (np.flatnonzero(~is_test), np.flatnonzero(is_test)):
        images, targets = (
            rows_of(whole, rows, folder, f"{short}-{what}") for whole, what in ((inputs, "rows"), (masks, "mask-rows"))
        )
        groups = torch.from_numpy(np.array(pairs.groups, dtype=np.int64)[rows])
        parts.append(Examples(images, targets, groups if group_names else None))
    mean, std = statistics_of_sums(sums.numpy()[~is_test].sum(0), height * width * int((~is_test).sum()))
    return Dataset(name, parts[0], parts[1], tuple(classes), mean, std, "segmentation", tuple(group_names))


def _size(tree: Tree, pairs: Pairs, options: MaskOptions) -> tuple[int, int]:
    """Height and width of all pictures: those of the first one, scaled."""
    from PIL import Image

    with tree.open(pairs.pictures[0]) as stream:
        try:
            width, height = Image.open(stream).size
        except OSError as error:
            raise UserError(f"{tree.where}/{pairs.pictures[0]} is not a whole picture ({error}); replace it") from error
    return (height, width) if options.size is None else (options.size, max(1, round(options.size * width / height)))


def _decode_all(decoder: Decoder, pairs: Pairs, side: Path) -> None:
    """Write pictures and masks, and per picture and channel the sum of its values and of their squares."""
    threads = usable_cores()
    with (
        ArrayWriter(side / "inputs.npy", (3, decoder.height, decoder.width), np.uint8) as inputs,
        ArrayWriter(side / "masks.npy", (decoder.height, decoder.width), np.uint8) as masks,
        ArrayWriter(side / "sums.npy", (2, 3), np.int64) as sums,
        ThreadPoolExecutor(threads) as pool,
    ):
        for start in range(0, len(pairs.pictures), AT_ONCE):
            some = slice(start, start + AT_ONCE)
            pictures, ids = zip(*pool.map(decoder, pairs.pictures[some], pairs.masks[some]), strict=True)
            wide = np.stack(pictures).reshape(len(pictures), 3, -1).astype(np.int64)
            inputs.append(np.stack(pictures))
            masks.append(np.stack(ids))
            sums.append(np.stack([wide.sum(2), np.square(wide).sum(2)], 1))


def _shown(size: tuple[int, int]) -> str:
    return f"{size[1]}x{size[0]}"
