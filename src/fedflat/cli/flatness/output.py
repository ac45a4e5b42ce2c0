"""Output of the flatness commands: a status line, result files, tables and numbers."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any, TypeVar

from fedflat.cli.shared.screen import key_values, screen, shown_metric, table, with_unit

if TYPE_CHECKING:
    from matplotlib.figure import Figure

T = TypeVar("T")
OUTPUT_FLAGS = ("out", "as_json", "quiet")
"""Parameters of commands that do not affect results."""
SETTINGS = "settings.json"
MAX_LISTED = 20
"""Maximum number of clients, classes or rounds listed individually."""


@contextmanager
def status_line(silent: bool) -> Iterator[Callable[[str], None]]:
    """Show a status line on a terminal and yield the function that updates it; show nothing when piped."""
    console = screen(stderr=True)
    if silent or not console.is_terminal:
        yield lambda text: None
        return
    with console.status("reading") as status:
        yield status.update


def result_folder(out: Path | None, default: Path) -> Path:
    """Create the folder of a measurement's results, and store the settings of the running command in it.

    Without ``out``, results with other settings are not overwritten: the folder is then ``default-2``, and so on.

    Args:
        out: the folder that the user has chosen.
        default: the folder to use otherwise.
    """
    from click import get_current_context

    from fedflat.experiment.store.files import create_folder, write_atomically

    used = {name: value for name, value in get_current_context().params.items() if name not in OUTPUT_FLAGS}
    settings = json.dumps(used, indent=2, default=str) + "\n"
    folder, number = out or default, 1
    while out is None and folder.exists() and _text_of(folder / SETTINGS) != settings:
        number += 1
        folder = default.with_name(f"{default.name}-{number}")
    create_folder(folder)
    write_atomically(folder / SETTINGS, settings)
    return folder


def _text_of(file: Path) -> str:
    return file.read_text(encoding="utf-8") if file.exists() else ""


def write_results(folder: Path, name: str, document: dict[str, Any], figure: Figure | None = None) -> dict[str, Path]:
    """Write ``document`` to ``name.json`` and ``figure`` to ``name.png`` in ``folder``.

    Returns:
        The paths, by the labels ``numbers`` and ``picture``.
    """
    from fedflat.cli.shared.one_run import write_figure
    from fedflat.experiment.store.files import write_atomically

    files = {"numbers": folder / f"{name}.json"}
    write_atomically(files["numbers"], json.dumps(document, indent=2, default=str) + "\n")
    if figure is not None:
        files["picture"] = folder / f"{name}.png"
        write_figure(figure, files["picture"])
    return files


def print_table(
    heading: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[object]],
    note: str = "",
    *,
    text_columns: int = 1,
    subtitle: str = "",
) -> None:
    """Print a table.

    Args:
        heading: printed in bold above the table.
        columns: titles of the columns.
        rows: one value per column and row.
        note: printed below the table.
        text_columns: number of columns at the left that contain text; the others are right-aligned.
        subtitle: printed below the heading.
    """
    console = screen()
    console.print(f"\n{heading}", style="bold", markup=False)
    if subtitle:
        console.print(subtitle, style="dim", markup=False)
    console.print()
    console.print(table(columns, rows, numeric=columns[text_columns:]))
    if note:
        console.print(note, style="dim", markup=False)


def test_column(document: Mapping[str, Any]) -> tuple[str, dict[str, str]]:
    """Return the heading of the test metric, and its values as text by model; ``document`` holds them by model."""
    tests = {name: next(iter(model["test"].items())) for name, model in document["models"].items()}
    metric = next(iter(tests.values()))[0]
    return f"test {with_unit(metric)}", {name: shown_metric(value, of) for name, (of, value) in tests.items()}


def print_files(files: Mapping[str, object]) -> None:
    """Print the paths of output files, and other named values, below a table."""
    console = screen()
    console.print()
    console.print(key_values(files))


def evenly_spaced(items: Sequence[T], limit: int = MAX_LISTED) -> list[T]:
    """Return at most ``limit`` evenly spaced items; the last item is always included.

    >>> evenly_spaced([1, 2, 3, 4, 5], 3)
    [1, 3, 5]
    """
    step = max(1, math.ceil(len(items) / limit))
    first = (len(items) - 1) % step  # such that the last item is a multiple of step away
    return list(items[first::step])


def plus_minus(values: Sequence[float]) -> str:
    """Return the mean as text, with the standard deviation if there are several values.

    >>> plus_minus([1.25]), plus_minus([1.0, 2.0, 3.0])
    ('1.25', '2 ± 1')
    """
    return f"{fmean(values):.4g}" if len(values) == 1 else f"{fmean(values):.4g} ± {stdev(values):.2g}"


def three_digits(value: float | None) -> str | None:
    """Return a number with three significant digits; None stays None, which tables show as a dash."""
    return None if value is None else f"{value:.3g}"


def known(values: Iterable[float | None] | None) -> list[float]:
    """Return the values that are not None."""
    return [value for value in values or [] if value is not None]


def mean(values: Iterable[float | None] | None) -> float | None:
    """Return the mean of the known values, or None if there are none."""
    numbers = known(values)
    return fmean(numbers) if numbers else None
