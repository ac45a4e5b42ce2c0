"""The folder of a run, with its config, status, metrics and models; and ``Record``, a run as plain data."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from shlex import quote
from typing import Any

import torch
from torch import Tensor

from fedflat.algorithms import algorithm
from fedflat.averaging import average_name
from fedflat.engines.problem.task import with_targets_of
from fedflat.engines.round.contract import ModelState
from fedflat.errors import MachineFailed, UserError, system_reason
from fedflat.experiment.config import Config, parse_config
from fedflat.experiment.stopping import ENDED_STATUSES
from fedflat.experiment.store import content, tensor_files
from fedflat.experiment.store.client_states import FileRowStore
from fedflat.experiment.store.files import (
    LOCK_FILE,
    DamagedFile,
    Lock,
    append,
    create_folder,
    explain_os_error,
    read_log,
    read_yaml,
    sync,
    truncate,
    write_atomically,
)
from fedflat.registry import UNUSED, load_recorded, plugins_to_record

PLUGINS = "plugins.json"
"""File with the paths and sha256 of the run's plugins, as returned by ``plugins_to_record``."""
LOCK_TIMEOUT = 0.5
"""Seconds to wait for a run's lock, because ``is_free`` holds it for a moment when another process shows the run."""
_DESCRIPTION = ("partition.json", PLUGINS, "status.json", "config.yaml")
LEFTOVERS = {*_DESCRIPTION, *(f"{name}.part" for name in _DESCRIPTION), "checkpoint", "state", LOCK_FILE}
"""Files and folders left by a run that was killed before it wrote its config; a folder with only these is reused."""
SITES = "experiment.json"
"""File in the folder of a run with real sites; it holds the name under which the sites store their state."""


