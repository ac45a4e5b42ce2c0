"""The scale of inputs and targets: standardisation, and advice if they are far larger than 1."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch

from fedflat.data.dataset import Dataset
from fedflat.data.files.cache import fits_in_memory
from fedflat.data.files.mapped import MappedTensor
from fedflat.errors import UserError

LARGE = 100.0
"""Absolute value of float inputs and targets from which usual learning rates are likely to diverge."""


def standardise(
    dataset: Dataset,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    target_mean: Sequence[float] | None = None,
    target_std: Sequence[float] | None = None,
) -> Dataset:
    """Return a copy with standardised inputs [n, features] and, for regression, standardised targets.

    Constants that are not given are the statistics of the training examples; constant columns are then only centred.
    The copy's attributes ``mean``, ``std``, ``target_mean`` and ``target_std`` hold the constants. Without arguments, a
    standardised dataset is returned unchanged.

    Args:
        dataset: a dataset of vectors.
        mean: the number to subtract from each input column, in the original units.
        std: the positive number to divide each input column by.
        target_mean: as ``mean``, for each column of the targets; only for regression.
        target_std: as ``std``, for each column of the targets.

    >>> import numpy as np
    >>> from fedflat.data import from_arrays
    >>> inputs, targets = np.array([[10.0], [30.0]]), np.array([500.0, 900.0])
    >>> data = standardise(from_arrays(inputs, targets, inputs, targets))
    >>> data.train.targets.tolist(), data.mean, data.target_std
    ([-1.0, 1.0], (20.0,), (200.0,))
    >>> standardise(from_arrays(inputs, targets, inputs, targets), mean=[0], std=[10]).train.inputs.tolist()
    [[1.0], [3.0]]
    """
    if dataset.kind != "vector":
        raise UserError(f"{dataset.name} has {dataset.kind} inputs; only vectors of numbers can be standardised")
    dataset = scale_columns(dataset, "inputs", mean, std)
    if dataset.target_type == "numbers" or target_mean is not None or target_std is not None:
        dataset = scale_columns(dataset, "targets", target_mean, target_std)
    return dataset


def scale_columns(
    dataset: Dataset, which: Literal["inputs", "targets"], mean: Sequence[float] | None, std: Sequence[float] | None
) -> Dataset:
    """Return a copy in which the inputs or the targets are standardised.

    Args:
        dataset: inputs of a dataset of vectors, or targets of a regression, can be standardised.
        which: ``inputs`` or ``targets``.
        mean: one number per column; by default the mean of the training examples.
        std: one positive number per column; by default the standard deviation of the training examples.
    """
    prefix = "target_" if which == "targets" else ""
    if (mean is None) != (std is None):
        raise UserError(f"{dataset.name} has only one of {prefix}mean and {prefix}std; expected both or neither")
    if which == "targets" and dataset.target_type != "numbers":
        raise UserError(f"{dataset.name} has {dataset.target_type} as targets; remove target_mean and target_std")
    if getattr(dataset, f"{prefix}mean"):  # standardised before, by constants in the original units
        if mean is not None:
            raise UserError(f"the {which} of {dataset.name} are already standardised; standardise them only once")
        return dataset
    values = getattr(dataset.train, which)
    if isinstance(values, MappedTensor) and not fits_in_memory(values.nbytes):
        raise UserError(
            f"the {which} of {dataset.name} do not fit in memory, so they cannot be standardised here; "
            "store standardised arrays instead"
        )
    if mean is None or std is None:
        centre, scale = _statistics(values)
    else:
        shape = values.shape[1:]
        centre = _to_columns(mean, shape, f"{prefix}mean of {dataset.name}")
        scale = _to_columns(std, shape, f"{prefix}std of {dataset.name}")
        if not bool((scale > 0).all()):
            raise UserError(f"{prefix}std of {dataset.name} must be positive; for constant columns use 1")
    train, test = (
        replace(split, **{which: _scaled(getattr(split, which), centre, scale)})
        for split in (dataset.train, dataset.test)
    )
    constants: dict[str, Any] = {
        f"{prefix}mean": tuple(centre.reshape(-1).tolist()),
        f"{prefix}std": tuple(scale.reshape(-1).tolist()),
    }
    return replace(dataset, train=train, test=test, **constants)


def renormalise(dataset: Dataset, constants: Mapping[str, Sequence[float]]) -> Dataset | None:
    """Return a copy that is normalised by other constants, e.g. those of the data that a model was trained on.

    Args:
        dataset: uint8 images, or standardised inputs or targets; other values stay unchanged.
        constants: ``mean``, ``std``, ``target_mean`` and ``target_std``, in the original units.

    Returns:
        The copy; None if the constants do not fit the dataset, e.g. because it has other columns.

    >>> import numpy as np
    >>> from fedflat.data import from_arrays
    >>> inputs, targets = np.array([[10.0], [30.0]]), np.array([0, 1])
    >>> data = standardise(from_arrays(inputs, targets, inputs, targets))
    >>> constants = {"mean": [0.0], "std": [10.0], "target_mean": [], "target_std": []}
    >>> renormalise(data, constants).train.inputs.tolist()
    [[1.0], [3.0]]
    """
    for which, names in (("inputs", ("mean", "std")), ("targets", ("target_mean", "target_std"))):
        new: dict[str, Any] = {name: tuple(constants[name]) for name in names}
        old = {name: getattr(dataset, name) for name in names}
        if any(len(new[name]) != len(old[name]) for name in names):
            return None
        if new == old:
            continue
        values = getattr(dataset.train, which)
        if values.dtype != torch.uint8:  # uint8 images are normalised batch by batch
            columns = [_to_columns(each, values.shape[1:], which) for each in (*old.values(), *new.values())]
            old_mean, old_std, new_mean, new_std = columns
            shift, scale = (new_mean - old_mean) / old_std, new_std / old_std
            for name in ("train", "test"):
                split = getattr(dataset, name)
                new[name] = replace(split, **{which: _scaled(getattr(split, which), shift, scale)})
        dataset = replace(dataset, **new)
    return dataset


def _to_columns(values: Any, shape: torch.Size, what: str) -> torch.Tensor:
    """Convert constants to float64 of shape [columns], or [] if there is one column without a dimension of its own.

    ``what`` names the constants in the message of a ``UserError``.
    """
    try:
        columns = torch.as_tensor(np.asarray(values, dtype=np.float64)).reshape(shape)
    except (TypeError, ValueError, RuntimeError):
        columns = torch.tensor(torch.nan)
    if not columns.isfinite().all():
        raise UserError(f"{what} is {values!r}; expected one finite number for each of {math.prod(shape)} columns")
    return columns


def own_statistics_advice(dataset: Dataset) -> str:
    """Say that a server's or site's inputs are standardised by their own statistics; empty if they are not.

    Statistics of one site differ from those of the others. The same measurement then has different values at
    different sites, and the common model is less accurate.
    """
    if dataset.kind != "vector" or not dataset.mean or float(dataset.train.inputs.double().mean(0).abs().max()) > 1e-4:
        return ""
    return (
        f"{dataset.name} is standardised by the mean and standard deviation of its own training examples, but server "
        "and sites need the same constants: use fedflat.data.standardise(data, mean=..., std=...), or store the arrays "
        "mean and std in the .npz file"
    )


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
