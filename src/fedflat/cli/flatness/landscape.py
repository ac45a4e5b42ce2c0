"""fedflat flatness landscape, plane, path: the loss around models, on a plane through them and between them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from fedflat.cli.flatness.common import OutputFlags, print_files, print_table, result_folder
from fedflat.cli.flatness.landscape_checks import warn_about_landscape
from fedflat.cli.flatness.models import (
    MODELS,
    ModelFlags,
    default_folder,
    open_models,
    print_caveats,
    print_normalisation,
)
from fedflat.cli.shared.completion import complete_run
from fedflat.cli.shared.flags import SEED, optional, with_flag_groups
from fedflat.cli.shared.screen import counted, print_json, screen, shown_count, shown_seconds
from fedflat.display import shown_loss_or_error
from fedflat.errors import UserError, one_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from fedflat.experiment.analysis.run_model import RunModel
    from fedflat.flatness.landscapes.grid import Landscape, Mark, Progress
    from fedflat.reporting.figures.landscapes import Panel

SECONDS_BETWEEN_LINES = 5.0
POINTS = typer.Option(41, "--points", min=2, help="grid points per axis")
EXAMPLES = optional("--examples", "number of random training and test examples", "all", metavar="N", min=1)
VALUE = typer.Option(
    "train_loss",
    "--value",
    metavar="NAME",
    help="value to plot: train_loss, test_loss, train_error, test_error (or test_rmse, ...)",
)
STATISTICS = typer.Option(
    "interpolated",
    "--statistics",
    metavar="HOW",
    help="BatchNorm statistics between models: interpolated, or re-estimated at each point (estimated)",
)


@with_flag_groups
def landscape(
    models: list[str] = MODELS,
    dimensions: int = typer.Option(2, "--dimensions", min=1, max=2, help="number of random directions"),
    radius: float = typer.Option(1.0, "--radius", help="half-width in filter norms"),
    points: int = POINTS,
    examples: int | None = EXAMPLES,
    one_dimensional: str = typer.Option(
        "zero",
        "--one-dimensional",
        metavar="HOW",
        help="one-dimensional tensors such as biases: zero (not moved) or scaled (one filter each)",
    ),
    value: str = VALUE,
    seed: int = SEED,
    *,
    opening: ModelFlags,
    output: OutputFlags,
) -> None:
    """Plot the loss around models along filter-normalised random directions, on a common scale.

    Example: fedflat flatness landscape runs/fedavg-digits-seed0 runs/fedsam-digits-seed0 --points 21 --examples 500
    """
    from fedflat.experiment.analysis.landscapes import landscapes
    from fedflat.experiment.analysis.loss_and_error import measured_values
    from fedflat.flatness.landscapes.directions import ONE_DIMENSIONAL
    from fedflat.reporting.figures.landscapes import Panel, contours, lines, surfaces

    _require_known("treatment of one-dimensional tensors", one_dimensional, ONE_DIMENSIONAL)
    opened = open_models(models, output.silent, opening)
    first = next(iter(opened.values()))
    _require_known("value to plot", value, measured_values(first.problem.task.metric))
    with _progress(output.silent) as progress:
        grids = landscapes(
            list(opened.values()),
            dimensions=dimensions,
            radius=radius,
            points=points,
            examples=examples,
            seed=seed,
            one_dimensional=one_dimensional,  # type: ignore[arg-type]
            names=list(opened),
            progress=progress,
        )
    for name, grid in grids.items():
        warn_about_landscape(name, opened[name], grid, value, all_examples=examples is None)
    panels = [Panel(name, grid, _caption(grid)) for name, grid in grids.items()]
    if dimensions == 2:
        figures = {"contours": contours(panels, value), "surfaces": surfaces(panels, value)}
    else:
        figures = {"lines": lines(panels, value)}
    files = _write_files(result_folder(output.out, default_folder(opened, "landscape")), grids, figures, panels, value)
    if output.as_json:
        print_json({"files": files, "models": {name: _document(grid) for name, grid in grids.items()}})
        return
    _print_landscapes(grids, value, radius)
    print_caveats(opened, {name: [grid.marks[0].values["train_loss"]] for name, grid in grids.items()})
    print_files(files)


def _print_landscapes(grids: dict[str, Landscape], value: str, radius: float) -> None:
    """Print one row per model: its losses and test metric, and the highest ``value`` within ``radius`` of it."""
    from fedflat.reporting.figures.landscape_scale import label_with_unit

    first = next(iter(grids.values()))  # all models share data and task
    highest = f"highest {label_with_unit(value)} within {radius:g}"
    columns = ("model", "training loss", "test loss", label_with_unit(first.test_metric), highest, "not finite")
    rows = [_landscape_row(name, grid, value) for name, grid in grids.items()]
    heading = f"Landscapes around {counted(len(grids), 'model')}"
    note = f"{highest}: maximum over the grid, up to {radius:g} filter norm{'s' * (radius != 1)} along each direction"
    print_table(heading, columns, rows, note, subtitle=_describe_data(first))


@with_flag_groups
def plane(
    models: list[str] = MODELS,
    points: int = POINTS,
    margin: float = typer.Option(
        0.25, "--margin", min=0, help="extension beyond the models, as a fraction of their extent"
    ),
    examples: int | None = EXAMPLES,
    statistics: str = STATISTICS,
    seed: int = SEED,
    *,
    opening: ModelFlags,
    output: OutputFlags,
) -> None:
    """Plot training loss and test error on the plane through three models; further models are projected onto it.

    Example: fedflat flatness plane runs/fedavg-digits-seed0 runs/fedsam-digits-seed0 runs/fedmoswa-digits-seed0
    """
    from fedflat.experiment.analysis.landscapes import plane as plane_of
    from fedflat.reporting.figures.landscape_scale import label_with_unit, values_to_plot
    from fedflat.reporting.figures.landscapes import Panel, plane_picture, surfaces

    if len(models) < 3:
        raise UserError(f"a plane needs three models, got {len(models)}; for two, use fedflat flatness path")
    options = {"points": points, "margin": margin, "examples": examples, "seed": seed, "statistics": statistics}
    opened = open_models(models, output.silent, opening)
    grid = _evaluate_between(opened, plane_of, options, output.silent)
    panel, values = Panel("", grid), values_to_plot(grid)
    figures = {"plane": plane_picture(grid), "surface": surfaces([panel], values[0])}
    files = _write_files(
        result_folder(output.out, default_folder(opened, "plane")), {"plane": grid}, figures, [panel], values[0]
    )
    if output.as_json:
        marks = [{"name": mark.name, "at": mark.position, "off": mark.distance} for mark in grid.marks]
        print_json({"files": files, "marks": marks, "distances": grid.metadata["distances"]})
        return
    rows = []
    columns = ("model", "x", "y", "distance from plane", "training loss", label_with_unit(grid.test_metric))
    for mark in grid.marks:
        position = [f"{coordinate:.4g}" for coordinate in mark.position]
        rows.append(
            (mark.name, *position, f"{mark.distance:.3g}", *_shown_values(mark, "train_loss", grid.test_metric))
        )
    heading = f"The plane through {', '.join(mark.name for mark in grid.marks[:3])}"
    print_table(heading, columns, rows, subtitle=_describe_data(grid))
    _print_normalisation(opened, grid)
    print_files(files)


@with_flag_groups
def path(
    first: str = typer.Argument(
        metavar="MODEL",
        help="start: RUN, RUN:wima, RUN:server@50, RUN:client3@50, or with --module a weights file",
        autocompletion=complete_run,
    ),
    second: str = typer.Argument(metavar="MODEL", help="end", autocompletion=complete_run),
    points: int = POINTS,
    beyond: float = typer.Option(
        0.0, "--beyond", min=0, help="extension beyond both ends, as a fraction of the distance"
    ),
    align: bool = typer.Option(
        False,
        "--align",
        help="permute the hidden units of the second model to match the first (nn.Sequential models, e.g. mlp, cnn)",
    ),
    curve: bool = typer.Option(False, "--curve", help="train a Bezier curve of low loss instead of the straight line"),
    curve_steps: int = typer.Option(500, "--curve-steps", min=1, help="training steps of the curve"),
    examples: int | None = EXAMPLES,
    statistics: str = STATISTICS,
    seed: int = SEED,
    *,
    opening: ModelFlags,
    output: OutputFlags,
) -> None:
    """Plot the loss on the straight line, or a trained curve, between two models and compute the loss barrier.

    Example: fedflat flatness path runs/fedavg-digits-seed0 runs/fedsam-digits-seed0
    """
    from fedflat.experiment.analysis.landscapes import path as path_of
    from fedflat.flatness.landscapes.path import barrier
    from fedflat.reporting.figures.landscape_scale import label_with_unit, values_to_plot
    from fedflat.reporting.figures.landscapes import Panel, path_picture

    options = {"points": points, "beyond": beyond, "examples": examples, "seed": seed, "statistics": statistics}
    options |= {"align": align, "curve_steps": curve_steps if curve else 0}
    opened = open_models([first, second], output.silent, opening)
    grid = _evaluate_between(opened, path_of, options, output.silent)
    barriers = {name: barrier(grid.axes[0], values) for name, values in grid.values.items()}
    title, values = " to ".join(mark.name for mark in grid.marks), values_to_plot(grid)
    figures, panels = {"path": path_picture(grid)}, [Panel(title, grid)]
    files = _write_files(
        result_folder(output.out, default_folder(opened, "path")), {title: grid}, figures, panels, values[0]
    )
    if output.as_json:
        heights = {name: {"height": _finite(rise.height), "at": rise.at} for name, rise in barriers.items()}
        print_json({"files": files, "distance": grid.metadata["distance"], "barriers": heights})
        return
    columns = ("value", *(mark.name for mark in grid.marks), "barrier", "at")
    rows = []
    for name, rise in barriers.items():
        ends = [shown_loss_or_error(mark.values[name], name) for mark in grid.marks]
        height = (shown_loss_or_error(rise.height, name), f"{rise.at:.3g}") if rise.height else ("no barrier", None)
        rows.append((label_with_unit(name), *ends, *height))
    kind = f"{' on a trained curve' if curve else ''}{' after alignment' if align else ''}"
    heading = f"From {title}{kind}, distance {grid.metadata['distance']:.4g}"
    note = f"barrier: maximum over {len(grid.axes[0])} points, a lower bound; raise --points until it stops changing"
    print_table(heading, columns, rows, note, subtitle=_describe_data(grid))
    _print_normalisation(opened, grid)
    print_files(files)


def _print_normalisation(models: dict[str, RunModel], grid: Landscape) -> None:
    """Print the normalisation of weights files and their training losses, which the grid marks."""
    print_normalisation(models, {mark.name: mark.values["train_loss"] for mark in grid.marks})


def _evaluate_between(
    models: dict[str, RunModel], compute: Callable[..., Landscape], options: dict[str, Any], silent: bool
) -> Landscape:
    """Evaluate the plane through models or the path between them, with a progress bar."""
    _require_known("treatment of BatchNorm statistics", options["statistics"], ("interpolated", "estimated"))
    with _progress(silent) as progress:
        return compute(list(models.values()), names=list(models), progress=progress, **options)


@contextmanager
def _progress(silent: bool) -> Iterator[Progress]:
    """Yield a callback ``progress(done, total)`` that updates a bar on a terminal, or prints lines when piped."""
    console = screen(stderr=True)
    if silent:
        yield lambda done, total: None
        return
    if not console.is_terminal:
        yield _occasional_lines()
        return
    from rich import progress

    with progress.Progress(
        progress.TextColumn("evaluating"),
        progress.BarColumn(bar_width=24),
        progress.MofNCompleteColumn(),
        progress.TextColumn("points", style="dim"),
        progress.TimeRemainingColumn(compact=True),
        console=console,
        transient=True,
    ) as bars:
        task = bars.add_task("", total=None)
        yield lambda done, total: bars.update(task, completed=done, total=total)


def _occasional_lines() -> Progress:
    """Return a callback ``progress(done, total)`` that prints a line every few seconds."""
    start = last_line = time.monotonic()

    def progress(done: int, total: int) -> None:
        """Print the finished points and the remaining time, unless a line was printed recently."""
        nonlocal last_line
        now = time.monotonic()
        if now - last_line >= SECONDS_BETWEEN_LINES and done < total:
            last_line = now
            remaining = (now - start) / done * (total - done)
            screen(stderr=True).print(f"evaluated {done} of {total} points, about {shown_seconds(remaining)} left")

    return progress


def _write_files(
    folder: Path, grids: dict[str, Landscape], figures: dict[str, Figure], panels: Sequence[Panel], value: str
) -> dict[str, str]:
    """Write the values as JSON, the figures as PNG and PDF, and an interactive page; return the paths by kind.

    Args:
        folder: output folder.
        grids: the landscapes by name.
        figures: the figures by file name.
        panels: the panels of the interactive page.
        value: name of the value that the page shows, e.g. ``train_loss``.
    """
    from fedflat.experiment.analysis.landscapes import save_landscapes
    from fedflat.experiment.store.files import write_atomically
    from fedflat.reporting.figures.files import write_figure
    from fedflat.reporting.figures.landscape_page import landscape_page

    files = {"numbers": folder / "landscape.json"}
    save_landscapes(files["numbers"], grids)
    for name, figure in figures.items():
        for extension in ("png", "pdf"):
            file = folder / f"{name}.{extension}"
            files[f"{name} ({extension})"] = file
            write_figure(figure, file)
    files["interactive"] = folder / "landscape.html"
    write_atomically(files["interactive"], landscape_page(panels, value, "Landscape"))
    return {name: str(path) for name, path in files.items()}


def _describe_data(grid: Landscape) -> str:
    """Return the dataset of a landscape, the numbers of examples, and the BatchNorm statistics between models."""
    counts = ", ".join(f"{shown_count(count)} {name} examples" for name, count in grid.metadata["examples"].items())
    statistics = grid.metadata.get("statistics")
    where = " at every point, also at the models" if statistics == "estimated" else ""
    return f"{grid.metadata['data']}, {counts}" + (f", BatchNorm statistics {statistics}{where}" if statistics else "")


def _landscape_row(name: str, grid: Landscape, quantity: str) -> tuple[object, ...]:
    """Return the table row of a model and the landscape around it.

    It contains the model's losses and test metric, the highest finite ``quantity`` on the grid, and the number of
    grid points where it is not finite.
    """
    import numpy as np

    values = grid.values[quantity]
    finite = values[np.isfinite(values)]
    not_finite = grid.not_finite(quantity)
    return (
        name,  # the first mark is the model itself, at the centre
        *_shown_values(grid.marks[0], "train_loss", "test_loss", grid.test_metric),
        shown_loss_or_error(finite.max(), quantity) if len(finite) else None,
        f"{not_finite} of {values.size}" if not_finite else "0",
    )


def _shown_values(mark: Mark, *names: str) -> list[str | None]:
    """Return the formatted values of a marked model; None for values that its task does not have."""
    return [shown_loss_or_error(mark.values[name], name) if name in mark.values else None for name in names]


def _caption(grid: Landscape) -> str:
    """Describe the model in the centre in one line, and its test metric, e.g. ``test error 8.5 %``, in another."""
    from fedflat.reporting.figures.landscape_scale import shown_value

    name = grid.test_metric
    (value,) = _shown_values(grid.marks[0], name)
    unit = " %" if name.endswith("error") else ""
    metric = [] if value is None else [f"{shown_value(name)} {value}{unit}"]
    return "\n".join([grid.metadata["described"], *metric])


def _document(grid: Landscape) -> dict[str, Any]:
    """Return the landscape around a model as JSON-compatible values, without the values on the grid.

    ``not_finite`` counts the grid points where a value is not finite.
    """
    return {
        "at_model": {name: _finite(value) for name, value in grid.marks[0].values.items()},
        "not_finite": {name: grid.not_finite(name) for name in grid.values},
        "made": grid.metadata,
    }


def _finite(value: float) -> float | None:
    """Return the value, or None if JSON cannot represent it."""
    return value if isfinite(value) else None


def _require_known(kind: str, name: str, known: Sequence[str]) -> None:
    """Raise an error that lists the known names, unless ``name`` is one of them; ``kind`` says what is named."""
    if name not in known:
        raise one_of(kind, name, known)
