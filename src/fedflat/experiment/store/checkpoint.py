"""What a run goes on from: when checkpoints are due, where the last one lies, and whether all that belongs to it is still there."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from fedflat.errors import UserError
from fedflat.experiment.config import Config, config, difference
from fedflat.experiment.store.row_store import Rows
from fedflat.experiment.store.run_folder import RunFolder

CHECKPOINT = "checkpoint/state.safetensors"
ROUNDS_BETWEEN, SECONDS_BETWEEN = 10, 5.0
"""Where nothing else is asked for: rounds from one checkpoint to the next, and the least time, since rounds may be faster than a disk."""
MOST_OF_THE_TIME = 1 / 20
"""No more of a run's time than this goes into checkpoints that nobody asked for."""


class Pace:
    """When a checkpoint is due: every so many rounds, or, where it is left open, as often as costs little."""

    def __init__(self, every: int | None) -> None:
        self._every = every
        self._ended, self._took = time.monotonic(), 0.0

    def is_due(self, rounds: int) -> bool:
        """Whether the run should be saved after so many rounds."""
        if self._every is not None:
            return rounds % self._every == 0
        return rounds % ROUNDS_BETWEEN == 0 and time.monotonic() - self._ended >= max(
            SECONDS_BETWEEN, self._took / MOST_OF_THE_TIME
        )

    @contextmanager
    def measured(self) -> Iterator[None]:
        """A checkpoint is written inside."""
        began = time.monotonic()
        yield
        self._ended = time.monotonic()
        self._took = self._ended - began


def last_checkpoint(
    folder: RunFolder, settings: Config, frozen: str
) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """The tensors of the last checkpoint and what is said about them, None without one; refused where it is of another run.

    ``frozen`` is the fingerprint of the model's frozen part. Checkpoints of earlier versions did not tell of settings.
    """
    if not (folder.path / CHECKPOINT).exists():
        return None
    saved, about = folder.read_tensors(CHECKPOINT)
    now = settings.lasting()
    differing = difference(config(now), config(about.get("settings", now)))
    if differing:
        raise UserError(
            f"{folder.path / 'config.yaml'} was changed since the run began ({differing}); "
            "put it back as it was, or run the new settings in a folder of their own"
            f" (fedflat run --config {folder.path / 'config.yaml'} with another --out)"
        )
    if about.get("frozen", "") != frozen:
        raise UserError(
            f"the frozen part of the model is not that with which the run in {folder.path} began; "
            "put its first weights back where they were, or pass the same model again"
        )
    return saved, about


def require_rows(folder: RunFolder, stores: Mapping[str, Rows], about: Mapping[str, Any]) -> None:
    """Refuse to go on where rows are lost that a checkpoint counted; those of earlier versions did not count."""
    for name, store in stores.items():
        found = store.readable(about["rounds"])
        needed = about.get("rows", {}).get(name, found)
        if found != needed:
            raise UserError(
                f"{folder.path / 'state' / name} has lost rows: it has {found}, and the run's checkpoint needs {needed}; "
                f"put the folder back as it was, {folder.anew}"
            )


def under(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Those tensors of a checkpoint whose names begin alike, by the rest of their names."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
