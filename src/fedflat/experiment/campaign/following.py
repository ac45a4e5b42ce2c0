"""A run that another machine works on, followed by what lies in its folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedflat.experiment.analysis.reopen import primary_model
from fedflat.experiment.callback import RemoteCallback
from fedflat.experiment.campaign.processes import DistantRun, News
from fedflat.experiment.config import Config
from fedflat.experiment.store.record import Record, load_record
from fedflat.experiment.store.run_folder import RunFolder


class Followed:
    """Tells callbacks of a run's evaluations as they appear in its folder."""

    def __init__(self, config: Config, folder: Path, callbacks: tuple[RemoteCallback, ...]) -> None:
        self._config, self._folder, self._callbacks = config, RunFolder(folder), callbacks
        self._length = 0
        self._seen: DistantRun | None = None

    def look(self) -> None:
        """Tell how far it has come, where that is further than at the last look."""
        length = self._folder.metrics_length() if self._callbacks and self._folder.exists else self._length
        if length == self._length:
            return
        record, self._length = load_record(self._folder.path), length
        if not record.history:  # its first line is being written
            return
        is_new = self._seen is None
        seen = self._seen = self._seen or DistantRun(self._config, "server", record.metric)
        seen.primary = primary_model(record)
        seen.hear(News(record.history[-1]["round"], record.history[-1]))
        for what in ("began",) * is_new + ("evaluated", "round_done"):
            self._tell(what, seen)

    def ended(self) -> Record:
        """Tell how it ended."""
        self.look()
        record = load_record(self._folder.path)
        if self._seen is not None:
            self._tell("ended", self._seen, record)
        return record

    def _tell(self, what: str, seen: DistantRun, *more: Any) -> None:
        for callback in self._callbacks:
            getattr(callback, what)(seen, *more)
