"""Output on the terminal: consoles, tables, numbers, JSON, a status line, and the progress of downloads."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from fedflat.cli.shared.screen_table import ScreenTable, columns_of
from fedflat.display import counted as counted
from fedflat.display import shown_bytes as shown_bytes
from fedflat.display import shown_count as shown_count
from fedflat.display import shown_metric as shown_metric
from fedflat.display import shown_seconds as shown_seconds
from fedflat.display import with_unit as with_unit

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.progress import TaskID
    from rich.text import Text

    from fedflat.data.files.download import Progress
    from fedflat.experiment.config import Config

PIPED_WIDTH = 200
"""Console width when piped, wide enough that no table wraps."""


def screen(stderr: bool = False) -> Console:
    """Return a rich console on the current stdout or stderr; piped output has a fixed width unless COLUMNS is set.

    It prints texts as they are, e.g. paths with brackets, which rich would otherwise read as markup.
    """
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() or "COLUMNS" in os.environ else PIPED_WIDTH
    return Console(file=stream, width=width, markup=False, emoji=False, highlight=False)


def show_loading(silent: bool) -> None:
    """Print on a terminal that a command has started, because importing PyTorch and loading data take seconds."""
    if not silent and sys.stderr.isatty():
        print("loading PyTorch and the data ...", file=sys.stderr, flush=True)


def print_json(value: object) -> None:
    """Print one JSON document to stdout."""
    print(json.dumps(value, indent=2, ensure_ascii=False, default=str))


def print_section(title: str, content: RenderableType) -> None:
    """Print a blank line, a bold title and the content below it."""
    console = screen()
    console.print()
    console.print(title, style="bold")
    console.print(content)


def table(
    columns: Iterable[str],
    rows: Iterable[Iterable[object]],
    numeric: Iterable[str] = (),
    *,
    whole: Iterable[str] = (),
    optional: Iterable[str] = (),
) -> ScreenTable:
    """Return a table that fits the screen without breaking words.

    Args:
        columns: titles of the columns.
        rows: one value per column and row.
        numeric: titles of the columns that are right-aligned.
        whole: titles of the columns whose cells stay on one line.
        optional: titles of the columns that are left out if the table does not fit otherwise.
    """
    table_columns = columns_of(columns, ([cell(value) for value in row] for row in rows))
    table_columns[0].style = "cyan"
    numeric, whole, optional = set(numeric), set(whole), set(optional)
    for column in table_columns:
        column.is_numeric, column.is_whole = column.title in numeric, column.title in whole
        column.is_optional = column.title in optional
    return ScreenTable(table_columns)


def key_values(pairs: Mapping[str, object]) -> ScreenTable:
    """Return a table of two columns without titles: a name and its value per line."""
    from rich.text import Text

    names, values = columns_of(("", ""), ((Text(name), cell(value)) for name, value in pairs.items()))
    names.is_whole, names.style = True, "dim"
    return ScreenTable([names, values], has_titles=False)


def cell(value: object) -> Text:
    """Return a value as a table cell; None and empty text become a dash."""
    from rich.text import Text

    if value is None or value == "":
        return Text("–", style="dim")
    return value if isinstance(value, Text) else Text(str(value))


def shown_hash(digest: str | None) -> str | None:
    """Return the beginning of a hash, which is enough to compare two by eye; None stays None.

    >>> shown_hash("0123456789abcdef0123456789abcdef")
    '0123456789abcdef...'
    """
    return None if digest is None else f"{digest[:16]}..."


def print_precision(config: Config, silent: bool) -> None:
    """Print the precision that ``engine.precision=auto`` stands for unless it is float32; nothing if ``silent``."""
    from fedflat.experiment.setup.problem import decide_precision

    if config.engine.precision == "auto" and not silent:
        precision = decide_precision(config).engine.precision
        if precision != "float32":
            print(f"precision: {precision} (engine.precision=auto; use float32 for full precision)", file=sys.stderr)


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


@contextmanager
def status_line(silent: bool) -> Iterator[Callable[[str], None]]:
    """Show a status line on a terminal and yield the function that updates it; show nothing when piped."""
    console = screen(stderr=True)
    if silent or not console.is_terminal:
        yield lambda text: None
        return
    with console.status("reading") as status:
        yield status.update
