"""The outcome of a run, and the names of its model files."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from fedflat.engines.round.contract import ModelState
from fedflat.experiment.config import Config
from fedflat.experiment.store.atomic_files import explain_os_error
from fedflat.experiment.store.run_folder import RunFolder

STATISTICS_FILE = "statistics.safetensors"
"""BatchNorm statistics that clients kept, by client number."""
SNAPSHOTS = "models"
"""Folder of the models saved during training (``evaluation.save_every``)."""


@dataclass(frozen=True)
class Record:
    """A run as plain data: config, evaluations and outcome."""

    config: Config
    history: list[dict[str, Any]]
    """One record per evaluation, as in metrics.jsonl."""
    status: str
    reason: str
    seconds: float
    models: dict[str, ModelState] = field(repr=False)
    """The final models by name; empty if they are only on disk."""
    folder: RunFolder | None = None
    own: dict[str, Any] = field(default_factory=dict, repr=False)
    """User-supplied ``data``, ``model`` and ``task``, while the run is in memory."""
    statistics: dict[int, Tensor] = field(default_factory=dict, repr=False)
    """BatchNorm statistics of each participating client, if clients keep them and the run is in memory."""
    rounds: int = 0
    """Number of completed rounds; the last need not have been evaluated."""
    metric: str = "accuracy"
    """The primary metric: the task's metric, by which models are compared."""

    @property
    def evaluated(self) -> list[str]:
        """The names of the models in the last evaluation."""
        return list(self.history[-1]["test"]) if self.history else []


def load_record(path: Path) -> Record:
    """The record of a run folder; models stay on disk."""
    folder = RunFolder(path)
    config = folder.config()
    status, history = folder.status(), folder.metrics()
    return Record(
        config,
        history,
        status["status"],
        status.get("reason", ""),
        folder.seconds(),
        {},
        folder,
        rounds=status.get("rounds", history[-1]["round"] if history else config.init_rounds),
        metric=status.get("metric", Record.metric),
    )


def client_statistics(record: Record) -> dict[int, Tensor]:
    """The BatchNorm statistics that clients kept, by client number, from memory or from the run folder."""
    if record.statistics or record.folder is None or not (record.folder.path / STATISTICS_FILE).exists():
        return record.statistics
    return {int(number): statistics for number, statistics in record.folder.read_tensors(STATISTICS_FILE)[0].items()}


def model_file(name: str) -> str:
    """The file of a final model.

    >>> model_file("server"), model_file("wima(window=20)")
    ('model.safetensors', 'model.wima-window-20.safetensors')
    """
    suffix = "" if name == "server" else "." + re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-")
    return f"model{suffix}.safetensors"


def snapshot_file(name: str, rounds: int) -> str:
    """The file of a model saved after ``rounds`` rounds.

    >>> snapshot_file("server", 50), snapshot_file("wima(window=20)", 50)
    ('models/round-000050.safetensors', 'models/round-000050.wima-window-20.safetensors')
    """
    return f"{SNAPSHOTS}/{model_file(name).replace('model', f'round-{rounds:06d}', 1)}"


def saved_rounds(run: Path, name: str = "server") -> list[int]:
    """The rounds after which a run saved a model, in ascending order."""
    suffix = re.escape(model_file(name).removeprefix("model"))
    matches = (re.fullmatch(rf"round-(\d+){suffix}", path.name) for path in (run / SNAPSHOTS).glob("round-*"))
    return sorted(int(match[1]) for match in matches if match)


def remove_snapshots_after(run: Path, rounds: int) -> None:
    """Delete models saved after the checkpoint that a resumed run restarts from."""
    for path in (run / SNAPSHOTS).glob("round-*"):
        match = re.match(r"round-(\d+)\.", path.name)
        if match and int(match[1]) > rounds:
            with explain_os_error(path, "remove"):
                path.unlink()
