"""Summaries of datasets as plain values."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fedflat.data.dataset import Dataset, Examples
from fedflat.data.files.mapped import MappedTensor
from fedflat.data.hashing import row_blocks


def summarise_sizes(sizes: npt.NDArray[np.int64]) -> dict[str, float]:
    """Return ``min``, ``median`` and ``max`` of ``sizes``; an empty dictionary if there are no sizes."""
    if not len(sizes):
        return {}
    return {"min": int(sizes.min()), "median": float(np.median(sizes)), "max": int(sizes.max())}


def describe(dataset: Dataset) -> dict[str, Any]:
    """Summarise a dataset as plain values: sizes, shapes, class counts, natural clients, statistics, content hash."""

    def count_classes(examples: Examples) -> list[int]:
        """Return the number of examples (or mask pixels) of each class; an empty list for regression."""
        if dataset.target_type == "numbers":
            return []
        if dataset.target_type == "labels":
            return examples.targets.sum(0).tolist()
        counts = np.zeros(dataset.num_classes, dtype=np.int64)
        for block in row_blocks(examples.targets):  # drops IGNORED and IGNORED_TOKEN
            labels = block[(block >= 0) & (block < dataset.num_classes)]
            counts += torch.bincount(labels, minlength=dataset.num_classes).numpy()
        return counts.tolist()

    groups = np.zeros(0) if dataset.train.groups is None else dataset.train.groups.numpy()
    _, group_sizes = np.unique(groups, return_counts=True)
    return {
        "name": dataset.name,
        "kind": dataset.kind,
        "targets": dataset.target_type,
        "train": len(dataset.train),
        "test": len(dataset.test),
        "input_shape": list(dataset.input_shape),
        "target_shape": list(dataset.train.targets.shape[1:]),
        "bytes": sum(tensor.nbytes for split in (dataset.train, dataset.test) for tensor in split.tensors().values()),
        "mapped": isinstance(dataset.train.inputs, MappedTensor),
        "classes": list(dataset.classes),
        "train_class_counts": count_classes(dataset.train),
        "test_class_counts": count_classes(dataset.test),
        "groups": len(group_sizes),
        "group_sizes": summarise_sizes(group_sizes),
        "group_names": list(dataset.group_names),
        **{name: list(getattr(dataset, name)) for name in ("columns", "mean", "std", "target_mean", "target_std")},
        "content": dataset.content,
    }
