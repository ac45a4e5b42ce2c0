"""The scale of inputs and targets: standardisation, and advice if they are far larger than 1."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from fedflat.data.dataset import Dataset
from fedflat.data.files.cache import fits_in_memory
from fedflat.data.files.mapped import MappedTensor
from fedflat.errors import UserError

LARGE = 100.0
"""Absolute value of float inputs and targets from which usual learning rates are likely to diverge."""


def standardise(dataset: Dataset) -> Dataset:
    """Return a copy with standardised inputs [n, features] and, for regression, standardised targets.

    The statistics are those of the training examples, and the copy's attributes ``mean``, ``std``, ``target_mean`` and
    ``target_std`` hold them. Constant columns are only centred. A standardised dataset is returned unchanged.

    >>> import numpy as np
    >>> from fedflat.data import from_arrays
    >>> inputs, targets = np.array([[10.0], [30.0]]), np.array([500.0, 900.0])
    >>> data = standardise(from_arrays(inputs, targets, inputs, targets))
    >>> data.train.targets.tolist(), data.mean, data.target_std
    ([-1.0, 1.0], (20.0,), (200.0,))
    """
    train, test = dataset.train, dataset.test
    if dataset.kind != "vector":
        raise UserError(f"{dataset.name} has {dataset.kind} inputs; only vectors of numbers can be standardised")
    if dataset.mean:  # standardised before, by statistics in the original units
        return dataset
    if isinstance(train.inputs, MappedTensor) and not fits_in_memory(train.inputs.nbytes):
        raise UserError(
            f"the inputs of {dataset.name} do not fit in memory, so they cannot be standardised here; "
            "store standardised arrays instead"
        )
    mean, std = _statistics(train.inputs)
    scaled = [replace(split, inputs=_scaled(split.inputs, mean, std)) for split in (train, test)]
    statistics = {"mean": mean, "std": std}
    if dataset.target_type == "numbers":
        mean, std = _statistics(train.targets)
        scaled = [replace(split, targets=_scaled(split.targets, mean, std)) for split in scaled]
        statistics |= {"target_mean": mean, "target_std": std}
    constants: dict[str, Any] = {name: tuple(values.reshape(-1).tolist()) for name, values in statistics.items()}
    return replace(dataset, train=scaled[0], test=scaled[1], **constants)


def _statistics(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean and standard deviation of each column of [n, ...] in float64; 1 for constant columns."""
    mean, std = values.double().mean(0), values.double().std(0, correction=0)
    return mean, torch.where(std > 0, std, 1.0)


def _scaled(values: torch.Tensor, mean: torch.Tensor, std: torch.Tensor) -> torch.Tensor:
    return ((values.double() - mean) / std).to(values.dtype)


def scale_advice(dataset: Dataset) -> str:
    """Say which training inputs or targets are far larger than 1, and what to do; empty if none are.

    Memory-mapped inputs are not examined, because they may be larger than memory.
    """
    large = []
    for name in ("inputs", "targets"):
        values = getattr(dataset.train, name)
        if values.is_floating_point() and not isinstance(values, MappedTensor):
            low, high = float(values.min()), float(values.max())
            if max(-low, high) > LARGE:
                large.append(f"{name} range from {low:.4g} to {high:.4g}")
    if not large or (dataset.kind == "vector" and dataset.mean):  # already standardised
        return ""
    remedy = "scale them to about 1"
    if dataset.kind == "vector":
        source = dataset.name if dataset.name.startswith("arrays(") else "arrays(path=FILE)"
        remedy = f"standardise them: --dataset '{source[:-1]},standardise=true)', in Python fedflat.data.standardise"
    return f"the {' and '.join(large)}, but usual learning rates need values of about 1; {remedy}"
