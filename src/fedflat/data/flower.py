"""Flower's dataset partitioners as partitions.

A partitioner divides a table with the columns ``position``, ``label`` and, where the dataset has them, ``group`` and ``coarse_label``.
What it did is kept in a file, and the partition is ``listed(path=FILE)``: so a run can be repeated from its config without Flower.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
from pathlib import Path
from typing import Any, Protocol, TypeGuard

import numpy as np

from fedflat.data.dataset import Dataset
from fedflat.data.partitioners.listed import listed
from fedflat.data.partitioners.partitioner import IntArray
from fedflat.data.registry import load
from fedflat.data.sources.hub import INSTALL
from fedflat.errors import UserError

POSITION = "position"
PLAIN = (bool, int, float, str, list)
MOST_SAID = 200
"""How much of what Flower says is passed on."""


class FlowerPartitioner(Protocol):
    """What fedflat asks of a partitioner of ``flwr_datasets``."""

    dataset: Any

    @property
    def num_partitions(self) -> int:
        """How many clients there are."""
        ...

    def load_partition(self, partition_id: int) -> Any:
        """The part of the table that one client has."""
        ...


def is_partitioner(value: object) -> TypeGuard[FlowerPartitioner]:
    """Whether a value is a partitioner; its dataset is not asked for, since a fresh one has none."""
    return hasattr(type(value), "load_partition")


def from_flower(partitioner: FlowerPartitioner, data: str | Dataset, folder: str | Path | None = None) -> str:
    """The text of a partition by a partitioner of Flower, for ``partition=`` and ``--partition``; its lists go to a file in ``folder``.

    Partitioners name a column: ``label`` is the class of an example, ``group`` its natural client, ``coarse_label`` its superclass. Their
    seed is their own: the partition is the same for every seed of a run. The file goes to ``partitions`` in the data folder unless said otherwise.
    """
    dataset = load(data) if isinstance(data, str) else data
    made_by = _described(partitioner)
    clients = _divided(partitioner, dataset)
    return listed(clients, len(dataset.train), type(partitioner).__name__, folder, made_by)


def _divided(partitioner: FlowerPartitioner, data: Dataset) -> list[IntArray]:
    if data.train.targets.ndim > 1:
        raise UserError(
            f"{data.name} has several labels per example, which no partitioner can look at; use iid, natural or centralised"
        )
    columns = _columns(data)
    try:
        partitioner.dataset = _table(columns)
        parts = [partitioner.load_partition(number) for number in range(partitioner.num_partitions)]
        return [np.asarray(part[POSITION], dtype=np.int64) for part in parts]
    except Exception as error:  # Flower raises whatever its partitioners ran into
        why = " ".join(str(error).split())[:MOST_SAID]
        known = ", ".join(name for name in columns if name != POSITION)
        raise UserError(
            f"{type(partitioner).__name__} cannot divide {data.name} ({why}); "
            f"the columns that it may name are {known}, and each partitioner divides one dataset once"
        ) from error


def _columns(data: Dataset) -> dict[str, Any]:
    found: dict[str, Any] = {POSITION: np.arange(len(data.train)), "label": data.train.targets.numpy()}
    if data.train.groups is not None:
        found["group"] = data.train.groups.numpy()
    if data.train.coarse is not None:
        found["coarse_label"] = data.train.coarse.numpy()
    return found


def _table(columns: dict[str, Any]) -> Any:
    if importlib.util.find_spec("datasets") is None:
        raise UserError(
            f"partitioners of Flower need the package datasets, which is not installed; install it with: {INSTALL}"
        )
    os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")  # it would report each use to its makers
    return importlib.import_module("datasets").Dataset.from_dict(columns)


def _described(partitioner: FlowerPartitioner) -> dict[str, Any]:
    """A partitioner in plain values, for whoever reads the file: its name and the parameters that it was made with."""
    has = vars(partitioner)
    made_with = {
        name: has.get(f"_{name}", has.get(f"_initial_{name}"))
        for name in inspect.signature(type(partitioner)).parameters
    }
    plain = {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in made_with.items()}
    return {
        "name": type(partitioner).__name__,
        **{name: value for name, value in plain.items() if isinstance(value, PLAIN)},
    }
