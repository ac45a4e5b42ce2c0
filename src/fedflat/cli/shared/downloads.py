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
    """Download the dataset of an experiment if it is missing; show progress unless ``silent``."""
    from fedflat.data import DATASETS, data_dir, fetch

    name, folder = config.data.dataset, config.data.dir
    if name in DATASETS and DATASETS[name].missing(data_dir(folder)):
        with Downloads(silent) as downloads:
            fetch(name, folder, downloads.progress)


class Downloads:
    """Shows the progress of downloads: a bar per file on a terminal, a line per file when piped."""

    def __init__(self, silent: bool = False) -> None:
        self.silent = silent
        self._tasks: dict[str, TaskID | None] = {}  # progress bar by file; None when piped
        self._bars: Any = None

    def __enter__(self) -> Downloads:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bars is not None:
            self._bars.stop()

    @property
    def progress(self) -> Progress | None:
        """The callback that receives a file's name, the bytes downloaded so far and its size; None if silent."""
        if self.silent:
            return None
        return self._update_bar if sys.stderr.isatty() else self._print_start

    def _print_start(self, file: str, done: int, total: int | None) -> None:
        """Print one line at the first call for a file, when its download starts; ignore later calls."""
        if file not in self._tasks:
            self._tasks[file] = None
            size = f" ({shown_bytes(total)})" if total else ""
            print(f"downloading {file}{size}", file=sys.stderr, flush=True)

    def _update_bar(self, file: str, done: int, total: int | None) -> None:
        """Update the bar of a file to ``done`` of ``total`` bytes; the first call starts the display."""
        if self._bars is None:
            from rich import progress

            self._bars = progress.Progress(
                progress.TextColumn("{task.description}"),
                progress.BarColumn(),
                progress.DownloadColumn(),
                progress.TransferSpeedColumn(),
                progress.TimeRemainingColumn(),
                console=screen(stderr=True),
            )
            self._bars.start()
        if file not in self._tasks:
            self._tasks[file] = self._bars.add_task(file, total=total)
        self._bars.update(self._tasks[file], completed=done, total=total)
