"""CIFAR-10 and CIFAR-100, from their Python pickles.

The content hash of a file is the sha256 of the same images in the publisher's binary layout: label byte (CIFAR-100:
coarse, then fine), then 3,072 pixel bytes as red, green and blue planes, image after image. No such hash is known for
CIFAR-100: its archive is verified when downloaded, its files by size, shape and label range when read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedflat.data.dataset import Dataset, Examples
from fedflat.data.files.plain_pickle import read_plain_pickle
from fedflat.data.sources.source import DatasetCard, Download, FileSource
from fedflat.errors import UserError

PIXELS = 3 * 32 * 32


@dataclass(frozen=True)
class Cifar(FileSource[dict[str, Any]]):
    """Reads colour images of 32x32 pixels from the published pickle files.

    Attributes:
        train_files: files ("batches") with the training images.
        test_file: file with the test images.
        labels: keys of the labels in a batch: the targets last, preceded by the coarse labels if there are any.
        classes: class names; empty if they are in a file.
        class_names: the file with the class names, and their key in it; None if ``classes`` is set.
        sizes: required number of images per file.
        mean: mean per channel, on the scale from 0 to 1.
        std: standard deviation per channel.
    """

    train_files: tuple[str, ...] = ()
    test_file: str = ""
    labels: tuple[str, ...] = ("labels",)
    classes: tuple[str, ...] = ()
    class_names: tuple[str, str] | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)
    mean: tuple[float, float, float] = (0.0, 0.0, 0.0)
    std: tuple[float, float, float] = (1.0, 1.0, 1.0)

    def parse(self, path: Path) -> tuple[dict[str, Any], str]:
        """Read a file, and return its content by key and the hash of the content.

        A batch has pixels [n, 3072] under ``data`` and labels [n] under each key of ``labels``, both uint8. CIFAR-100
        has one more file, with the class names.
        """
        content = read_plain_pickle(path, self.remedy)
        if self.class_names and path.name == Path(self.class_names[0]).name:
            names = content.get(self.class_names[1])  # this file has class names instead of images
            if not isinstance(names, list) or not all(isinstance(name, bytes) for name in names):
                raise UserError(f"{path} has no list of class names under '{self.class_names[1]}'; {self.remedy}")
            return content, hashlib.sha256(b"\n".join(names)).hexdigest()
        pixels = content.get("data")
        if not isinstance(pixels, np.ndarray) or pixels.dtype != np.uint8 or pixels.shape[1:] != (PIXELS,):
            raise UserError(f"{path} has no images of {PIXELS} bytes under 'data'; {self.remedy}")
        for key in self.labels:
            content[key] = self._check_labels(path, content.get(key), key, len(pixels))
        rows = np.column_stack([*(content[key] for key in self.labels), pixels])
        return content, hashlib.sha256(np.ascontiguousarray(rows).data).hexdigest()

    def read_file(self, data_dir: Path, file: str) -> dict[str, Any]:
        """Read a file, and check its number of images if one is required."""
        content = super().read_file(data_dir, file)
        if file in self.sizes and len(content["data"]) != self.sizes[file]:
            raise UserError(
                f"{data_dir / file} contains {len(content['data'])} images; expected {self.sizes[file]}; {self.remedy}"
            )
        return content

    def read(self, data_dir: Path) -> Dataset:
        """Read the class names, if they are in a file, and all batches."""
        classes = self.classes
        if self.class_names:
            file, key = self.class_names
            classes = tuple(name.decode() for name in self.read_file(data_dir, file)[key])
        train, test = self._read_batches(data_dir, self.train_files), self._read_batches(data_dir, (self.test_file,))
        return Dataset(self.name, train, test, classes, self.mean, self.std)

    def _read_batches(self, data_dir: Path, files: tuple[str, ...]) -> Examples:
        """Concatenate the images and labels of several batch files."""
        batches = [self.read_file(data_dir, file) for file in files]

        def concatenate(key: str) -> torch.Tensor:
            return torch.from_numpy(np.concatenate([batch[key] for batch in batches]))

        images = concatenate("data").view(-1, 3, 32, 32)
        labels = [concatenate(key).long() for key in self.labels]
        return Examples(images, labels[-1], coarse=labels[0] if len(labels) > 1 else None)

    def _check_labels(self, path: Path, labels: object, key: str, images: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Convert labels to an array, after checking that they are one byte for each image.

        Args:
            path: the file, for messages.
            labels: the value read from it; may be anything.
            key: its key in the file, for messages.
            images: number of images in the file.
        """
        if (
            not isinstance(labels, list)
            or len(labels) != images
            or not all(isinstance(label, int) and 0 <= label <= 255 for label in labels)
        ):
            raise UserError(
                f"{path} does not have one label from 0 to 255 for each of its {images} images under '{key}'; "
                f"{self.remedy}"
            )
        return np.array(labels, dtype=np.uint8)


_CIFAR10_SHA256 = {
    "cifar-10-batches-py/data_batch_1": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
    "cifar-10-batches-py/data_batch_2": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
    "cifar-10-batches-py/data_batch_3": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
    "cifar-10-batches-py/data_batch_4": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
    "cifar-10-batches-py/data_batch_5": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
    "cifar-10-batches-py/test_batch": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
}
_CIFAR100_MD5 = {
    "cifar-100-python/train": "16019d7e3df5f24257cddd939b257f8d",
    "cifar-100-python/test": "f0ef6b0ae62326f3e7ffdfab6717acfc",
    "cifar-100-python/meta": "7973b15100ade9c7d40fb424638fde48",
}

CIFAR10 = Cifar(
    "cifar10",
    "natural images of 10 classes, 32x32",
    (
        Download(
            "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
            "c58f30108f718f92721af3b95e74349a",
            tuple(_CIFAR10_SHA256),
        ),
    ),
    digests=_CIFAR10_SHA256,
    train_files=tuple(_CIFAR10_SHA256)[:5],
    test_file="cifar-10-batches-py/test_batch",
    classes=("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
    mean=(0.4914, 0.4822, 0.4465),
    std=(0.2470, 0.2435, 0.2616),
    card=DatasetCard(
        examples="50,000 / 10,000",
        shape="3x32x32",
        classes="10",
        citation="Krizhevsky 2009",
        licence="none stated; the author asks to be cited",
        size="170 MB",
        checks="md5 of the download; sha256 of the content of every file, whenever it is read",
    ),
)

CIFAR100 = Cifar(
    "cifar100",
    "natural images of 100 classes in 20 superclasses, 32x32",
    (
        Download(
            "https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz",
            "eb9058c3a382ffc7106e4002c42a8d85",
            tuple(_CIFAR100_MD5),
        ),
    ),
    file_md5s=_CIFAR100_MD5,
    train_files=("cifar-100-python/train",),
    test_file="cifar-100-python/test",
    labels=("coarse_labels", "fine_labels"),
    class_names=("cifar-100-python/meta", "fine_label_names"),
    sizes={"cifar-100-python/train": 50_000, "cifar-100-python/test": 10_000},
    mean=(0.5071, 0.4865, 0.4409),
    std=(0.2673, 0.2564, 0.2762),
    card=DatasetCard(
        examples="50,000 / 10,000",
        shape="3x32x32",
        classes="100 in 20 superclasses",
        citation="Krizhevsky 2009",
        licence="none stated; the author asks to be cited",
        size="169 MB",
        checks="md5 of the archive and of its files; number of images, range of labels",
        model="resnet18",
    ),
)
SOURCES = (CIFAR10, CIFAR100)
