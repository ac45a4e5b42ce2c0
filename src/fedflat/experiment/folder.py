"""A run on disk: its config, metrics, checkpoint, models and split."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from fedflat.errors import UserError
from fedflat.experiment.config import Config, config, read_yaml
from fedflat.experiment.files import create_folder, told_plainly, write_whole
from fedflat.experiment.rows import FileRows
from fedflat.experiment.stopping import OVER

BEGINNINGS = {name for whole in ("split.json", "status.json", "config.yaml") for name in (whole, f"{whole}.part")} | {"checkpoint", "state"}
"""What may lie in a folder where a run was killed before it had a config: it can be begun again."""


class Held(UserError):
    """Another process is working on the same run."""


class RunFolder:
    """The folder of one run. Nothing in it is ever half-written, except lines that a resumed run cuts off."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._held: int | None = None

    @property
    def exists(self) -> bool:
        """Whether there is a run in it."""
        return (self.path / "config.yaml").is_file()

    @property
    def is_over(self) -> bool:
        """Whether there is a run in it that has come to its end."""
        return self.exists and self.status()["status"] in OVER

    @property
    def anew(self) -> str:
        """What can always be done where something of the run is lost, to end a sentence."""
        return f"or run it anew (fedflat run --config {self.path / 'config.yaml'} with another --out)"

    def create(self, config: Config, split: Mapping[str, Any]) -> None:
        """Make the folder with what describes the run."""
        if self.exists:
            raise UserError(f"there is already a run in {self.path}; go on with it (fedflat resume {self.path}) or choose another --out")
        if self.path.exists() and not (self.path.is_dir() and {path.name for path in self.path.iterdir()} <= BEGINNINGS):
            raise UserError(f"{self.path} exists and is not a run; choose another --out")
        for part in ("checkpoint", "state"):
            create_folder(self.path / part)
        write_whole(self.path / "split.json", json.dumps(split) + "\n")
        self.write_status("running")
        write_whole(self.path / "config.yaml", config.to_yaml())

    def hold(self) -> None:
        """Keep other processes from working on the same run."""
        try:
            import fcntl
        except ImportError:  # no such locks on Windows
            return
        self._held = os.open(self.path / "config.yaml", os.O_RDWR)  # network file systems lock nothing that cannot be written to
        try:
            fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise Held(f"another process is working on {self.path}; wait for it, or choose another --out") from None

    def release(self) -> None:
        """Let other processes work on the run."""
        if self._held is not None:
            os.close(self._held)
            self._held = None

    # --- reading -----------------------------------------------------------------------------------------------------------------

    def config(self) -> Config:
        """The run's config."""
        if not self.exists:
            raise UserError(f"there is no run in {self.path}; expected a folder with a config.yaml (see them with fedflat show runs)")
        return config(read_yaml(self.path / "config.yaml"))

    def status(self) -> dict[str, Any]:
        """How the run ended, or that it has not."""
        return self._json(self.path / "status.json")

    def split(self) -> dict[str, Any]:
        """What is known of the partition."""
        return self._json(self.path / "split.json")

    def metrics(self) -> list[dict[str, Any]]:
        """The evaluations, one record each; a last line cut off by a kill does not count."""
        return self._lines("metrics.jsonl")

    def timing(self) -> list[dict[str, Any]]:
        """Seconds and memory at every evaluation; a round that was repeated after a kill stands twice."""
        return self._lines("timing.jsonl")

    def seconds(self) -> float:
        """How long the run has taken so far."""
        lines = self.timing()
        return float(lines[-1]["seconds"]) if lines else 0.0

    def flatness_seconds(self) -> float:
        """How long looks at flatness have taken, of all the time."""
        return sum(float(line.get("flatness", 0.0)) for line in self.timing())

    def _lines(self, name: str) -> list[dict[str, Any]]:
        path = self.path / name
        whole = path.read_text().rpartition("\n")[0] if path.exists() else ""
        try:
            return [json.loads(line) for line in whole.splitlines()]
        except ValueError:
            raise UserError(f"{path} is damaged: one of its lines is not JSON; run it anew") from None

    def _json(self, path: Path) -> dict[str, Any]:
        try:
            value = json.loads(path.read_text())
        except (OSError, ValueError):
            raise UserError(f"{path} is missing or damaged; the run cannot be read, run it anew") from None
        return dict(value)

    # --- writing -----------------------------------------------------------------------------------------------------------------

    def write_status(self, status: str, **more: Any) -> None:
        """Say how the run stands."""
        write_whole(self.path / "status.json", json.dumps({"status": status, **more}) + "\n")

    def append(self, name: str, record: Mapping[str, Any]) -> None:
        """Add one line to a log."""
        path = self.path / name
        with told_plainly(path), path.open("a") as file:
            file.write(json.dumps(record) + "\n")

    def cut_metrics(self, length: int) -> None:
        """Cut the metrics back to where a checkpoint saw them; refused where they are shorter already."""
        path, found = self.path / "metrics.jsonl", self.metrics_length()
        if found < length:
            raise UserError(
                f"{path} has lost lines: it has {found} bytes, and the run's checkpoint needs {length}; "
                f"put the file back as it was, {self.anew}"
            )
        with told_plainly(path):
            path.touch()
            os.truncate(path, length)

    def metrics_length(self) -> int:
        """The metrics' length in bytes."""
        path = self.path / "metrics.jsonl"
        return path.stat().st_size if path.exists() else 0

    def rows(self, name: str, width: int, dtype: torch.dtype) -> FileRows:
        """A store of rows beside the checkpoint."""
        return FileRows(self.path / "state" / name, width, dtype)

    # --- tensors -----------------------------------------------------------------------------------------------------------------

    def write_tensors(self, name: str, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
        """A safetensors file with JSON in its header."""
        whole = {key: value.detach().cpu().contiguous() for key, value in tensors.items()}
        write_whole(self.path / name, save(whole, {"fedflat": json.dumps(about)}))

    def read_tensors(self, name: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """What ``write_tensors`` wrote."""
        path = self.path / name
        try:
            with safe_open(path, "pt") as file:
                tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
                about = json.loads((file.metadata() or {})["fedflat"])
        except FileNotFoundError:
            raise UserError(f"{path} is missing; the run wrote none (yet)") from None
        except (OSError, SafetensorError, KeyError, ValueError):
            raise UserError(f"{path} is damaged or not fedflat's; run it anew") from None
        return tensors, about


@dataclass(frozen=True)
class Awaited:
    """An experiment, and the folder that it has or will have."""

    config: Config
    folder: Path

    @property
    def done(self) -> bool:
        """Whether it is over already."""
        return RunFolder(self.folder).is_over

    @property
    def rounds_left(self) -> int:
        """Rounds that are still to be run, as far as its last evaluation tells."""
        if self.done:
            return 0
        there = RunFolder(self.folder)
        evaluated = there.metrics() if there.exists else []
        return self.config.training.rounds - int(evaluated[-1]["round"] if evaluated else self.config.init_rounds)
