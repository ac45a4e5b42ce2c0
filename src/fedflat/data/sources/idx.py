"""MNIST and Fashion-MNIST, from their idx files, gzipped or not.

An idx file consists of two zero bytes, a type code (8: unsigned bytes), the number of dimensions, each dimension as a
big-endian 32-bit integer, and the values.
"""

from __future__ import annotations

import gzip
import hashlib
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fedflat.data.dataset import Dataset, Examples
from fedflat.data.sources.source import DatasetCard, Download, FileSource
from fedflat.errors import UserError

Bytes = npt.NDArray[np.uint8]
FILES = (
    "train-images-idx3-ubyte.gz",
    "train-labels-idx1-ubyte.gz",
    "t10k-images-idx3-ubyte.gz",
    "t10k-labels-idx1-ubyte.gz",
)
UNSIGNED_BYTES = 8


@dataclass(frozen=True)
class Idx(FileSource[Bytes]):
    """Greyscale images in the four idx files of MNIST.

    Attributes:
        root: folder of the files.
        classes: class names.
        mean: mean of the pixels, on the scale from 0 to 1.
        std: standard deviation of the pixels.
    """

    root: str = ""
    classes: tuple[str, ...] = ()
    mean: float = 0.0
    std: float = 1.0

    def find(self, data_dir: Path, file: str) -> Path | None:
        """Return the gzipped file, else the uncompressed one."""
        return super().find(data_dir, file) or super().find(data_dir, file.removesuffix(".gz"))

    def parse(self, path: Path) -> tuple[Bytes, str]:
        """Read an idx file, and return its values (images [n, 28, 28] or labels [n]) and their hash.

        The hash is the sha256 of the uncompressed file.
        """
        try:
            raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        except (OSError, EOFError, zlib.error) as error:
            raise UserError(f"{path} is not a complete gzip file ({error}); {self.remedy}") from error
        dimensions = 3 if "idx3" in path.name else 1
        if raw[:4] != bytes((0, 0, UNSIGNED_BYTES, dimensions)) or len(raw) < 4 + 4 * dimensions:
            raise UserError(f"{path} is not an idx file of bytes in {dimensions} dimensions; {self.remedy}")
        shape = tuple(int(size) for size in np.frombuffer(raw, ">u4", dimensions, offset=4))
        values = np.frombuffer(raw, np.uint8, offset=4 + 4 * dimensions)
        if len(values) != np.prod(shape):
            declared = " x ".join(map(str, shape))
            raise UserError(f"{path} contains {len(values)} values; its header declares {declared}; {self.remedy}")
        return values.reshape(shape), hashlib.sha256(raw).hexdigest()

    def read(self, data_dir: Path) -> Dataset:
        """Read the images and labels of both sets, and build the dataset."""
        train_images, train_labels, test_images, test_labels = (
            torch.tensor(self.read_file(data_dir, f"{self.root}/{file}")) for file in FILES
        )
        train = Examples(train_images.unsqueeze(1), train_labels.long())
        test = Examples(test_images.unsqueeze(1), test_labels.long())
        return Dataset(self.name, train, test, self.classes, (self.mean,), (self.std,))


def _idx_source(
    name: str, title: str, url: str, root: str, hashes: tuple[tuple[str, str], ...], card: DatasetCard, **content: Any
) -> Idx:
    """Declare a dataset of 60,000 training and 10,000 test images.

    Args:
        name: name of the dataset.
        title: one line for lists.
        url: address of the folder with the files.
        root: folder of the files in the data directory.
        hashes: for each file, the md5 of the download and the sha256 of its content.
        card: citation, licence and size; the other facts are added.
        content: class names, mean and standard deviation.
    """
    downloads, digests = [], {}
    for file, (md5, sha256) in zip(FILES, hashes, strict=True):
        downloads.append(Download(f"{url}/{file}", md5, (f"{root}/{file}",)))
        digests[f"{root}/{file}"] = sha256
    full_card = replace(
        card,
        examples="60,000 / 10,000",
        shape="1x28x28",
        classes="10",
        checks="md5 of every download; sha256 of the content of every file, whenever it is read",
        model="lenet5",
    )
    return Idx(name, title, tuple(downloads), digests, root=root, card=full_card, **content)


MNIST = _idx_source(
    "mnist",
    "handwritten digits, 28x28",
    "https://ossci-datasets.s3.amazonaws.com/mnist",
    "MNIST/raw",
    (
        ("f68b3c2dcbeaaa9fbdd348bbdeb94873", "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db"),
        ("d53e105ee54ea40749a09fcbcd1e9432", "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5"),
        ("9fb629c4189551a2d022fa330f9573f3", "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7"),
        ("ec29112dd5afa0611ce80d1b7f02629c", "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2"),
    ),
    DatasetCard(citation="LeCun et al. 1998", licence="CC BY-SA 3.0", size="11 MB"),
    classes=tuple("0123456789"),
    mean=0.1307,
    std=0.3081,
)

FASHION_MNIST = _idx_source(
    "fashion_mnist",
    "images of clothing, 28x28",
    "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion",
    "FashionMNIST/raw",
    (
        ("8d4fb7e6c68d591d4c3dfef9ec88bf0d", "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888"),
        ("25c81989df183df01b3e8a0aad5dffbe", "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9"),
        ("bef4ecab320f06d8554ea6380940ec79", "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b"),
        ("bb300cfdad3c16e7a12a480ee83cd310", "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34"),
    ),
    DatasetCard(citation="Xiao et al. 2017", licence="MIT", size="30 MB"),
    classes=("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
    mean=0.2860,
    std=0.3530,
)
SOURCES = (MNIST, FASHION_MNIST)
