"""A run on disk: its config, metrics, checkpoint, models and partition."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from fedflat.errors import UserError
from fedflat.experiment.config import Config, config, read_yaml
from fedflat.experiment.stopping import OVER
from fedflat.experiment.store.atomic_files import create_folder, explain_os_error, write_whole
from fedflat.experiment.store.lock import Lock, claimed
from fedflat.experiment.store.row_store import FileRows

BEGINNINGS = {
    name for whole in ("partition.json", "status.json", "config.yaml") for name in (whole, f"{whole}.part")
} | {
    "checkpoint",
    "state",
}
"""What may lie in a folder where a run was killed before it had a config: it can be begun again."""
SITES = "experiment.json"
"""In the folder of a run over real sites: the name under which they keep their clients' vectors."""
_HELD_HERE: set[tuple[int, int]] = set()
"""The runs that this process works on, each by the device and the number of the file that is locked."""


class RunFolder:
    """The folder of one run. Nothing in it is ever half-written, except lines that a resumed run cuts off."""

    def __init__(self, path: Path) -> None:
        self._given, self._place = path, _absolute(path)
        self._held: int | None = None

    @property
    def path(self) -> Path:
        """Where it lies: as it was given, or in full once the process works in another directory."""
        return self._given if _absolute(self._given) == self._place else self._place

    @property
    def exists(self) -> bool:
        """Whether there is a run in it."""
        return (self.path / "config.yaml").is_file()

    @property
    def is_over(self) -> bool:
        """Whether there is a run in it that has come to its end."""
        return self.exists and self.status()["status"] in OVER

    @property
    def is_of_sites(self) -> bool:
        """Whether its clients are real sites, where their data and vectors lie."""
        return (self.path / SITES).exists()

    @property
    def goes_on(self) -> str:
        """What goes on with a run that is not over."""
        return "the same flwr run as before" if self.is_of_sites else f"fedflat resume {self.path}"

    @property
    def anew(self) -> str:
        """What can always be done where something of the run is lost, to end a sentence."""
        return f"or run it anew (fedflat run --config {self.path / 'config.yaml'} with another --out)"

    def create(self, config: Config, partition: Mapping[str, Any]) -> None:
        """Make the folder with what describes the run; ``Lock`` while another process does the same."""
        self._be_new()
        # The folder itself may be claimed already, by the sweep that this run belongs to.
        with claimed(self.path / "checkpoint", run=self.path):
            self._be_new()  # another process may have been first
            create_folder(self.path / "state")
            write_whole(self.path / "partition.json", json.dumps(partition) + "\n")
            self.write_status("running")
            write_whole(self.path / "config.yaml", config.to_yaml())

    def _be_new(self) -> None:
        # What lies there comes before the config, which a run that begins meanwhile writes before anything else that is no beginning.
        is_free = not self.path.exists() or (
            self.path.is_dir() and {path.name for path in self.path.iterdir()} <= BEGINNINGS
        )
        if self.exists:
            raise UserError(
                f"there is already a run in {self.path}; go on with it (fedflat resume {self.path}) or choose another --out"
            )
        if not is_free:
            raise UserError(f"{self.path} exists and is not a run; choose another --out")

    def hold(self) -> None:
        """Keep others from working on the same run."""
        try:
            import fcntl
        except ImportError:  # no such locks on Windows
            return
        descriptor = os.open(
            self.path / "config.yaml", os.O_RDWR
        )  # network file systems lock nothing that cannot be written to
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            is_ours = _identity(descriptor) in _HELD_HERE
            os.close(descriptor)
            raise self._taken(is_ours) from None
        self._held = descriptor
        _HELD_HERE.add(_identity(descriptor))

    def _taken(self, is_ours: bool) -> Lock:
        if is_ours:
            return Lock(
                f"this process is working on {self.path} already, in a fedflat.rounds that is still open or in another thread; "
                "end it with .close() or .result(), or choose another out"
            )
        return Lock(f"another process is working on {self.path}; wait for it, or choose another --out")

    def release(self) -> None:
        """Let others work on the run."""
        if self._held is not None:
            _HELD_HERE.discard(_identity(self._held))
            os.close(self._held)
            self._held = None

    # --- reading -----------------------------------------------------------------------------------------------------------------

    def config(self) -> Config:
        """The run's config."""
        if not self.exists:
            raise UserError(
                f"there is no run in {self.path}; expected a folder with a config.yaml (see them with fedflat show runs)"
            )
        return config(read_yaml(self.path / "config.yaml"))

    def status(self) -> dict[str, Any]:
        """How the run ended, or that it has not."""
        found = self._json(self.path / "status.json")
        if not isinstance(found.get("status"), str):
            raise UserError(
                f"{self.path / 'status.json'} is damaged: it does not say how the run stands; put it back as it was, {self.anew}"
            )
        return found

    def partition(self) -> dict[str, Any]:
        """What is known of the partition."""
        return self._json(self.path / "partition.json")

    def metrics(self) -> list[dict[str, Any]]:
        """The evaluations, one record each; a last line cut off by a kill does not count."""
        return self._lines("metrics.jsonl", {"round": int, "test": dict})

    def timing(self) -> list[dict[str, Any]]:
        """Seconds and memory at every evaluation; a round that was repeated after a kill stands twice."""
        return self._lines("timing.jsonl", {"round": int, "seconds": int | float})

    def seconds(self) -> float:
        """How long the run has taken so far."""
        lines = self.timing()
        return float(lines[-1]["seconds"]) if lines else 0.0

    def flatness_seconds(self) -> float:
        """How long looks at flatness have taken, of all the time."""
        return sum(float(line.get("flatness", 0.0)) for line in self.timing())

    def _lines(self, name: str, needed: Mapping[str, type | UnionType]) -> list[dict[str, Any]]:
        path = self.path / name
        try:
            whole = path.read_text().rpartition("\n")[0] if path.exists() else ""
            lines = [json.loads(line) for line in whole.splitlines()]
        except ValueError:
            raise UserError(f"{path} is damaged: one of its lines is not JSON; run it anew") from None
        for number, line in enumerate(lines, 1):
            if not (isinstance(line, dict) and all(isinstance(line.get(key), kind) for key, kind in needed.items())):
                raise UserError(
                    f"{path} is damaged: line {number} is no record with {' and '.join(needed)}; put it back as it was, {self.anew}"
                )
        return lines

    def _json(self, path: Path) -> dict[str, Any]:
        try:
            value = json.loads(path.read_text())
        except (OSError, ValueError):
            value = None
        if not isinstance(value, dict):
            raise UserError(f"{path} is missing or damaged; the run cannot be read, run it anew")
        return value

    # --- writing -----------------------------------------------------------------------------------------------------------------

    def write_status(self, status: str, **more: Any) -> None:
        """Say how the run stands."""
        write_whole(self.path / "status.json", json.dumps({"status": status, **more}) + "\n")

    def append(self, name: str, record: Mapping[str, Any]) -> None:
        """Add one line to a log."""
        path = self.path / name
        with explain_os_error(path), path.open("a") as file:
            file.write(json.dumps(record) + "\n")

    def cut_metrics(self, length: int) -> None:
        """Cut the metrics back to where a checkpoint saw them; refused where they are shorter already."""
        path, found = self.path / "metrics.jsonl", self.metrics_length()
        if found < length:
            raise UserError(
                f"{path} has lost lines: it has {found} bytes, and the run's checkpoint needs {length}; "
                f"put the file back as it was, {self.anew}"
            )
        with explain_os_error(path):
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

    def rounds_of(self, file: str) -> int | None:
        """After how many rounds the tensors of a file were written; none where it is not there."""
        return int(self.read_tensors(file)[1]["rounds"]) if (self.path / file).exists() else None

    def read_tensors(self, name: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """What ``write_tensors`` wrote."""
        path = self.path / name
        try:
            path.open("rb").close()  # safetensors takes any file that cannot be opened for one that is missing
            with safe_open(path, "pt") as file:
                tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
                about = json.loads((file.metadata() or {})["fedflat"])
        except FileNotFoundError:
            raise UserError(f"{path} is missing; the run wrote none (yet)") from None
        except (PermissionError, IsADirectoryError) as error:
            raise UserError(
                f"cannot read {path}: {(error.strerror or str(error)).lower()}; make it a file that you may read"
            ) from None
        except (OSError, SafetensorError, KeyError, ValueError):
            raise UserError(f"{path} is damaged or not fedflat's; run it anew") from None
        return tensors, about


def _absolute(path: Path) -> Path:
    """A path from the root on; as it is where the directory that the process works in is gone."""
    try:
        return path.absolute()
    except FileNotFoundError:
        return path


def _identity(descriptor: int) -> tuple[int, int]:
    """An open file by its device and its number there, which are the same by whatever path it was opened."""
    found = os.fstat(descriptor)
    return found.st_dev, found.st_ino


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
