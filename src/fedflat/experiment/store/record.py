"""What a run leaves behind."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from fedflat.engines.round.contract import ModelState
from fedflat.experiment.config import Config
from fedflat.experiment.store.run_folder import RunFolder

STATISTICS_FILE = "statistics.safetensors"
"""The normalisation statistics that clients kept, each under its number."""


@dataclass(frozen=True)
class Record:
    """A run as plain data: its config, its evaluations, and how it ended."""

    config: Config
    history: list[dict[str, Any]]
    status: str
    reason: str
    seconds: float
    models: dict[str, ModelState] = field(repr=False)
    folder: RunFolder | None = None
    own: dict[str, Any] = field(default_factory=dict, repr=False)
    """What the user brought in Python, while the run is in memory: data, model and task."""
    statistics: dict[int, Tensor] = field(default_factory=dict, repr=False)
    """The normalisation statistics of each client that has taken part, while the run is in memory and clients keep them."""
    rounds: int = 0
    """How many rounds its models have seen, the last of which need not have been evaluated."""

    @property
    def evaluated(self) -> list[str]:
        """The names of the models in the last evaluation."""
        return list(self.history[-1]["test"]) if self.history else []


def load_record(path: Path) -> Record:
    """The record of a run folder; models stay on disk."""
    folder = RunFolder(path)
    config = folder.config()
    status, history = folder.status(), folder.metrics()
    rounds = status.get("rounds", history[-1]["round"] if history else config.init_rounds)
    return Record(
        config, history, status["status"], status.get("reason", ""), folder.seconds(), {}, folder, rounds=rounds
    )


def client_statistics(record: Record) -> dict[int, Tensor]:
    """The normalisation statistics of each client of a run that kept them, from memory or from its folder."""
    if record.statistics or record.folder is None or not (record.folder.path / STATISTICS_FILE).exists():
        return record.statistics
    return {int(number): statistics for number, statistics in record.folder.read_tensors(STATISTICS_FILE)[0].items()}


def model_file(name: str) -> str:
    """The file of a model, by the name under which it was evaluated."""
    return (
        "model.safetensors"
        if name == "server"
        else f"model.{re.sub(r'[^A-Za-z0-9]+', '-', name).strip('-')}.safetensors"
    )
