"""FEMNIST: handwritten digits and letters, a client per writer (LEAF)."""

from __future__ import annotations

import string
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedflat.data.arrays import statistics_of_sums
from fedflat.data.dataset import Dataset, Examples
from fedflat.data.sources.leaf import Kept, Leaf

CLASSES = tuple(string.digits + string.ascii_uppercase + string.ascii_lowercase)
SIDE = 28


@dataclass(frozen=True)
class Femnist(Leaf):
    """Grey images of 28x28 pixels, dark on white, kept as the bytes they were before LEAF divided them by 255."""

    def convert(self, x: list[Any], y: list[Any]) -> dict[str, np.ndarray]:
        """Pixels and labels of one writer."""
        values, labels = np.array(x, dtype=np.float32), np.array(y)
        if values.shape != (len(x), SIDE * SIDE):
            raise ValueError(f"an image has {SIDE * SIDE} values")
        if not (values.min() >= 0 and values.max() <= 1):
            raise ValueError("pixels lie between 0 and 1")
        if labels.dtype.kind not in "iu" or labels.min() < 0 or labels.max() >= len(CLASSES):
            raise ValueError(
                f"labels are whole numbers from 0 to {len(CLASSES) - 1}, but there is {labels.min()} or {labels.max()}"
            )
        return {
            "inputs": np.rint(values * 255).astype(np.uint8).reshape(-1, 1, SIDE, SIDE),
            "targets": labels.astype(np.int64),
        }

    def facts(self, train: list[dict[str, np.ndarray]]) -> dict[str, Any]:
        """Mean and deviation of all training pixels: a sample of the writers has its own."""
        sums = np.zeros((2, 1), dtype=np.int64)
        for writer in train:
            values = writer["inputs"].astype(np.int64)
            sums += [[values.sum()], [np.square(values).sum()]]
        mean, std = statistics_of_sums(sums, sum(writer["inputs"].size for writer in train))
        return {"mean": mean, "std": std}

    def assemble(self, kept: Kept) -> Dataset:
        """The dataset; writers that are there for testing only are groups that no training example has."""
        train, test = (
            Examples(kept.part("inputs", test), kept.part("targets", test), kept.groups_of(test))
            for test in (False, True)
        )
        return Dataset(
            self.text, train, test, CLASSES, tuple(kept.facts["mean"]), tuple(kept.facts["std"]), group_names=kept.users
        )


FEMNIST = Femnist(
    "femnist",
    "handwritten digits and letters by writer, 28x28 (LEAF)",
    instructions=(
        "made by LEAF (https://github.com/TalwalkarLab/leaf): in data/femnist run ./preprocess.sh -s niid --sf 1.0 -k 0 -t sample "
        "and copy data/train and data/test to femnist/data here"
    ),
)
