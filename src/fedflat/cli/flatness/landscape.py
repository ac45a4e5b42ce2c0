"""fedflat flatness landscape, plane, path: the loss around models, on a plane through them and between them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from fedflat.cli.flatness.flags import (
    DEVICE,
    MODELS,
    OUT,
    PRECISION,
    SEED,
    folder_for,
    opened_models,
    print_files,
    print_table,
    short_names,
)
from fedflat.cli.shared.flags import JSON, QUIET, optional
from fedflat.cli.shared.screen import print_json, screen, shown_seconds
from fedflat.errors import UserError, one_of

if TYPE_CHECKING:
    from fedflat.flatness.landscapes.grid import Landscape, Mark, Progress

SECONDS_BETWEEN_LINES = 5.0
POINTS = typer.Option(41, "--points", min=2, help="grid points per axis")
EXAMPLES = optional("--examples", "number of random training and test examples", "all", metavar="N", min=1)
VALUE = typer.Option(
    "train_loss", "--value", metavar="NAME", help="value to plot: train_loss, test_loss, train_error or test_error"
)
STATISTICS = typer.Option(
    "interpolated",
    "--statistics",
    metavar="HOW",
    help="BatchNorm statistics between models: interpolated, or re-estimated at each point (estimated)",
)


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
    device: str = DEVICE,
    precision: str | None = PRECISION,
    out: Path | None = OUT,
    as_json: bool = JSON,
    quiet: bool = QUIET,
) -> None:
    """Plot the loss around models along filter-normalised random directions, on one scale.

    Example: fedflat flatness landscape runs/fedavg-digits-seed0 runs/fedsam-digits-seed0 --points 21 --examples 500
    """
    from fedflat.experiment.analysis.landscapes import landscapes, measured_values
    from fedflat.flatness.landscapes.directions import ONE_DIMENSIONAL
    from fedflat.reporting.figures.landscape_scale import shown_value
    from fedflat.reporting.figures.landscapes import Panel, contours, lines, surfaces

    _check("treatment of one-dimensional tensors", one_dimensional, ONE_DIMENSIONAL)
    opened = opened_models(models, quiet or as_json, device, precision)
    _check("value to plot", value, measured_values(opened[0].problem.task.metric))
    with _progress(quiet or as_json) as progress:
        grids = landscapes(
            opened,
            dimensions=dimensions,
            radius=radius,
            points=points,
            examples=examples,
            seed=seed,
            one_dimensional=one_dimensional,  # type: ignore[arg-type]
            names=short_names(opened),
            progress=progress,
        )
    panels = [Panel(name, grid, _caption(grid)) for name, grid in grids.items()]
    drawn = {"contours": contours, "surfaces": surfaces} if dimensions == 2 else {"lines": lines}
    figures = {name: draw(panels, value) for name, draw in drawn.items()}
    files = _write(out or folder_for(opened[0], "landscape"), grids, figures, panels, value)
    if as_json:
        print_json({"files": files, "models": {name: _document(grid) for name, grid in grids.items()}})
        return
    highest = f"highest {shown_value(value)}{' %' * value.endswith('error')} within {radius:g}"
    columns = ("model", "training loss", "test loss", "test error %", highest, "not finite")
    rows = [_row(name, grid, value) for name, grid in grids.items()]
    _print(f"Landscapes around {len(grids)} model{'s' * (len(grids) > 1)}", columns, rows, files, grids)


def plane(
    models: list[str] = MODELS,
    points: int = POINTS,
    margin: float = typer.Option(
        0.25, "--margin", min=0, help="extension beyond the models, as a fraction of their extent"
    ),
    examples: int | None = EXAMPLES,
    statistics: str = STATISTICS,
    seed: int = SEED,
    device: str = DEVICE,
    precision: str | None = PRECISION,
    out: Path | None = OUT,
    as_json: bool = JSON,
    quiet: bool = QUIET,
) -> None:
    """Plot training loss and test error on the plane through three models; further models are projected onto it.

    Example: fedflat flatness plane runs/fedavg-digits-seed0 runs/fedsam-digits-seed0 runs/fedmoswa-digits-seed0
    """
    from fedflat.experiment.analysis.landscapes import plane as plane_of
    from fedflat.reporting.figures.landscapes import Panel, plane_picture, surfaces

    _check("treatment of BatchNorm statistics", statistics, ("interpolated", "estimated"))
    if len(models) < 3:
        raise UserError(f"a plane needs three models, got {len(models)}")
    opened = opened_models(models, quiet or as_json, device, precision)
    with _progress(quiet or as_json) as progress:
        grid = plane_of(
            opened,
            points=points,
            margin=margin,
            examples=examples,
            seed=seed,
            statistics=statistics,  # type: ignore[arg-type]
            names=short_names(opened),
            progress=progress,
        )
    panel = Panel("", grid)
    shown = [name for name in ("train_loss", "test_error") if name in grid.values] or list(grid.values)[:1]
    figures = {"plane": plane_picture(grid, shown), "surface": surfaces([panel], shown[0])}
    files = _write(out or folder_for(opened[0], "plane"), {"plane": grid}, figures, [panel], shown[0])
    if as_json:
        marks = [{"name": mark.name, "at": mark.position, "off": mark.distance} for mark in grid.marks]
        print_json({"files": files, "marks": marks, "distances": grid.metadata["distances"]})
        return
    columns = ("model", "x", "y", "distance from plane", "training loss", "test error %")
    rows = [
        (
            mark.name,
            *(f"{x:.4g}" for x in mark.position),
            f"{mark.distance:.3g}",
            *_figures(mark, "train_loss", "test_error"),
        )
        for mark in grid.marks
    ]
    _print("The plane through " + ", ".join(mark.name for mark in grid.marks[:3]), columns, rows, files, {"": grid})


def path(
    first: str = typer.Argument(metavar="MODEL", help="start: RUN, RUN:wima, RUN:server@50 or RUN:client3@50"),
    second: str = typer.Argument(metavar="MODEL", help="end"),
    points: int = POINTS,
    beyond: float = typer.Option(
        0.0, "--beyond", min=0, help="extension beyond both ends, as a fraction of the distance"
    ),
    examples: int | None = EXAMPLES,
    statistics: str = STATISTICS,
    seed: int = SEED,
    device: str = DEVICE,
    precision: str | None = PRECISION,
    out: Path | None = OUT,
    as_json: bool = JSON,
    quiet: bool = QUIET,
) -> None:
    """Plot the loss on the straight line between two models and compute the loss barrier.

    Example: fedflat flatness path runs/fedavg-digits-seed0 runs/fedsam-digits-seed0
    """
    from fedflat.experiment.analysis.landscapes import path as path_of
    from fedflat.flatness.landscapes.path import barrier
    from fedflat.reporting.figures.landscapes import Panel, path_picture

    _check("treatment of BatchNorm statistics", statistics, ("interpolated", "estimated"))
    opened = opened_models([first, second], quiet or as_json, device, precision)
    with _progress(quiet or as_json) as progress:
        grid = path_of(
            opened,
            points=points,
            beyond=beyond,
            examples=examples,
            seed=seed,
            statistics=statistics,  # type: ignore[arg-type]
            names=short_names(opened),
            progress=progress,
        )
    barriers = {name: barrier(grid.axes[0], values) for name, values in grid.values.items()}
    shown = [name for name in ("train_loss", "test_error") if name in grid.values] or list(grid.values)[:1]
    title = " to ".join(mark.name for mark in grid.marks)
    files = _write(
        out or folder_for(opened[0], "path"),
        {title: grid},
        {"path": path_picture(grid, shown)},
        [Panel(title, grid)],
        shown[0],
    )
    if as_json:
        heights = {
            name: {"height": rise.height if isfinite(rise.height) else None, "at": rise.at}
            for name, rise in barriers.items()
        }
        print_json({"files": files, "distance": grid.metadata["distance"], "barriers": heights})
        return
    columns = ("value", *(mark.name for mark in grid.marks), "barrier", "at")
    rows = [
        (
            name.replace("_", " "),
            *(f"{mark.values[name]:.4g}" for mark in grid.marks),
            f"{rise.height:.4g}",
            f"{rise.at:.3g}",
        )
        for name, rise in barriers.items()
    ]
    _print(f"From {title}, distance {grid.metadata['distance']:.4g}", columns, rows, files, {"": grid})


COMMANDS: tuple[Callable[..., None], ...] = (landscape, plane, path)


@contextmanager
def _progress(silent: bool) -> Iterator[Progress]:
    """A progress bar on a terminal, an occasional line when piped."""
    console = screen(stderr=True)
    if silent:
        yield lambda done, total: None
        return
    if not console.is_terminal:
        yield _lines()
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


def _lines() -> Progress:
    begun = last = time.monotonic()

    def progress(done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= SECONDS_BETWEEN_LINES and done < total:
            last = now
            left = (now - begun) / done * (total - done)
            screen(stderr=True).print(f"evaluated {done} of {total} points, about {shown_seconds(left)} left")

    return progress


def _write(
    folder: Path, grids: dict[str, Landscape], figures: dict[str, Any], panels: Sequence[Any], value: str
) -> dict[str, str]:
    """Write numbers, figures and the interactive page; returns their paths."""
    from fedflat.cli.shared.one_run import write_figure
    from fedflat.experiment.analysis.landscapes import save_landscapes
    from fedflat.experiment.store.files import write_whole
    from fedflat.reporting.figures.landscape_page import landscape_page

    files = {"numbers": folder / "landscape.json"}
    save_landscapes(files["numbers"], grids)
    for name, figure in figures.items():
        for ending in ("png", "pdf"):
            files[f"{name} ({ending})"] = folder / f"{name}.{ending}"
            write_figure(figure, folder / f"{name}.{ending}")
    files["interactive"] = folder / "landscape.html"
    write_whole(files["interactive"], landscape_page(panels, value, "Landscape"))
    return {name: str(path) for name, path in files.items()}


def _print(
    heading: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[object]],
    files: dict[str, str],
    grids: dict[str, Landscape],
) -> None:
    made = next(iter(grids.values())).metadata
    counts = ", ".join(f"{count} {name} examples" for name, count in made["examples"].items())
    print_table(heading, columns, rows, subtitle=f"{made['data']}, {counts}")
    print_files(files)


def _row(name: str, grid: Landscape, value: str) -> tuple[object, ...]:
    import numpy as np

    values = grid.values[value]
    finite = values[np.isfinite(values)]
    bad = grid.not_finite(value)
    return (
        name,
        *_figures(grid.marks[0], "train_loss", "test_loss", "test_error"),
        _shown(finite.max(), value) if len(finite) else None,
        f"{bad} of {values.size}" if bad else "0",
    )


def _figures(mark: Mark, *names: str) -> list[str | None]:
    """Formatted values of a marked model."""
    return [_shown(mark.values[name], name) if name in mark.values else None for name in names]


def _shown(value: float, name: str) -> str:
    return f"{100 * value:.2f}" if name.endswith("error") else f"{value:.4g}"


def _caption(grid: Landscape) -> str:
    (error,) = _figures(grid.marks[0], "test_error")
    return "" if error is None else f"test error {error} %"


def _document(grid: Landscape) -> dict[str, Any]:
    at_model = {name: value if isfinite(value) else None for name, value in grid.marks[0].values.items()}
    return {
        "at_model": at_model,
        "not_finite": {name: grid.not_finite(name) for name in grid.values},
        "made": grid.metadata,
    }


def _check(what: str, word: str, words: Sequence[str]) -> None:
    if word not in words:
        raise one_of(what, word, words)
