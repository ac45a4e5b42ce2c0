"""Images decoded on access, with recently used ones cached in memory.

For datasets whose decoded images fit neither in memory nor on disk. Images are decoded exactly as they would be in
advance, so results are the same; only speed differs.
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

from fedflat.data.batches import statistics_of_sums
from fedflat.data.dataset import Dataset
from fedflat.data.files.cache import cache_entry, fingerprint, open_cached
from fedflat.data.files.images import ImageList, ImageOptions, Pixels, channel_sums, decode_image
from fedflat.data.files.mapped import ArrayWriter, MappedTensor
from fedflat.data.files.tree import Tree
from fedflat.processes import usable_cores

SAMPLE = 1000
"""Number of evenly spaced training images from which mean and standard deviation are computed."""


class DecodedImageCache:
    """Least-recently-used cache of decoded images.

    Args:
        tree: the files.
        names: file name of each position.
        options: how images are resized.
        max_cached_bytes: size of the cache.
    """

    def __init__(self, tree: Tree, names: Sequence[str], options: ImageOptions, max_cached_bytes: int) -> None:
        """Start with an empty cache."""
        self.tree, self.names, self.options, self.max_cached_bytes = tree, list(names), options, max_cached_bytes
        self.images: OrderedDict[int, Pixels] = OrderedDict()
        self.decoded = 0
        """Number of images decoded so far."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of an image."""
        return 3, self.options.size, self.options.size

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for another process, which starts with an empty cache."""
        return {**vars(self), "images": OrderedDict(), "decoded": 0}

    def rows(self, positions: Sequence[int]) -> torch.Tensor:
        """Return the images at ``positions``, [n, 3, size, size] uint8, decoding those that are not cached."""
        distinct = list(dict.fromkeys(positions))
        missing = [position for position in distinct if position not in self.images]
        decoded = dict(zip(missing, self._decode(missing), strict=True))
        images = {
            position: decoded[position] if position in decoded else self.images[position] for position in distinct
        }
        batch = np.empty((len(positions), *self.shape), np.uint8)
        for row, position in enumerate(positions):
            batch[row] = images[position]
        # The cache may be smaller than a batch, so it is updated only after the batch has been copied.
        capacity = self.max_cached_bytes // int(np.prod(self.shape))  # number of images
        self.images |= images
        for position in distinct:
            self.images.move_to_end(position)
        while len(self.images) > capacity:
            self.images.popitem(last=False)
        return torch.from_numpy(batch)

    def _decode(self, positions: list[int]) -> list[Pixels]:
        """Decode the images at ``positions``, in parallel if there are several."""
        self.decoded += len(positions)
        names = [self.names[position] for position in positions]
        decode = partial(decode_image, self.tree, options=self.options)
        threads = usable_cores()
        if len(names) < 2 or threads == 1:
            return [decode(name) for name in names]
        with ThreadPoolExecutor(threads) as pool:
            return list(pool.map(decode, names))


class StreamedTensor(MappedTensor):
    """Image files as a uint8 tensor [n, 3, size, size] without storage: indexing its first dimension decodes images.

    Every operation that would need the values, other than indexing, raises a ``TypeError``.
    """

    cache: DecodedImageCache
    first: int

    @classmethod
    def of_cache(cls, cache: DecodedImageCache, first: int, count: int) -> StreamedTensor:
        """Create a tensor of ``count`` images of ``cache``, from position ``first`` on."""
        # Expanding a single zero gives the shape without allocating the images.
        streamed = torch.Tensor._make_subclass(cls, torch.zeros(1, dtype=torch.uint8).expand(count, *cache.shape))
        streamed.cache, streamed.first, streamed.path = cache, first, cache.tree.path
        return streamed

    @classmethod
    def __torch_function__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Answer queries such as ``shape``; reject operations that return a tensor, because there are no values.

        torch calls this for every function applied to the tensor.
        """
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            raise TypeError(
                f"{getattr(func, '__name__', func)} is not available for images decoded on access; index rows first"
            )
        return result

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Decode the images at ``index``: an integer, slice, list or tensor.

        The result is on the device of ``index`` if that is a tensor, else on the CPU.
        """
        rows = torch.arange(len(self))[index.cpu() if isinstance(index, torch.Tensor) else index]
        images = self.cache.rows([self.first + row for row in rows.reshape(-1).tolist()])
        images = images.reshape(*rows.shape, *self.cache.shape)
        return images.to(index.device) if isinstance(index, torch.Tensor) else images

    def index_select(self, dim: int, index: torch.Tensor) -> torch.Tensor:
        """Return the images at positions ``index``, on the device of ``index``."""
        assert dim == 0
        return self[index]

    def part(self, start: int, length: int, dim: int = 0) -> StreamedTensor:
        """Return ``length`` consecutive images from position ``start`` on, still not decoded; ``dim`` must be 0."""
        assert dim == 0
        return StreamedTensor.of_cache(self.cache, self.first + start, length)

    def to(self, *_: Any, **__: Any) -> Self:
        """Do nothing: images are decoded on the host, and rows move to the device of their index."""
        return self

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        return StreamedTensor.of_cache, (self.cache, self.first, len(self))


def streamed_dataset(
    name: str, data_dir: Path, images: ImageList, options: ImageOptions, max_cached_bytes: int
) -> Dataset:
    """Build a classification dataset whose images are decoded on access, which needs little disk space.

    Args:
        name: canonical text of the dataset.
        data_dir: directory whose cache holds the statistics.
        images: the files, with their classes and natural clients; training images come first.
        options: how images are resized.
        max_cached_bytes: size of each process's cache of decoded images.
    """
    total, train_count = len(images.files), images.is_test.count(False)
    assert not any(images.is_test[:train_count]), "training images must come first"
    # The mean and standard deviation are those of a sample of evenly spaced training images.
    sampled_rows = np.unique(np.linspace(0, train_count - 1, min(train_count, SAMPLE)).round().astype(np.int64))
    sample = [images.files[row] for row in sampled_rows]
    content_key = fingerprint((options.size, options.fit, *images.with_versions(sample)))
    prefix = f"{name.partition('(')[0]}-{options.size}-sample"
    entry = cache_entry(data_dir, prefix, content_key, partial(_write_sums, images.tree, sample, options))
    sums = open_cached(entry, "sums").numpy()
    mean, std = statistics_of_sums(sums.sum(0), options.size**2 * len(sample))
    cache = DecodedImageCache(images.tree, images.files, options, max_cached_bytes)
    inputs = StreamedTensor.of_cache(cache, 0, total)
    train = images.examples(np.arange(train_count), inputs.part(0, train_count))
    test = images.examples(np.arange(train_count, total), inputs.part(train_count, total - train_count))
    return Dataset(name, train, test, tuple(images.classes), mean, std, group_names=tuple(images.group_names))


def _write_sums(tree: Tree, names: list[str], options: ImageOptions, folder: Path) -> None:
    """Write the channel sums [2, 3] of each named image to ``sums.npy`` in ``folder``, one row per image."""
    with ArrayWriter(folder / "sums.npy", (2, 3), np.int64) as sums:
        for name in names:
            sums.append(channel_sums(decode_image(tree, name, options))[None])
