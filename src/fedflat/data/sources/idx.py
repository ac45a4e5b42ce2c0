"""MNIST and Fashion-MNIST, from their idx files, gzipped or not.

An idx file consists of two zero bytes, a type code (8: unsigned bytes), the number of dimensions, each dimension as a
big-endian 32-bit integer, and the values.
"""

from __future__ import annotations

import gzip
import hashlib
import zlib
from dataclasses import dataclass
from pathlib import Path

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
        """The gzipped file, else the uncompressed one."""
        return super().find(data_dir, file) or super().find(data_dir, file.removesuffix(".gz"))

    def parse(self, path: Path) -> tuple[Bytes, str]:
        """Read an idx file; the hash is that of the uncompressed file."""
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
        arrays = [self.open(data_dir, f"{self.root}/{file}") for file in FILES]
        train, test = (
            Examples(torch.tensor(images).unsqueeze(1), torch.tensor(labels, dtype=torch.int64))
            for images, labels in (arrays[:2], arrays[2:])
        )
        return Dataset(self.name, train, test, self.classes, (self.mean,), (self.std,))


def _downloads(base: str, root: str, md5s: tuple[str, ...]) -> tuple[Download, ...]:
    return tuple(Download(f"{base}/{file}", md5, (f"{root}/{file}",)) for file, md5 in zip(FILES, md5s, strict=True))


def _digests(root: str, digests: tuple[str, ...]) -> dict[str, str]:
    return {f"{root}/{file}": digest for file, digest in zip(FILES, digests, strict=True)}


def _card(citation: str, licence: str, size: str) -> DatasetCard:
    return DatasetCard(
        examples="60,000 / 10,000",
        shape="1x28x28",
        classes="10",
        citation=citation,
        licence=licence,
        size=size,
        checks="md5 of every download; sha256 of the content of every file, whenever it is read",
        model="lenet5",
    )


MNIST = Idx(
    "mnist",
    "handwritten digits, 28x28",
    _downloads(
        "https://ossci-datasets.s3.amazonaws.com/mnist",
        "MNIST/raw",
        (
            "f68b3c2dcbeaaa9fbdd348bbdeb94873",
            "d53e105ee54ea40749a09fcbcd1e9432",
            "9fb629c4189551a2d022fa330f9573f3",
            "ec29112dd5afa0611ce80d1b7f02629c",
        ),
    ),
    _digests(
        "MNIST/raw",
        (
            "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
            "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
            "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
            "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
        ),
    ),
    root="MNIST/raw",
    classes=tuple("0123456789"),
    mean=0.1307,
    std=0.3081,
    card=_card("LeCun et al. 1998", "CC BY-SA 3.0", "11 MB"),
)

FASHION_MNIST = Idx(
    "fashion_mnist",
    "images of clothing, 28x28",
    _downloads(
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
        "FashionMNIST/raw",
        (
            "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
            "25c81989df183df01b3e8a0aad5dffbe",
            "bef4ecab320f06d8554ea6380940ec79",
            "bb300cfdad3c16e7a12a480ee83cd310",
        ),
    ),
    _digests(
        "FashionMNIST/raw",
        (
            "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
            "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
            "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
            "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
        ),
    ),
    root="FashionMNIST/raw",
    classes=("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
    mean=0.2860,
    std=0.3530,
    card=_card("Xiao et al. 2017", "MIT", "30 MB"),
)
SOURCES = (MNIST, FASHION_MNIST)
