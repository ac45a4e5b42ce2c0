"""Checkpoints: when one is due, what it contains, and whether it still matches the run folder."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Self

import torch
from torch import Tensor

from fedflat.algorithms.algorithm import States, flat_state, nested_state
from fedflat.averaging import AverageState
from fedflat.engines.round.contract import Cost, ModelState
from fedflat.errors import UserError
from fedflat.experiment.config import Config, config, describe_difference
from fedflat.experiment.store.client_states import RowStore
from fedflat.experiment.store.run_folder import RunFolder

CHECKPOINT = "checkpoint/state.safetensors"
ROUNDS_BETWEEN, SECONDS_BETWEEN = 10, 5.0
"""Default interval between checkpoints: a multiple of 10 rounds that lasts at least 5 seconds."""
MAX_TIME_FRACTION = 1 / 20
"""Largest fraction of a run's time that default checkpoints may take."""


@dataclass
class ServerState:
    """The model and state that the server holds between rounds."""

    rounds: int
    """Number of completed rounds."""
    model: ModelState
    states: States
    """Server state of the algorithm, by slot."""
    cost: Cost

    def tensors(self) -> dict[str, Tensor]:
        """All tensors of the model and the algorithm's server state, under their names in a checkpoint."""
        return {
            "weights": self.model.weights,
            "buffers": self.model.buffers,
            **{f"integers/{name}": value for name, value in self.model.integer_buffers.items()},
            **{f"server/{name}": value for name, value in flat_state(self.states).items()},
        }

    @classmethod
    def from_checkpoint(cls, tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> Self:
        """Restore the state from a checkpoint's tensors and header; the inverse of ``tensors``."""
        model = ModelState(tensors["weights"], tensors["buffers"], with_prefix(tensors, "integers/"))
        states = nested_state(with_prefix(tensors, "server/"))
        return cls(header["rounds"], model, states, Cost(**header["cost"]))


class CheckpointInterval:
    """Decides when a checkpoint is due.

    Args:
        every: number of rounds between checkpoints; None limits the time they take to ``MAX_TIME_FRACTION``.
    """

    def __init__(self, every: int | None) -> None:
        self._every = every
        # When the last checkpoint was complete, and how many seconds it took.
        self._last_end = time.monotonic()
        self._last_duration = 0.0

    def is_due(self, rounds: int) -> bool:
        """Whether to write a checkpoint after ``rounds`` rounds.

        By default this is so every ``ROUNDS_BETWEEN`` rounds, if enough time has passed since the last checkpoint.
        """
        if self._every is not None:
            return rounds % self._every == 0
        # After a checkpoint that took d seconds, at least d / MAX_TIME_FRACTION seconds of training follow.
        min_seconds = max(SECONDS_BETWEEN, self._last_duration / MAX_TIME_FRACTION)
        return rounds % ROUNDS_BETWEEN == 0 and time.monotonic() - self._last_end >= min_seconds

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
    settings: Config,
    loss: float | None,
    frozen: str,
) -> None:
    """Write a checkpoint; until it is complete, the previous one stays valid.

    Args:
        folder: the run folder.
        server: model and state of the server.
        averages: the averages of the run, by name.
        stores: row stores that belong to the checkpoint; their cached rows are flushed first.
        settings: the run's config.
        loss: mean training loss of the last round, if finite.
        frozen: fingerprint of the model's frozen parameters; empty if there are none.
    """
    for store in stores.values():
        store.flush()
    tensors = server.tensors()
    for name, average in averages.items():
        tensors |= {f"average/{name}/{key}": value for key, value in average.tensors().items()}
    header = {
        "rounds": server.rounds,
        "metrics": folder.metrics_length(),  # a resumed run drops the lines after it
        "cost": asdict(server.cost),
        "loss": loss,
        "rows": {name: store.count for name, store in stores.items()},
        "settings": settings.fixed_settings(),
    }
    if frozen:
        header["frozen"] = frozen
    folder.write_tensors(CHECKPOINT, tensors, header)
    for store in stores.values():
        store.commit(server.rounds)


def last_checkpoint(
    folder: RunFolder, settings: Config, frozen: str, device: torch.device
) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """Read the last checkpoint and check that it belongs to this experiment.

    Args:
        folder: the run folder.
        settings: the config of the run that is about to resume.
        frozen: fingerprint of the model's frozen parameters.
        device: where to put the tensors.

    Returns:
        Tensors by name and the header, or None if there is no checkpoint.

    Raises:
        UserError: the settings or the frozen part of the model have changed since the run began.
    """
    if not (folder.path / CHECKPOINT).exists():
        return None
    tensors, header = folder.read_tensors(CHECKPOINT)
    current = settings.fixed_settings()
    differing = describe_difference(config(current), config(header.get("settings", current)))
    if differing:
        file = folder.path / "config.yaml"
        raise UserError(
            f"{file} was changed since the run began ({differing}); restore it, or start a new run with the new "
            f"settings (fedflat run --config {file} with another --out)"
        )
    if header.get("frozen", "") != frozen:
        raise UserError(
            f"the frozen part of the model differs from the one that the run in {folder.path} began with; "
            "restore the initial weights, or pass the same model again"
        )
    return {name: tensor.to(device) for name, tensor in tensors.items()}, header


def require_rows(folder: RunFolder, stores: Mapping[str, RowStore], header: Mapping[str, Any]) -> None:
    """Raise a ``UserError`` if row stores have lost rows that the checkpoint with this header needs.

    The header states the number of rows of each store, by the store's name; a store that it does not list has no
    required number.
    """
    for name, store in stores.items():
        present = store.readable(header["rounds"])
        needed = header.get("rows", {}).get(name, present)
        if present != needed:
            raise UserError(
                f"{folder.path / 'state' / name} has lost rows: it has {present}, but the checkpoint needs {needed}; "
                f"restore the folder, {folder.remedy}"
            )


def with_prefix(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors whose names start with ``prefix``, by the rest of their names."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
