"""Pictures decoded when they are asked for, with those asked for last kept in memory up to a number of bytes.

For datasets whose decoded pictures fit neither in memory nor on the disk. What is asked for is decoded exactly as it would be
beforehand, so that results are the same; only the time differs.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch

from fedflat.cores import usable_cores
from fedflat.data.arrays import statistics_of_sums
from fedflat.data.cache import entry, fingerprint, open_kept
from fedflat.data.dataset import Dataset
from fedflat.data.images import Listing, PictureOptions, Pixels, channel_sums, decode_picture, labelled
from fedflat.data.mapped import ArrayWriter, MappedTensor
from fedflat.data.tree import Tree

SAMPLE = 1000
"""So many training pictures, evenly spaced, tell the mean and deviation by which all are normalised."""


class PictureCache:
    """Decoded pictures by position; beyond ``limit`` bytes those not asked for the longest are forgotten."""

    def __init__(self, tree: Tree, names: Sequence[str], options: PictureOptions, limit: int) -> None:
        self.tree, self.names, self.options, self.limit = tree, list(names), options, limit
        self.kept: OrderedDict[int, Pixels] = OrderedDict()
        self.decoded = 0
        """How many pictures have been decoded so far."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of a picture."""
        return 3, self.options.size, self.options.size

    def __getstate__(self) -> dict[str, Any]:
        """What another process receives: all but the pictures, of which it keeps its own."""
        return {**vars(self), "kept": OrderedDict(), "decoded": 0}

    def rows(self, positions: Sequence[int]) -> torch.Tensor:
        """The pictures at some positions, [n, 3, size, size]."""
        asked = list(dict.fromkeys(positions))
        missing = [position for position in asked if position not in self.kept]
        fresh = dict(zip(missing, self._decode(missing), strict=True))
        pictures = {position: fresh[position] if position in fresh else self.kept[position] for position in asked}
        found = np.empty((len(positions), *self.shape), np.uint8)
        for row, position in enumerate(positions):
            found[row] = pictures[position]
        most = self.limit // int(np.prod(self.shape))
        for position, picture in pictures.items():
            self.kept[position] = picture
            self.kept.move_to_end(position)
            while len(self.kept) > most:
                self.kept.popitem(last=False)
        return torch.from_numpy(found)

    def _decode(self, positions: list[int]) -> list[Pixels]:
        self.decoded += len(positions)
        names = [self.names[position] for position in positions]
        one = partial(decode_picture, self.tree, options=self.options)
        threads = usable_cores()
        if len(names) < 2 or threads == 1:
            return [one(name) for name in names]
        with ThreadPoolExecutor(threads) as pool:
            return list(pool.map(one, names))


class StreamedTensor(MappedTensor):
    """Pictures in files as a tensor [n, 3, size, size] of bytes that has no values of its own: rows are decoded when they are taken.

    It has a shape and a type, can be indexed along its first dimension, and stays where it is: every other operation is refused.
    """

    cache: PictureCache
    first: int

    @classmethod
    def over(cls, cache: PictureCache, first: int, count: int) -> StreamedTensor:
        """The pictures of a cache from one position on."""
        made = torch.Tensor._make_subclass(cls, torch.zeros(1, dtype=torch.uint8).expand(count, *cache.shape))
        made.cache, made.first, made.path = cache, first, cache.tree.where
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Properties are answered; what would compute with values is refused, since there are none."""
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            raise TypeError(
                f"{getattr(func, '__name__', func)} cannot be applied to pictures that are decoded on demand; take rows first"
            )
        return result

    def __getitem__(self, index: Any) -> torch.Tensor:
        rows = torch.arange(len(self))[index.cpu() if isinstance(index, torch.Tensor) else index]
        found = self.cache.rows([self.first + row for row in rows.reshape(-1).tolist()]).reshape(
            *rows.shape, *self.cache.shape
        )
        return found.to(index.device) if isinstance(index, torch.Tensor) else found

    def index_select(self, dim: int, index: torch.Tensor) -> torch.Tensor:
        """The pictures at some positions, on the device of the positions."""
        assert dim == 0
        return self[index]

    def part(self, start: int, length: int, dim: int = 0) -> StreamedTensor:
        """Some consecutive pictures."""
        assert dim == 0
        return StreamedTensor.over(self.cache, self.first + start, length)

    def to(self, *_: Any, **__: Any) -> Self:
        """Nothing: pictures are decoded on the host, and rows go where their positions are."""
        return self

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        return StreamedTensor.over, (self.cache, self.first, len(self))


def streamed_dataset(
    name: str,
    folder: Path,
    tree: Tree,
    listing: Listing,
    classes: Sequence[str],
    options: PictureOptions,
    group_names: Sequence[str],
    limit: int,
) -> Dataset:
    """The dataset of a listing, training pictures first, without decoding it; ``limit`` is in bytes, for each process."""
    train = listing.is_test.count(False)
    assert not any(listing.is_test[:train]), "training pictures stand first"
    inputs = StreamedTensor.over(PictureCache(tree, listing.names, options, limit), 0, len(listing.names))
    rows = np.unique(np.linspace(0, train - 1, min(train, SAMPLE)).round().astype(np.int64))
    sample = [listing.names[row] for row in rows]
    key = fingerprint((options.size, options.fit, *(f"{file} {tree.stamps[file]}" for file in sample)))
    short = name.partition("(")[0]
    sums = open_kept(
        entry(folder, f"{short}-{options.size}-sample", key, partial(_write_sums, tree, sample, options)), "sums"
    ).numpy()
    mean, std = statistics_of_sums(sums.sum(0), options.size**2 * len(sample))
    parts = [
        labelled(listing, np.arange(start, stop), inputs.part(start, stop - start), bool(group_names))
        for start, stop in ((0, train), (train, len(listing.names)))
    ]
    return Dataset(name, parts[0], parts[1], tuple(classes), mean, std, group_names=tuple(group_names))


def _write_sums(tree: Tree, names: list[str], options: PictureOptions, side: Path) -> None:
    with ArrayWriter(side / "sums.npy", (2, 3), np.int64) as sums:
        for name in names:
            sums.append(channel_sums(decode_picture(tree, name, options))[None])
