"""Small files in the published formats."""

from __future__ import annotations

import dataclasses
import gzip
import struct
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fedflat.data import Dataset, load
from fedflat.data.files import images
from fedflat.data.sources.cifar import CIFAR10, CIFAR100
from fedflat.data.sources.idx import FILES, MNIST

torch.set_num_threads(1)


def python2_pickle(fields: dict[str, object]) -> bytes:
    """The bytes that Python 2's ``cPickle.dump(fields, f, 2)`` writes for strings, lists of ints and uint8 arrays."""

    def text(value: bytes) -> bytes:
        return (b"U" + bytes([len(value)]) if len(value) < 256 else b"T" + struct.pack("<I", len(value))) + value

    def whole(value: int) -> bytes:
        return b"J" + struct.pack("<i", value)

    def write(value: object) -> bytes:
        if isinstance(value, np.ndarray):
            shape = b"(" + b"".join(whole(size) for size in value.shape) + b"t"
            kind = (
                b"cnumpy\ndtype\n(U\x02u1"
                + whole(0)
                + whole(1)
                + b"tR("
                + whole(3)
                + b"U\x01|NNN"
                + whole(-1)
                + whole(-1)
                + whole(0)
                + b"tb"
            )
            empty = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(" + whole(0) + b"tU\x01btR"
            return empty + b"(" + whole(1) + shape + kind + b"I00\n" + text(value.tobytes()) + b"tb"
        if isinstance(value, list):
            return b"](" + b"".join(write(item) for item in value) + b"e"
        return text(value.encode()) if isinstance(value, str) else whole(int(value))  # type: ignore[call-overload]

    return b"\x80\x02}(" + b"".join(text(key.encode()) + write(value) for key, value in fields.items()) + b"u."


def idx_bytes(array: np.ndarray) -> bytes:
    return bytes((0, 0, 8, array.ndim)) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


@pytest.fixture
def small_cifar10(tmp_path: Path) -> SimpleNamespace:
    """CIFAR-10 with 4 images per file: the source without its hashes, the folder, and the data written."""
    rng = np.random.default_rng(0)
    written = {}
    for file in CIFAR10.files:
        pixels, labels = rng.integers(0, 256, (4, 3072), dtype=np.uint8), rng.integers(0, 10, 4).tolist()
        written[file] = (pixels, labels)
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_bytes(
            python2_pickle({"batch_label": "a batch", "labels": labels, "data": pixels, "filenames": ["a.png"] * 4})
        )
    return SimpleNamespace(source=dataclasses.replace(CIFAR10, digests={}), folder=tmp_path, written=written)


@pytest.fixture
def small_cifar100(tmp_path: Path) -> SimpleNamespace:
    """CIFAR-100 with 5 images per file and 100 invented names."""
    rng = np.random.default_rng(1)
    written = {}
    (tmp_path / "cifar-100-python").mkdir()
    for part in ("train", "test"):
        pixels, fine = rng.integers(0, 256, (5, 3072), dtype=np.uint8), rng.integers(0, 100, 5).tolist()
        coarse = [label // 5 for label in fine]
        written[part] = (pixels, fine, coarse)
        fields = {
            "filenames": ["a.png"] * 5,
            "batch_label": part,
            "fine_labels": fine,
            "coarse_labels": coarse,
            "data": pixels,
        }
        (tmp_path / "cifar-100-python" / part).write_bytes(python2_pickle(fields))
    names = {
        "fine_label_names": [f"fine{i}" for i in range(100)],
        "coarse_label_names": [f"coarse{i}" for i in range(20)],
    }
    (tmp_path / "cifar-100-python" / "meta").write_bytes(python2_pickle(names))
    return SimpleNamespace(source=dataclasses.replace(CIFAR100, sizes={}), folder=tmp_path, written=written)


@pytest.fixture
def small_mnist(tmp_path: Path) -> SimpleNamespace:
    """MNIST with 6 training and 3 test images of 28x28, gzipped."""
    rng = np.random.default_rng(2)
    (tmp_path / "MNIST/raw").mkdir(parents=True)
    written = {}
    for file in FILES:
        count = 6 if file.startswith("train") else 3
        array = (
            rng.integers(0, 256, (count, 28, 28), dtype=np.uint8)
            if "idx3" in file
            else rng.integers(0, 10, count, dtype=np.uint8)
        )
        written[file] = array
        (tmp_path / "MNIST/raw" / file).write_bytes(gzip.compress(idx_bytes(array)))
    return SimpleNamespace(source=dataclasses.replace(MNIST, digests={}), folder=tmp_path, written=written)


@pytest.fixture
def pickled() -> Callable[[dict[str, object]], bytes]:
    return python2_pickle


@pytest.fixture
def picture() -> Callable[..., np.ndarray]:
    """Writes a picture of one colour per quarter, which survives JPEG well, and returns what was written."""
    from PIL import Image

    def draw(path: Path, seed: int, size: tuple[int, int] = (64, 64), mode: str = "RGB") -> np.ndarray:
        quarters = np.random.default_rng(seed).integers(0, 256, (2, 2, 3), dtype=np.uint8)
        pixels = np.kron(quarters, np.ones((size[1] // 2, size[0] // 2, 1), dtype=np.uint8))
        path.parent.mkdir(parents=True, exist_ok=True)
        image = Image.fromarray(pixels).convert(mode)
        image.save(path, quality=95) if path.suffix.lower() in (".jpg", ".jpeg") else image.save(path)
        return np.asarray(image.convert("RGB")).transpose(2, 0, 1)

    return draw


@pytest.fixture
def decoded_once(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Path], Dataset]:
    """Loads a dataset a second time, which must not open a picture."""

    def load_twice(text: str, folder: Path) -> Dataset:
        first = load(text, folder)
        monkeypatch.setattr(images, "decode_image", lambda *_, **__: pytest.fail("decoded again"))
        second = load(text, folder)
        assert second.content == first.content and second.mean == first.mean
        return second

    return load_twice


@pytest.fixture
def left_in_cache() -> Callable[[Path], list[str]]:
    """The names of the entries of a data folder's cache, also of half-written ones."""

    def entries(folder: Path) -> list[str]:
        cache = folder / "decoded"
        return sorted(path.name for path in cache.iterdir()) if cache.exists() else []

    return entries
