"""Experiment tracking with TensorBoard, MLflow or Weights & Biases.

Tracking only reads: results are bit-identical with and without it.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from fedflat.errors import UserError, one_of
from fedflat.experiment.callback import Callback
from fedflat.reporting.page.gather import settings_of
from fedflat.text import show_value

if TYPE_CHECKING:
    from fedflat.experiment.callback import RunView
    from fedflat.experiment.config import Config
    from fedflat.experiment.store.run_folder import Record


class Backend(Protocol):
    """A tracking service that receives the metrics of one run."""

    package: str

    def __init__(self, name: str, config: Config, folder: Path | None) -> None:
        """Start a run under this name; ``folder`` is the run folder."""

    def log(self, values: Mapping[str, float], rounds: int) -> None:
        """Log the metrics after ``rounds`` completed rounds."""

    def close(self, status: str) -> None:
        """End the run."""


class TensorBoard:
    """Logs to event files in the run's ``tensorboard`` folder; view them with ``tensorboard --logdir runs``."""

    package = "tensorboard"

    def __init__(self, name: str, config: Config, folder: Path | None) -> None:
        """Open the event files and log the config; a run without a folder logs to ``tensorboard/NAME``."""
        from torch.utils.tensorboard import SummaryWriter

        directory = Path("tensorboard") / name if folder is None else folder / "tensorboard"
        self._writer: Any = SummaryWriter(str(directory))
        self._writer.add_text("config", f"```\n{config.to_yaml()}\n```")

    def log(self, values: Mapping[str, float], rounds: int) -> None:
        """Log the metrics after ``rounds`` completed rounds."""
        for key, value in values.items():
            self._writer.add_scalar(key, value, rounds)
        self._writer.flush()

    def close(self, status: str) -> None:
        self._writer.add_text("status", status)
        self._writer.close()


class MLflow:
    """Logs to a run of the experiment ``fedflat`` on the configured MLflow server (``MLFLOW_TRACKING_URI``)."""

    package = "mlflow"

    def __init__(self, name: str, config: Config, folder: Path | None) -> None:
        """Start an MLflow run under this name and log the settings; the run folder is not used."""
        import mlflow

        self._mlflow: Any = mlflow
        mlflow.set_experiment("fedflat")
        mlflow.start_run(run_name=name)
        settings = {name: show_value(value) for name, value in settings_of(config).items()}
        mlflow.log_params({"algorithm": config.algorithm, "seed": config.seed, **settings})

    def log(self, values: Mapping[str, float], rounds: int) -> None:
        self._mlflow.log_metrics(dict(values), step=rounds)

    def close(self, status: str) -> None:
        self._mlflow.set_tag("status", status)
        self._mlflow.end_run("FAILED" if status == "diverged" else "FINISHED")


class WeightsAndBiases:
    """Logs to a Weights & Biases run of the project ``fedflat``, online or offline (``WANDB_MODE``)."""

    package = "wandb"

    def __init__(self, name: str, config: Config, folder: Path | None) -> None:
        """Start a run under this name with the settings; its local files are in the run folder, if there is one."""
        import wandb

        self._run: Any = wandb.init(
            project="fedflat",
            name=name,
            config=config.model_dump(mode="json"),
            dir=None if folder is None else str(folder),
        )

    def log(self, values: Mapping[str, float], rounds: int) -> None:
        self._run.log(dict(values), step=rounds)

    def close(self, status: str) -> None:
        self._run.summary["status"] = status
        self._run.finish(exit_code=int(status == "diverged"))


BACKENDS: dict[str, type[Backend]] = {
    "tensorboard": TensorBoard,
    "mlflow": MLflow,
    "wandb": WeightsAndBiases,
}


class Tracker(Callback):
    """Callback that logs every evaluation of a run to a tracking backend, e.g. TensorBoard."""

    def __init__(self, name: str) -> None:
        """Check that the backend is installed; ``began`` opens it.

        Args:
            name: ``tensorboard``, ``mlflow`` or ``wandb``.
        """
        if name not in BACKENDS:
            raise one_of("tracking backend", name, BACKENDS)
        if importlib.util.find_spec(BACKENDS[name].package) is None:
            raise UserError(f"{name} is not installed; install it with: pip install 'fedflat[track]'")
        self._backend_class = BACKENDS[name]
        self._backend: Backend | None = None
        self._last_logged = -1  # the round of the last logged evaluation

    def began(self, run: RunView) -> None:
        """Open the backend; a resumed run logs its history again."""
        folder = None if run.folder is None else run.folder.path
        algorithm = re.sub(r"[^A-Za-z0-9.]+", "-", run.config.algorithm).strip("-")
        self._backend = self._backend_class(f"{algorithm}-seed{run.config.seed}", run.config, folder)
        self._last_logged = -1
        self.evaluated(run)

    def evaluated(self, run: RunView) -> None:
        """Log the evaluations since the last call."""
        for entry in run.history:
            if self._backend is not None and entry["round"] > self._last_logged:
                self._backend.log(scalars_of(entry), entry["round"])
                self._last_logged = entry["round"]

    def ended(self, run: RunView, record: Record) -> None:
        """Close the backend."""
        if self._backend is not None:
            self._backend.close(record.status)
            self._backend = None


def scalars_of(entry: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of an evaluation by their path in it, except for the round; lists per client are dropped.

    >>> scalars_of({"round": 3, "train_loss": 0.5, "test": {"wima(window=5)": {"accuracy": 0.9}}, "cosine": [0.1, 0.2]})
    {'train_loss': 0.5, 'test/wima_window_5/accuracy': 0.9}
    """
    return {path: value for path, value in _flatten(entry) if path != "round"}


def _flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield the numbers of nested mappings with their paths, e.g. ``test/server/accuracy``.

    Characters of keys that backends may not allow become underscores.
    """
    for key, value in values.items():
        path = prefix + re.sub(r"[^\w.-]+", "_", str(key)).strip("_")
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{path}/")
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            yield path, float(value)
