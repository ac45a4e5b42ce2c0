"""The 8x8 digits of scikit-learn: real handwriting without a download, and therefore the default dataset."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

from fedflat.data.batches import channel_statistics
from fedflat.data.dataset import Dataset, Examples, every_fifth
from fedflat.data.sources.source import DatasetCard, DatasetSource


@dataclass(frozen=True)
class Digits(DatasetSource):
    """There are 1,797 images of 8x8 pixels with 17 grey levels; every fifth example of each class is a test example."""

    def read(self, data_dir: Path) -> Dataset:
        """Scale the grey levels from 0-16 to 0-255, and divide the examples into training and test set."""
        levels, labels = _published_digits()
        pixels = torch.from_numpy(np.rint(levels * (255 / 16)).astype(np.uint8).reshape(-1, 1, 8, 8))
        is_test = every_fifth(labels)
        examples = Examples(pixels, torch.from_numpy(labels.astype(np.int64)))
        train, test = examples.take(np.flatnonzero(~is_test)), examples.take(np.flatnonzero(is_test))
        mean, std = channel_statistics(train.inputs)
        return Dataset(self.name, train, test, tuple("0123456789"), mean, std)


@cache
def _published_digits() -> tuple[np.ndarray, np.ndarray]:
    """Read grey levels [n, 64] and labels [n] directly from scikit-learn's file, because importing it is slow."""
    package = find_spec("sklearn")
    folders = (package.submodule_search_locations if package else None) or []
    for folder in folders:
        path = Path(folder) / "datasets" / "data" / "digits.csv.gz"
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
