"""A run that a sweep, a search or a published table plans."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fedflat.experiment.config import Config
from fedflat.experiment.store.files import DamagedFile
from fedflat.experiment.store.run_folder import RunFolder


@dataclass(frozen=True)
class PlannedRun:
    """An experiment with the folder that it has or will have."""

    config: Config
    folder: Path

    @property
    def done(self) -> bool:
        """Whether it has ended."""
        return RunFolder(self.folder).is_over

    @property
    def rounds_left(self) -> int:
        """Number of rounds after the last evaluation; 0 if the run has ended, all if its metrics are damaged."""
        if self.done:
            return 0
        folder = RunFolder(self.folder)
        try:
            history = folder.metrics() if folder.exists else []
        except DamagedFile:
            history = []
        rounds_done = int(history[-1]["round"]) if history else self.config.init_rounds
        return self.config.training.rounds - rounds_done