class RunFolder:
    """The folder of one run. All files are written atomically, except logs, whose incomplete last line is ignored.

    Methods that read a file raise ``DamagedFile`` if it is missing or damaged, except for files that a reader can do
    without: ``timing.jsonl`` and ``plugins.json``.
    """

    def __init__(self, path: Path) -> None:
        self._given, self._absolute = path, _absolute(path)
        self._lock: Lock | None = None

    @property
    def path(self) -> Path:
        """The path as given, or the absolute path once the process has changed its working directory."""
        return self._given if _absolute(self._given) == self._absolute else self._absolute

    @property
    def exists(self) -> bool:
        """Whether the folder contains a run."""
        return (self.path / "config.yaml").is_file()

    @property
    def has_ended(self) -> bool:
        """Whether the folder contains a run that has ended; False if status.json is damaged, which resuming repairs."""
        try:
            return self.exists and self.status()["status"] in ENDED_STATUSES
        except DamagedFile:
            return False

    @property
    def has_real_sites(self) -> bool:
        """Whether the run's clients are real sites, which hold their data and state."""
        return (self.path / SITES).exists()

    @property
    def resume_command(self) -> str:
        """The command that continues the run, for messages."""
        return "the same flwr run as before" if self.has_real_sites else f"fedflat resume {quote(str(self.path))}"

    @property
    def remedy(self) -> str:
        """The end of an error message about lost or damaged files, after the advice to restore them."""
        return f"or start again (fedflat run --config {self.path / 'config.yaml'} with another --out)"

    def create(self, config: Config, inputs: Mapping[str, Any], metric: str, lower_is_better: bool = False) -> None:
        """Create the folder of a new run.

        Args:
            config: the run's config.
            inputs: content of ``partition.json``, as returned by ``provenance``.
            metric: name of the primary metric.
            lower_is_better: whether lower values of that metric are better.

        Raises:
            LockedError: another process is creating the same folder.
        """
        self._require_new()
        self.acquire_lock()
        try:
            self._require_new()  # another process may have been first
            create_folder(self.path / "state")
            self._write(self.path / "partition.json", json.dumps(inputs) + "\n")
            if plugins := plugins_to_record(config.to_yaml()):
                self._write(self.path / PLUGINS, json.dumps(plugins) + "\n")
            averages = [average_name(average) for average in algorithm(config.algorithm).averages]
            self.write_status("running", metric=metric, lower_is_better=lower_is_better, averages=averages)
            # The config comes last, because a folder with a config counts as a run.
            self._write(self.path / "config.yaml", config.to_yaml())
        except BaseException:
            self.release_lock()
            raise

    def _require_new(self) -> None:
        """Raise a ``UserError`` if the folder contains a run or anything else that a new run would overwrite."""
        # Check for a config last: a run that begins now writes its config before any file that is not in LEFTOVERS.
        if self.path.is_dir():
            is_free = {path.name for path in self.path.iterdir()} <= LEFTOVERS
        else:
            is_free = not self.path.exists()
        if self.exists:
            raise UserError(
                f"{self.path} already has a run; continue it ({self.resume_command}), remove it or choose another --out"
            )
        if not is_free:
            raise UserError(f"{self.path} exists and is not a run; choose another --out")

    def acquire_lock(self) -> None:
        """Lock the run for this process; raises ``LockedError`` if the run is already locked.

        The lock is on the subfolder ``checkpoint``, because a sweep locks the run folder itself before it starts a run.
        """
        if self._lock is None:
            lock = Lock(self.path / "checkpoint", self.path)
            lock.acquire(LOCK_TIMEOUT)
            self._lock = lock

    def release_lock(self) -> None:
        """Release the lock, if this object has it."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def config(self) -> Config:
        """The run's config; its algorithm need not be registered in this process."""
        if not self.exists:
            hint = "list runs: fedflat show FOLDER, for example fedflat show runs"
            # Two levels only: the user may have named a folder such as / by mistake.
            if configs := sorted(self.path.glob("*/config.yaml")) or sorted(self.path.glob("*/*/config.yaml")):
                hint = f"choose one of its {len(configs)} runs, e.g. {configs[0].parent}, or show all: "
                hint += f"fedflat show {self.path}, in Python fedflat.Comparison.load('{self.path}')"
                if len(configs) == 1:
                    hint = f"did you mean {configs[0].parent}?"
            raise UserError(f"there is no run in {self.path}; expected a folder with a config.yaml ({hint})")
        try:
            return parse_config(read_yaml(self.path / "config.yaml"), is_stored=True)
        except UserError as error:
            raise DamagedFile(f"cannot read {self.path / 'config.yaml'}: {error}") from None

    def load_plugins(self) -> None:
        """Load the plugins that the run uses, so that the names in its config are registered."""
        load_recorded(self.path, self.plugins())

    def plugins(self) -> dict[str, str]:
        """The plugins that the run uses: sha256 by absolute path; empty without plugins.json, or if it is damaged."""
        try:
            plugins = self._read_json(PLUGINS) if (self.path / PLUGINS).exists() else {}
            return {path: digest for path, digest in plugins.items() if path != UNUSED}
        except DamagedFile as error:
            warnings.warn(f"{error}; until that file is restored, pass plugins with --plugin", stacklevel=2)
            return {}

    def status(self) -> dict[str, Any]:
        """The content of status.json.

        Its keys are ``status``, the primary ``metric``, ``lower_is_better`` and ``averages``. A run that has ended or
        paused also has ``rounds`` and ``reason``.
        """
        status = self._read_json("status.json")
        content.check_status(self.path / "status.json", status, self.resume_command)
        return status

    def partition(self) -> dict[str, Any]:
        """The content of partition.json: the partition's description and the fingerprints of the run's inputs."""
        partition = self._read_json("partition.json")
        content.check_partition(self.path / "partition.json", partition, self.config(), self.remedy)
        return partition

    def metrics(self, length: int | None = None) -> list[dict[str, Any]]:
        """The evaluations in order; an incomplete last line, which a killed run may leave, is ignored.

        Args:
            length: number of bytes to read; default: all.
        """
        path = self.path / "metrics.jsonl"
        return content.check_metrics(path, read_log(path, {"round": int, "test": dict}, length), self.remedy)

    def timing(self) -> list[dict[str, Any]]:
        """Elapsed seconds and memory at every evaluation; damaged lines are left out."""
        lines = read_log(self.path / "timing.jsonl", {"round": int, "seconds": int | float})
        return [line for line in lines if line is not None]

    def seconds(self) -> float:
        """Duration of the run up to its last evaluation, in seconds."""
        lines = self.timing()
        return float(lines[-1]["seconds"]) if lines else 0.0

    def flatness_seconds(self) -> float:
        """Seconds spent on flatness measurements during the run."""
        return sum(float(line.get("flatness", 0.0)) for line in self.timing())

    def _read_json(self, name: str) -> dict[str, Any]:
        """The content of a JSON file that must hold an object."""
        path = self.path / name
        try:
            value = json.loads(path.read_text())
        except (OSError, ValueError):
            value = None
        if not isinstance(value, dict):
            again = ""
            if name == "status.json" and any(self.path.glob("checkpoint/*.safetensors")):
                again = f"write it again ({self.resume_command}), "
            raise DamagedFile(f"{path} is missing or damaged; {again}restore it, {self.remedy}")
        return value

    def write_status(self, status: str, **details: Any) -> None:
        """Write status.json, with ``details`` as further keys."""
        self._write(self.path / "status.json", json.dumps({"status": status, **details}) + "\n")

    @staticmethod
    def _write(path: Path, text: str) -> None:
        """Write a file of a run that this process has locked."""
        write_atomically(path, text, exclusive=True)

    def append(self, name: str, entry: Mapping[str, Any]) -> None:
        """Append an entry to the log ``name``, as one line of JSON."""
        append(self.path / name, json.dumps(entry) + "\n")

    def sync_metrics(self) -> None:
        """Make the metrics durable, before a checkpoint or the status of an ended run relies on them."""
        sync(self.path / "metrics.jsonl")

    def rewind_logs(self, metrics_length: int, rounds: int) -> None:
        """Cut the logs to their state after ``rounds`` rounds, when metrics.jsonl had ``metrics_length`` bytes."""
        truncate(self.path / "metrics.jsonl", metrics_length)
        timing = [line for line in self.timing() if line["round"] <= rounds]
        self._write(self.path / "timing.jsonl", "".join(json.dumps(line) + "\n" for line in timing))

    def metrics_length(self) -> int:
        """Size of metrics.jsonl in bytes."""
        path = self.path / "metrics.jsonl"
        return path.stat().st_size if path.exists() else 0

    def open_rows(self, name: str, width: int, dtype: torch.dtype) -> FileRowStore:
        """Open the row store ``name`` of this run, with ``width`` scalars per row."""
        return FileRowStore(self.path / "state" / name, width, dtype)

    def write_tensors(self, name: str, tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> None:
        """Write a safetensors file; a format version and a checksum are added to the values of ``header``."""
        tensor_files.write_tensors(self.path / name, tensors, header, exclusive=True)

    def rounds_in_file(self, name: str) -> int | None:
        """The number of completed rounds when a tensor file was written; None if there is no such file."""
        if not (self.path / name).exists():
            return None
        _, header = self.read_tensors(name)
        return int(header["rounds"])

    def read_tensors(self, name: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The tensors and header that ``write_tensors`` wrote."""
        path, advice = self.path / name, f"restore it, {self.remedy}"
        if "/" not in name:  # a final model, not a checkpoint or a model saved during the run
            advice = f"if the run still has its checkpoint, write it again: {self.resume_command}; otherwise {advice}"
        try:
            tensors, header = tensor_files.read_tensors(path)
        except FileNotFoundError:
            if not self.has_ended:
                advice = f"the run has not written it; if the run was interrupted: {self.resume_command}"
            raise DamagedFile(f"{path} is missing; {advice}") from None
        except OSError as error:
            reason = system_reason(error)
            raise MachineFailed(f"cannot read {path}: {reason}; make it a readable file") from None
        except DamagedFile as error:
            raise DamagedFile(f"{error}; {advice}") from None
        if not header:
            raise DamagedFile(f"{path} is damaged or was not written by fedflat; {advice}")
        return tensors, header


def _absolute(path: Path) -> Path:
    """The absolute path; unchanged if the working directory no longer exists."""
    try:
        return path.absolute()
    except FileNotFoundError:
        return path


STATISTICS_FILE = "statistics.safetensors"
"""File with the BatchNorm statistics that clients kept, by client number."""
SNAPSHOTS = "models"
"""Folder of the models saved during training (``evaluation.save_every``)."""


@dataclass(frozen=True)
class Record:
    """A run as plain data: config, evaluations and outcome."""

    config: Config
    """The complete config of the run."""
    history: list[dict[str, Any]]
    """The run's evaluations in order, one dictionary each, as in ``metrics.jsonl``."""
    status: str
    """State of the run: ``running``, ``paused``, ``finished``, ``stopped`` or ``diverged``."""
    reason: str
    """Why the run stopped early or diverged; empty otherwise."""
    seconds: float
    """Wall-clock time of the run so far in seconds, without the time between interruption and resumption."""
    models: dict[str, ModelState] = field(repr=False)
    """Final models by name; empty if the record was read from disk."""
    folder: RunFolder | None = None
    """The run folder; None for a run in memory."""
    user_objects: dict[str, Any] = field(default_factory=dict, repr=False)
    """User-supplied objects under ``data``, ``model`` and ``task``, for a run that was made in this process."""
    statistics: dict[int, Tensor] = field(default_factory=dict, repr=False)
    """BatchNorm statistics by client number, if clients keep their own and the run was made in this process."""
    rounds: int = 0
    """Number of completed rounds; the last round need not have been evaluated."""
    metric: str = "accuracy"
    """Name of the primary metric, by which the task compares models."""
    lower_is_better: bool = False
    """Whether lower values of the primary metric are better."""
    averages: tuple[str, ...] = ()
    """Names of the algorithm's averages, e.g. ``wima(window=50)``."""

    @property
    def display_name(self) -> str:
        """Path of the run folder, for messages; ``this run`` for a run in memory."""
        return str(self.folder.path) if self.folder else "this run"

    @property
    def evaluated(self) -> list[str]:
        """Names of the models in the last evaluation."""
        return list(self.history[-1]["test"]) if self.history else []

    @cached_property
    def input_fingerprints(self) -> dict[str, str]:
        """Fingerprints of the inputs, such as ``data``, as its folder records them; in memory, of the user objects."""
        from fedflat.experiment.store.provenance import fingerprints, recorded_fingerprints  # imports this module

        recorded = recorded_fingerprints(self.folder) if self.folder else {}
        data = self.user_objects.get("data")
        data = None if data is None else with_targets_of(data, self.config.training.task)
        return recorded or fingerprints({**self.user_objects, "data": data})


def load_record(path: Path) -> Record:
    """The record of a run folder; models stay on disk."""
    folder = RunFolder(path)
    config = folder.config()
    status, history = folder.status(), folder.metrics()
    content.check_rounds(path, config, status, history, folder.remedy)
    last_evaluated_round = history[-1]["round"] if history else config.init_rounds
    return Record(
        config,
        history,
        status["status"],
        status.get("reason", ""),
        folder.seconds(),
        models={},
        folder=folder,
        rounds=status.get("rounds", last_evaluated_round),  # a running run has no rounds in its status
        metric=status.get("metric", Record.metric),
        lower_is_better=status.get("lower_is_better", Record.lower_is_better),
        averages=tuple(status.get("averages", ())),
    )


def client_statistics(record: Record) -> dict[int, Tensor]:
    """The BatchNorm statistics that clients kept, by client number, from memory or from the run folder."""
    if record.statistics or record.folder is None or not (record.folder.path / STATISTICS_FILE).exists():
        return record.statistics
    tensors, _ = record.folder.read_tensors(STATISTICS_FILE)
    return {int(number): statistics for number, statistics in tensors.items()}


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
    pattern = re.compile(r"round-(\d+)" + re.escape(model_file(name).removeprefix("model")))
    matches = (pattern.fullmatch(path.name) for path in (run / SNAPSHOTS).glob("round-*"))
    return sorted(int(match[1]) for match in matches if match)


def remove_snapshots_after(run: Path, rounds: int) -> None:
    """Delete models saved after the checkpoint that a resumed run restarts from."""
    for path in (run / SNAPSHOTS).glob("round-*"):
        match = re.match(r"round-(\d+)\.", path.name)
        if match and int(match[1]) > rounds:
            with explain_os_error(path, "remove"):
                path.unlink()
