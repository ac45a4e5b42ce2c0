"""Download progress: a bar per file on a terminal, a line per file when piped."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from fedflat.cli.shared.screen import screen, shown_bytes

if TYPE_CHECKING:
    from rich.progress import TaskID

    from fedflat.data.files.download import Progress
    from fedflat.experiment.config import Config


def fetch_if_missing(config: Config, silent: bool) -> None:
    """Download an experiment's dataset if it is missing, with visible progress."""
    from fedflat.data import DATASETS, data_dir, fetch

    name, folder = config.data.dataset, config.data.dir
    if name in DATASETS and DATASETS[name].missing(data_dir(folder)):
        with Downloads(silent) as downloads:
            fetch(name, folder, downloads.arrived)


class Downloads:
    """A bar per file on a terminal, a line per file when piped."""

    def __init__(self, silent: bool = False) -> None:
        self.silent = silent
        self._seen: dict[str, TaskID | None] = {}
        self._bars: Any = None

    def __enter__(self) -> Downloads:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bars is not None:
            self._bars.stop()

    @property
    def arrived(self) -> Progress | None:
        """Progress callback for downloaded bytes."""
        if self.silent:
            return None
        return self._on_bar if sys.stderr.isatty() else self._on_line

    def _on_line(self, file: str, done: int, total: int | None) -> None:
        if file not in self._seen:
            self._seen[file] = None
            print(f"downloading {file}{f' ({shown_bytes(total)})' if total else ''}", file=sys.stderr, flush=True)

    def _on_bar(self, file: str, done: int, total: int | None) -> None:
        if self._bars is None:
            from rich import progress

            columns = (
                progress.TextColumn("{task.description}"),
                progress.BarColumn(),
                progress.DownloadColumn(),
                progress.TransferSpeedColumn(),
            )
            self._bars = progress.Progress(*columns, progress.TimeRemainingColumn(), console=screen(stderr=True))
            self._bars.start()
        if file not in self._seen:
            self._seen[file] = self._bars.add_task(file, total=total)
        self._bars.update(self._seen[file], completed=done, total=total)
