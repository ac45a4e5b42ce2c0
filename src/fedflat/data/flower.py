"""Partitions made by the partitioners of Flower Datasets (``flwr_datasets``).

A partitioner divides a table with the columns ``position``, ``label`` and, if the dataset has them, ``group`` and
``coarse_label``. The result is written to a file and used as ``listed(path=FILE)``, so a run can be repeated from its
config without Flower.
"""

from __future__ import annotations

import inspect
import os
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from fedflat.data.dataset import Dataset
from fedflat.data.partitioners.listed import listed
from fedflat.data.partitioners.partitioner import IntArray
from fedflat.data.registry import load
from fedflat.errors import UserError
from fedflat.registry import require_package

POSITION = "position"
PLAIN_TYPES = (bool, int, float, str, list)
MAX_REASON = 200
"""Number of characters of a Flower error that are repeated."""


class FlowerPartitioner(Protocol):
    """The interface of ``flwr_datasets`` partitioners that fedflat uses."""

    dataset: Any

    @property
    def num_partitions(self) -> int:
        """Number of clients."""

    def load_partition(self, partition_id: int) -> Any:
        """Return the rows of the table that one client gets."""


def from_flower(partitioner: FlowerPartitioner, data: str | Dataset, folder: str | Path | None = None) -> str:
    """Partition a dataset with a Flower partitioner and write the result to a file.

    The partitioner uses its own seed, so the partition is the same for every seed of a run. It may refer to the columns
    ``label``, ``group`` (natural client) and ``coarse_label`` (superclass).

    Args:
        partitioner: a partitioner of ``flwr_datasets``; each instance partitions one dataset.
        data: a dataset or its name.
        folder: where the partition file is written; ``partitions`` in the data directory by default.

    Returns:
        The text of the partition, ``listed(path=...,hash=...)``, for ``partition=`` and ``--partition``.
    """
    dataset = load(data) if isinstance(data, str) else data
    settings = _plain_settings(partitioner)  # before partitioning, which may change them
    clients = _divide(partitioner, dataset)
    return listed(clients, len(dataset.train), type(partitioner).__name__, folder, made_by=settings)


def _divide(partitioner: FlowerPartitioner, data: Dataset) -> list[IntArray]:
    """Return the positions of each client's training examples, as the partitioner assigns them.

    The partitioner gets a table of positions and labels, not the inputs.
    """
    if data.train.targets.ndim > 1:
        raise UserError(
            f"{data.name} has several labels per example, which Flower partitioners do not support; "
            "use iid, natural or centralised"
        )
    columns = _label_columns(data)
    try:
        partitioner.dataset = _make_table(columns)
        parts = [partitioner.load_partition(number) for number in range(partitioner.num_partitions)]
        return [np.asarray(part[POSITION], dtype=np.int64) for part in parts]
    except Exception as error:  # partitioners raise exceptions of any type
        reason = " ".join(str(error).split())[:MAX_REASON]
        known = ", ".join(name for name in columns if name != POSITION)
        raise UserError(
            f"{type(partitioner).__name__} cannot partition {data.name} ({reason}); "
            f"available columns: {known}; use a new partitioner for each dataset"
        ) from error


def _label_columns(data: Dataset) -> dict[str, Any]:
    """Return the columns that a partitioner may refer to, each [n]: positions, labels, groups, coarse labels."""
    columns: dict[str, Any] = {POSITION: np.arange(len(data.train)), "label": data.train.targets.numpy()}
    if data.train.groups is not None:
        columns["group"] = data.train.groups.numpy()
    if data.train.coarse is not None:
        columns["coarse_label"] = data.train.coarse.numpy()
    return columns


def _make_table(columns: dict[str, Any]) -> Any:
    """Build a table of Hugging Face ``datasets``, the type that Flower partitioners take, from columns [n] by name."""
    os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
    return require_package("datasets", "a Flower partitioner", extra="hub").Dataset.from_dict(columns)


def _plain_settings(partitioner: FlowerPartitioner) -> dict[str, Any]:
    """Return a partitioner's class name and its constructor arguments that are plain values, for documentation."""
    settings: dict[str, Any] = {"name": type(partitioner).__name__}
    attributes = vars(partitioner)
    for name in inspect.signature(type(partitioner)).parameters:
        # Flower stores arguments in private attributes, ``_name`` or ``_initial_name``.
        value = attributes.get(f"_{name}", attributes.get(f"_initial_{name}"))
        if isinstance(value, np.ndarray):
            value = value.tolist()
        if isinstance(value, PLAIN_TYPES):
            settings[name] = value
    return settings
