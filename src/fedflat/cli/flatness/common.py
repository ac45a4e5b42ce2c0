"""Code shared by flatness commands: opening a run, and output as files, tables and numbers.

A command passes its results as a document, and a function that prints them as tables, to ``OutputFlags.publish``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any, TypeVar

from fedflat.cli.shared.command_group import current_context
from fedflat.cli.shared.flags import JSON, QUIET, optional
from fedflat.cli.shared.screen import fetch_if_missing, key_values, print_json, screen, table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from fedflat.experiment.analysis.post_hoc import PostHoc
    from fedflat.flatness import Estimate

OUT = optional(
    "--out",
    "output folder for numbers and figures",
    "flatness/ inside the first run, or beside the first file",
    metavar="FOLDER",
)

T = TypeVar("T")
Progress = Callable[[str], None]
SETTINGS = "settings.json"
MAX_LISTED = 20
"""Maximum number of clients, classes or rounds listed individually."""


@dataclass(frozen=True)
class OutputFlags:
    """Flags for the output of a command; they do not affect results."""

    out: Path | None = OUT
    as_json: bool = JSON
    quiet: bool = QUIET

    @property
    def silent(self) -> bool:
        """Whether to show no progress."""
        return self.quiet or self.as_json

    def publish(
        self,
        default: Path,
        document: dict[str, Any],
        show: Callable[[], None],
        figure: Figure | None = None,
        notes: Mapping[str, object] | None = None,
        name: str | None = None,
    ) -> None:
        """Write results to the output folder, then print them: as JSON with --json, otherwise as tables.

        Args:
            default: output folder without --out.
            document: the results as JSON-compatible values, written to ``name.json``.
            show: prints the results as tables.
            figure: written to ``name.png``.
            notes: texts to print by label, above the paths of the files.
            name: name of the files; default: that of the default folder.
        """
        files = write_results(result_folder(self.out, default), name or default.name, document, figure)
        if self.as_json:
            print_json({"files": files, **document})
            return
        show()
        print_files({**(notes or {}), **files})


def open_run(run: Path, silent: bool, progress: Progress, **options: Any) -> PostHoc:
    """Open a run for measurements after training; download its dataset first if it is missing.

    Args:
        run: folder of the run.
        silent: show no progress of the download.
        progress: receives descriptions of what is measured.
        options: numbers of examples and clients to measure on, and their seed.
    """
    from fedflat.experiment.analysis.post_hoc import post_hoc
    from fedflat.experiment.store.run_folder import load_record

    record = load_record(run)
    fetch_if_missing(record.config, silent)
    return post_hoc(record, progress=progress, **options)


def heading_of(run: PostHoc) -> str:
    """Return the algorithm, dataset and seed of a run."""
    return f"{run.config.algorithm}   {run.config.data.dataset}, seed {run.config.seed}"


def result_folder(out: Path | None, default: Path) -> Path:
    """Create the folder of a measurement's results, and store the settings of the running command in it.

    The default folder is not used if it holds results with other settings; then the folder is ``default-2``, and so on.

    Args:
        out: the folder that the user has chosen.
        default: the folder to use otherwise.
    """
    from fedflat.experiment.store.files import create_folder, write_atomically

    output_flags = [field.name for field in fields(OutputFlags)]
    parameters = {name: value for name, value in current_context().params.items() if name not in output_flags}
    settings = json.dumps(parameters, indent=2, default=str) + "\n"
    folder, number = out or default, 1
    while out is None and folder.exists() and _text_of(folder / SETTINGS) != settings:
        number += 1
        folder = default.with_name(f"{default.name}-{number}")
    create_folder(folder)
    write_atomically(folder / SETTINGS, settings)
    return folder


def _text_of(file: Path) -> str:
    return file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""


def write_results(folder: Path, name: str, document: dict[str, Any], figure: Figure | None) -> dict[str, Path]:
    """Write ``document`` to ``name.json`` and ``figure`` to ``name.png`` in ``folder``.

    Returns:
        The paths, by the labels ``numbers`` and ``picture``.
    """
    from fedflat.experiment.store.files import write_atomically
    from fedflat.reporting.figures.files import write_figure

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
    console.print(f"\n{heading}", style="bold")
    if subtitle:
        console.print(subtitle, style="dim")
    console.print()
    console.print(table(columns, rows, numeric=columns[text_columns:]))
    if note:
        console.print(note, style="dim")


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
    first = (len(items) - 1) % step  # starting here, multiples of step lead to the last item
    return list(items[first::step])


def plus_minus(values: Sequence[float]) -> str:
    """Return the mean as text, with the standard deviation if there are several values.

    >>> plus_minus([1.25]), plus_minus([1.0, 2.0, 3.0])
    ('1.25', '2 ± 1')
    """
    return f"{fmean(values):.4g}" if len(values) == 1 else f"{fmean(values):.4g} ± {stdev(values):.2g}"


def estimate_text(estimates: Sequence[Estimate]) -> str:
    """Return the mean of random estimates on several subsets of examples as text, with the standard deviation.

    A single estimate is shown with half the width of its confidence interval.
    """
    if len(estimates) == 1:
        return f"{estimates[0].value:.4g} ± {estimates[0].half_width:.2g}"
    return plus_minus([estimate.value for estimate in estimates])


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
