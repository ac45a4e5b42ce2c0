"""The 8x8 digits of scikit-learn: real handwriting without a download, and therefore the default dataset."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

from fedflat.data.arrays import channel_statistics
from fedflat.data.dataset import Dataset, Examples
from fedflat.data.sources.source import DatasetCard, DatasetSource

TEST_EVERY = 5


@dataclass(frozen=True)
class Digits(DatasetSource):
    """1,797 greyscale images of 8x8 pixels with 17 levels; every fifth example of each class is a test example."""

    def read(self, data_dir: Path) -> Dataset:
        levels, labels = _published()
        pixels = torch.from_numpy(np.rint(levels * (255 / 16)).astype(np.uint8).reshape(-1, 1, 8, 8))
        is_test = np.zeros(len(labels), dtype=bool)
        for label in range(10):
            is_test[np.flatnonzero(labels == label)[TEST_EVERY - 1 :: TEST_EVERY]] = True
        examples = Examples(pixels, torch.from_numpy(labels.astype(np.int64)))
        train, test = examples.take(np.flatnonzero(~is_test)), examples.take(np.flatnonzero(is_test))
        mean, std = channel_statistics(train.inputs)
        return Dataset(self.name, train, test, tuple("0123456789"), mean, std)


@cache
def _published() -> tuple[np.ndarray, np.ndarray]:
    """Grey levels [n, 64] and labels [n], read directly from scikit-learn's file because importing it is slow."""
    package = find_spec("sklearn")
    folders = (package.submodule_search_locations if package else None) or []
    for path in (Path(folder) / "datasets" / "data" / "digits.csv.gz" for folder in folders):
        if path.is_file():
            numbers = np.loadtxt(path, dtype=np.uint8, delimiter=",")
            return numbers[:, :-1].astype(np.float64), numbers[:, -1]
    from sklearn.datasets import load_digits

    levels, labels = load_digits(return_X_y=True)
    return levels, labels


DIGITS = Digits(
    "digits",
    "handwritten digits of scikit-learn, 8x8",
    card=DatasetCard(
        examples="1,442 / 355",
        shape="1x8x8",
        classes="10",
        citation="scikit-learn",
        licence="CC BY 4.0 (UCI: Optical Recognition of Handwritten Digits), as part of scikit-learn",
        model="mlp",
    ),
)
SOURCES = (DIGITS,)
