"""Checkpoints: when one is due, what it contains, and whether it still matches the run folder."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from fedflat.algorithms.algorithm import States, flat_state, nested_state
from fedflat.averaging import AverageState
from fedflat.engines.round.contract import Cost, ModelState
from fedflat.errors import UserError
from fedflat.experiment.config import Config, describe_difference, parse_config
from fedflat.experiment.store.client_states import RowStore
from fedflat.experiment.store.content import check_first_round
from fedflat.experiment.store.files import DamagedFile, explain_os_error, rename
from fedflat.experiment.store.provenance import ChangedInputs
from fedflat.experiment.store.run_folder import RunFolder

CHECKPOINT = "checkpoint/state.safetensors"
PREVIOUS = "checkpoint/previous.safetensors"
"""The checkpoint before the last one. Only runs without rows keep it: row stores have only the last one's rows."""
SECONDS_BETWEEN = 5.0
"""Least number of seconds between default checkpoints."""
MAX_TIME_FRACTION = 1 / 20
"""Largest fraction of a run's time that default checkpoints may take."""
_HEADER = frozenset({"format", "rounds", "metrics", "cost", "loss", "rows", "settings"})
"""Keys in the header of every checkpoint."""


@dataclass
class ServerState:
    """The model and state that the server holds between rounds."""

    rounds: int
    """Number of completed rounds."""
    model: ModelState
    states: States
    """Server state of the algorithm, by slot."""
    cost: Cost
    """Cost of all completed rounds."""

    def tensors(self) -> dict[str, Tensor]:
        """All tensors of the model and the algorithm's server state, under their names in a checkpoint."""
        server = {f"server/{name}": value for name, value in flat_state(self.states).items()}
        return {**_model_tensors(self.model), **server}

    @classmethod
    def from_checkpoint(cls, tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> Self:
        """Restore the state from a checkpoint's tensors and header; the inverse of ``tensors``."""
        model = ModelState(tensors["weights"], tensors["buffers"], with_prefix(tensors, "integers/"))
        states = nested_state(with_prefix(tensors, "server/"))
        return cls(header["rounds"], model, states, Cost(**header["cost"]))


def _model_tensors(model: ModelState) -> dict[str, Tensor]:
    """The tensors of a model under their names in a checkpoint."""
    integers = {f"integers/{name}": value for name, value in model.integer_buffers.items()}
    return {"weights": model.weights, "buffers": model.buffers, **integers}


class TimelineState(NamedTuple):
    """The state of virtual time between rounds: tensors by name, and plain values."""

    tensors: dict[str, Tensor]
    values: dict[str, Any]


class Checkpoint(NamedTuple):
    """The content of a checkpoint file, and its name in the run folder."""

    file: str
    tensors: dict[str, Tensor]
    header: dict[str, Any]


class CheckpointInterval:
    """Decides when a checkpoint is due.

    Args:
        every: number of rounds between checkpoints; if None, a checkpoint is due after ``SECONDS_BETWEEN`` or, if
            checkpoints are slow, as soon as they take at most ``MAX_TIME_FRACTION`` of the time.
    """

    def __init__(self, every: int | None) -> None:
        self._every = every
        # When the last checkpoint was complete, and how many seconds it took.
        self._last_end = time.monotonic()
        self._last_duration = 0.0

    def is_due(self, rounds: int) -> bool:
        """Whether to write a checkpoint after ``rounds`` rounds."""
        if self._every is not None:
            return rounds % self._every == 0
        # After a checkpoint that took d seconds, at least d / MAX_TIME_FRACTION seconds of training follow.
        return time.monotonic() - self._last_end >= max(SECONDS_BETWEEN, self._last_duration / MAX_TIME_FRACTION)

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Time the writing of a checkpoint within the context."""
        start = time.monotonic()
        yield
        self._last_end = time.monotonic()
        self._last_duration = self._last_end - start


def write_checkpoint(
    folder: RunFolder,
    server: ServerState,
    averages: Mapping[str, AverageState],
    stores: Mapping[str, RowStore],
    config: Config,
    loss: float | None,
    frozen: str,
    timeline: TimelineState,
) -> None:
    """Write a checkpoint; until it is complete, the previous one stays valid.

    The rows and metrics that the checkpoint refers to are on disk before the checkpoint itself is written.

    Args:
        folder: the run folder.
        server: model and state of the server.
        averages: the averages of the run, by name.
        stores: row stores that belong to the checkpoint; their cached rows are flushed first.
        config: the run's config.
        loss: mean training loss of the last round, if finite.
        frozen: fingerprint of the model's frozen parameters; empty if there are none.
        timeline: the state of virtual time; empty for a run without it.
    """
    for store in stores.values():
        store.flush()
    folder.sync_metrics()
    tensors = server.tensors()
    for name, average in averages.items():
        tensors |= {f"average/{name}/{key}": value for key, value in average.tensors().items()}
    tensors |= {f"timeline/{name}": value for name, value in timeline.tensors.items()}
    header: dict[str, Any] = {
        "rounds": server.rounds,
        "metrics": folder.metrics_length(),  # in bytes; a resumed run drops the lines that follow
        "cost": asdict(server.cost),
        "loss": loss,
        "rows": {name: store.summary for name, store in stores.items()},
        "settings": config.fixed_settings(),
    }
    if frozen:
        header["frozen"] = frozen
    if config.engine.compile == "on" and server.model.weights.device.type == "cpu":
        header["compile"] = "on"
    if timeline.values:
        header["timeline"] = timeline.values
    current = folder.path / CHECKPOINT
    has_rows = any(count for count, _ in header["rows"].values())
    # Keep the current checkpoint, to which readers fall back if the new one is damaged. With rows it would be useless,
    # because later rounds overwrite the rows to which it refers.
    if current.exists() and not has_rows:
        with explain_os_error(current):
            rename(current, folder.path / PREVIOUS)
    folder.write_tensors(CHECKPOINT, tensors, header)
    for store in stores.values():
        store.commit(server.rounds)


def last_checkpoint(
    folder: RunFolder, config: Config, frozen: str, device: torch.device
) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """Read the last checkpoint, and check that settings and frozen parameters are those of the run that wrote it.

    Args:
        folder: the run folder.
        config: the config of the run that is about to resume.
        frozen: fingerprint of the model's frozen parameters.
        device: where to put the tensors.

    Returns:
        Tensors by name and the header, or None if there is no checkpoint.

    Raises:
        UserError: the settings or the frozen part of the model have changed since the run began.
        DamagedFile: the checkpoint is damaged, and there is no previous one.
    """
    checkpoint = newest_checkpoint(folder)
    if checkpoint is None:
        return None
    _, tensors, header = checkpoint
    if checkpoint.file == PREVIOUS:  # it becomes the last one, so that the next checkpoint does not replace it
        with explain_os_error(folder.path / CHECKPOINT):
            rename(folder.path / PREVIOUS, folder.path / CHECKPOINT)
    require_same_settings(folder, config, header)
    if device.type == "cpu" and header.get("compile") == "on" and config.engine.compile == "off":
        raise UserError(
            f"{folder.path / 'config.yaml'} has engine.compile=off, but the checkpoint was written with "
            "engine.compile=on, with which results differ on a CPU; restore it"
        )
    if header.get("frozen", "") != frozen:
        weights = f"the initial weights {config.init}" if config.init else "the initial weights"
        raise ChangedInputs(
            f"the frozen part of the model differs from the one that the run in {folder.path} began with, and the "
            f"checkpoint does not contain it; restore {weights}, or pass the same model again"
        )
    return {name: tensor.to(device) for name, tensor in tensors.items()}, header


def has_checkpoint(folder: RunFolder) -> bool:
    """Whether the run has written a checkpoint; it may be damaged."""
    return (folder.path / CHECKPOINT).exists() or (folder.path / PREVIOUS).exists()


def checkpoint_rounds(folder: RunFolder) -> int | None:
    """The number of completed rounds at the newest checkpoint; None if there is none.

    Raises:
        UserError: the checkpoint cannot be read or is of another run.
    """
    checkpoint = newest_checkpoint(folder)
    if checkpoint is None:
        return None
    require_same_settings(folder, folder.config(), checkpoint.header)
    return int(checkpoint.header["rounds"])


def newest_checkpoint(folder: RunFolder) -> Checkpoint | None:
    """Read the last checkpoint, or the previous one if the last one is damaged or missing; None if there is neither.

    A run that was killed after renaming the last checkpoint and before writing the next has only the previous one.
    """
    if not has_checkpoint(folder):
        return None
    last, previous = folder.path / CHECKPOINT, folder.path / PREVIOUS
    try:
        if last.exists():
            return _read(folder, CHECKPOINT)
    except DamagedFile as error:
        if not previous.exists():
            raise DamagedFile(f"{error}; to repeat the run in this folder, {_restart_hint(folder)}") from None
        warnings.warn(f"{last} is damaged; the checkpoint before it is used instead", stacklevel=2)
    return _read(folder, PREVIOUS)


def _read(folder: RunFolder, file: str) -> Checkpoint:
    """Read a checkpoint file; raises ``DamagedFile`` if it is not one."""
    tensors, header = folder.read_tensors(file)
    if not header.keys() >= _HEADER:
        raise DamagedFile(f"{folder.path / file} is not a checkpoint; restore it, {folder.remedy}")
    return Checkpoint(file, tensors, header)


def require_same_settings(folder: RunFolder, config: Config, header: Mapping[str, Any]) -> None:
    """Raise a ``UserError`` if settings in ``config`` differ from those in a checkpoint's header."""
    ours, theirs = (parse_config(each.fixed_settings()) for each in (config, parse_config(header["settings"])))
    differing = describe_difference(ours, theirs)
    if differing:
        file = folder.path / "config.yaml"
        raise UserError(
            f"{file} was changed since the run began, or the checkpoint is of another run ({differing}); restore it, "
            f"or start a new run with the new settings (fedflat run --config {file} with another --out)"
        )


def require_same_shapes(folder: RunFolder, tensors: Mapping[str, Tensor], model: ModelState) -> None:
    """Raise ``DamagedFile`` unless a checkpoint has the tensors of a model like ``model``, with the same shapes.

    Server state is not compared, because its shapes may change during a run.
    """
    for name, tensor in _model_tensors(model).items():
        present = list(tensors[name].shape) if name in tensors else "missing"
        if present != list(tensor.shape):
            raise DamagedFile(
                f"{folder.path / CHECKPOINT} is of another model or dataset: {name} is {present}, but the run needs "
                f"{list(tensor.shape)}; restore the checkpoint and the data, {folder.remedy}"
            )


def _restart_hint(folder: RunFolder) -> str:
    """Advice on how to repeat a run in its folder, for messages."""
    return f"delete {(folder.path / CHECKPOINT).parent} and then use {folder.resume_command}: it starts from round 0"


def require_rows(folder: RunFolder, stores: Mapping[str, RowStore], header: Mapping[str, Any]) -> None:
    """Raise ``DamagedFile`` unless the row stores contain exactly the rows of the checkpoint with this header.

    For each store, the header states the number of rows and the sum of their checksums.
    """
    for name, store in stores.items():
        path = folder.path / "state" / name
        try:
            present, checksum = store.verify(header["rounds"])
        except DamagedFile as error:
            raise DamagedFile(f"{error}; restore the folder, or {_restart_hint(folder)}") from None
        needed, needed_checksum = header["rows"][name]
        if (present, checksum) != (needed, needed_checksum):
            problem = f"{path} has lost rows: it has {present}, but the checkpoint needs {needed}"
            if present >= needed:
                problem = f"{path / 'index.bin'} is damaged: its rows are not those of the checkpoint"
            raise DamagedFile(f"{problem}; restore the folder, or {_restart_hint(folder)}")


def require_same_run(
    folder: RunFolder,
    tensors: Mapping[str, Tensor],
    header: Mapping[str, Any],
    initial: ModelState,
    stores: Mapping[str, RowStore],
) -> list[dict[str, Any]]:
    """Check that a checkpoint, rows and metrics belong to the run that is resumed; return the evaluations up to it.

    Args:
        folder: the run folder, which is not changed.
        tensors: tensors of the checkpoint.
        header: its header.
        initial: the model before the first round.
        stores: the run's row stores.

    Raises:
        DamagedFile: a file has lost data or belongs to another run.
    """
    require_same_shapes(folder, tensors, initial)
    require_rows(folder, stores, header)
    path, present, needed = folder.path / "metrics.jsonl", folder.metrics_length(), header["metrics"]
    if present < needed:
        raise DamagedFile(
            f"{path} has lost lines: it has {present} bytes, but the checkpoint needs {needed}; "
            f"restore it, {folder.remedy}"
        )
    history = folder.metrics(needed)  # a killed run may have left damaged lines after the checkpoint
    check_first_round(path, folder.config(), history, folder.remedy)
    last = history[-1] if history else {"round": -1}
    belongs = last["round"] <= header["rounds"]
    if last["round"] == header["rounds"]:
        belongs = last.get("train_loss") == header["loss"] and last.get("samples") == header["cost"]["samples"]
    if not belongs:
        raise DamagedFile(
            f"{path} is of another run: its line of round {last['round']} does not match the checkpoint after round "
            f"{header['rounds']}; restore it, {folder.remedy}"
        )
    return history


def with_prefix(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors whose names start with ``prefix``, by the rest of their names."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
