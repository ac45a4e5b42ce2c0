"""fedflat flatness landscape, plane and path: the loss around models, on the plane through them and between them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from fedflat.cli.flatness.flags import DEVICE, MODELS, OUT, PRECISION, SEED, folder_for, opened_models, short_names
from fedflat.cli.shared.flags import JSON, QUIET, optional
from fedflat.cli.shared.screen import facts, print_json, screen, shown_seconds, table
from fedflat.errors import UserError, one_of

if TYPE_CHECKING:
    from fedflat.flatness.landscapes.grid import Landscape, Mark, Progress

SECONDS_BETWEEN_LINES = 5.0
POINTS = typer.Option(41, "--points", min=2, help="points along each axis")
EXAMPLES = optional(
    "--examples", "on so many training and as many test examples, drawn at random", "all", metavar="N", min=1
)
VALUE = typer.Option(
    "train_loss", "--value", metavar="NAME", help="what is drawn: train_loss, test_loss, train_error or test_error"
)
STATISTICS = typer.Option(
    "interpolated",
    "--statistics",
    metavar="HOW",
    help="BatchNorm statistics between models: interpolated, or estimated anew at each point",
)


def landscape(
    models: list[str] = MODELS,
    dimensions: int = typer.Option(2, "--dimensions", min=1, max=2, help="along one random direction or two"),
    radius: float = typer.Option(1.0, "--radius", help="how far to look, in norms of the model's own filters"),
    points: int = POINTS,
    examples: int | None = EXAMPLES,
    one_dimensional: str = typer.Option(
        "zero",
        "--one-dimensional",
        metavar="HOW",
        help="biases and the like: zero (not moved), or scaled (moved as one filter each)",
    ),
    value: str = VALUE,
    seed: int = SEED,
    device: str = DEVICE,
    precision: str | None = PRECISION,
    out: Path | None = OUT,
    as_json: bool = JSON,
    quiet: bool = QUIET,
) -> None:
    """The loss around models, along random directions normalised filter by filter; several models share directions and scale.

    Example: fedflat flatness landscape runs/fedavg-digits-seed0 runs/fedsam-digits-seed0 --points 21 --examples 500
    """
    from fedflat.experiment.analysis.landscapes import landscapes
    from fedflat.experiment.analysis.loss_and_error import measured_values
    from fedflat.flatness.landscapes.directions import ONE_DIMENSIONAL
    from fedflat.reporting.figures.landscape_scale import shown_value
    from fedflat.reporting.figures.landscapes import Panel, contours, lines, surfaces

    _known("way to treat tensors with one dimension", one_dimensional, ONE_DIMENSIONAL)
    opened = opened_models(models, quiet or as_json, device, precision)
    _known("value to draw", value, measured_values(opened[0].problem.task.metric))
    with _progress(quiet or as_json) as progress:
        found = landscapes(
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
    panels = [Panel(name, one, _line_below(one)) for name, one in found.items()]
    drawn = {"contours": contours, "surfaces": surfaces} if dimensions == 2 else {"lines": lines}
    figures = {name: draw(panels, value) for name, draw in drawn.items()}
    files = _write(out or folder_for(opened[0], "landscape"), found, figures, panels, value)
    if as_json:
        print_json({"files": files, "models": {name: _document(one) for name, one in found.items()}})
        return
    highest = f"highest {shown_value(value)}{' %' * value.endswith('error')} within {radius:g}"
    columns = ("model", "training loss", "test loss", "test error %", highest, "not finite")
    rows = [_row(name, one, value) for name, one in found.items()]
    _print(
        f"Landscapes around {len(found)} model{'s' * (len(found) > 1)}",
        columns,
        rows,
        files,
        next(iter(found.values())),
    )


def plane(
    models: list[str] = MODELS,
    points: int = POINTS,
    margin: float = typer.Option(
        0.25, "--margin", min=0, help="how far beyond the models to look, as a share of their extent"
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
    """The plane through three models, with training loss and test error; further models are marked where they are nearest to it.

    Example: fedflat flatness plane runs/fedavg-digits-seed0 runs/fedsam-digits-seed0 runs/fedmoswa-digits-seed0 --points 21
    """
    from fedflat.experiment.analysis.landscapes import plane as plane_of
    from fedflat.reporting.figures.landscapes import Panel, plane_picture, surfaces

    _known("way to treat BatchNorm statistics", statistics, ("interpolated", "estimated"))
    if len(models) < 3:
        raise UserError(
            f"a plane needs three models, but here {'is' if len(models) == 1 else 'are'} {len(models)}; name more"
        )
    opened = opened_models(models, quiet or as_json, device, precision)
    with _progress(quiet or as_json) as progress:
        found = plane_of(
            opened,
            points=points,
            margin=margin,
            examples=examples,
            seed=seed,
            statistics=statistics,  # type: ignore[arg-type]
            names=short_names(opened),
            progress=progress,
        )
    panel = Panel("", found)
    shown = [name for name in ("train_loss", "test_error") if name in found.values] or list(found.values)[:1]
    figures = {"plane": plane_picture(found, shown), "surface": surfaces([panel], shown[0])}
    files = _write(out or folder_for(opened[0], "plane"), {"plane": found}, figures, [panel], shown[0])
    if as_json:
        marks = [{"name": mark.name, "at": mark.at, "off": mark.off} for mark in found.marks]
        print_json({"files": files, "marks": marks, "distances": found.made["distances"]})
        return
    columns = ("model", "x", "y", "off the plane", "training loss", "test error %")
    rows = [
        (mark.name, *(f"{x:.4g}" for x in mark.at), f"{mark.off:.3g}", *_figures(mark, "train_loss", "test_error"))
        for mark in found.marks
    ]
    _print("The plane through " + ", ".join(mark.name for mark in found.marks[:3]), columns, rows, files, found)


def path(
    first: str = typer.Argument(
        metavar="MODEL", help="where the way begins: RUN, RUN:wima, RUN:server@50 or RUN:client3@50"
    ),
    second: str = typer.Argument(metavar="MODEL", help="where it ends"),
    points: int = POINTS,
    beyond: float = typer.Option(
        0.0, "--beyond", min=0, help="how far beyond both ends to look, as a share of the way"
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
    """The straight way from one model to another, and the barrier on it: how far the loss rises above the line between its ends.

    Example: fedflat flatness path runs/fedavg-digits-seed0 runs/fedsam-digits-seed0
    """
    from fedflat.experiment.analysis.landscapes import path as path_of
    from fedflat.flatness.landscapes.path import barrier
    from fedflat.reporting.figures.landscapes import Panel, path_picture

    _known("way to treat BatchNorm statistics", statistics, ("interpolated", "estimated"))
    opened = opened_models([first, second], quiet or as_json, device, precision)
    with _progress(quiet or as_json) as progress:
        found = path_of(
            opened,
            points=points,
            beyond=beyond,
            examples=examples,
            seed=seed,
            statistics=statistics,  # type: ignore[arg-type]
            names=short_names(opened),
            progress=progress,
        )
    barriers = {name: barrier(found.axes[0], values) for name, values in found.values.items()}
    shown = [name for name in ("train_loss", "test_error") if name in found.values] or list(found.values)[:1]
    title = " to ".join(mark.name for mark in found.marks)
    files = _write(
        out or folder_for(opened[0], "path"),
        {title: found},
        {"path": path_picture(found, shown)},
        [Panel(title, found)],
        shown[0],
    )
    if as_json:
        heights = {
            name: {"height": one.height if isfinite(one.height) else None, "at": one.at}
            for name, one in barriers.items()
        }
        print_json({"files": files, "distance": found.made["distance"], "barriers": heights})
        return
    columns = ("value", *(mark.name for mark in found.marks), "barrier", "at")
    rows = [
        (
            name.replace("_", " "),
            *(f"{mark.values[name]:.4g}" for mark in found.marks),
            f"{one.height:.4g}",
            f"{one.at:.3g}",
        )
        for name, one in barriers.items()
    ]
    _print(f"From {title}, {found.made['distance']:.4g} apart", columns, rows, files, found)


COMMANDS: tuple[Callable[..., None], ...] = (landscape, plane, path)


# --- showing ---------------------------------------------------------------------------------------------------------------------


@contextmanager
def _progress(silent: bool) -> Iterator[Progress]:
    """A bar with the time left on a terminal, a line now and then in a pipe."""
    console = screen(stderr=True)
    if silent:
        yield lambda done, total: None
        return
    if not console.is_terminal:
        yield _lines()
        return
    from rich import progress

    with progress.Progress(
        progress.TextColumn("measuring"),
        progress.BarColumn(bar_width=24),
        progress.MofNCompleteColumn(),
        progress.TextColumn("models", style="dim"),
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
            screen(stderr=True).print(f"measured {done} of {total} models, about {shown_seconds(left)} left")

    return progress


def _write(
    folder: Path, found: dict[str, Landscape], figures: dict[str, Any], panels: Sequence[Any], value: str
) -> dict[str, str]:
    """Numbers, pictures and the page to turn; returns where each is."""
    from fedflat.cli.shared.one_run import write_figure
    from fedflat.experiment.analysis.landscapes import save_landscapes
    from fedflat.experiment.store.atomic_files import write_whole
    from fedflat.reporting.figures.landscape_page import landscape_page

    files = {"numbers": folder / "landscape.json"}
    save_landscapes(files["numbers"], found)
    for name, figure in figures.items():
        for ending in ("png", "pdf"):
            files[f"{name} ({ending})"] = folder / f"{name}.{ending}"
            write_figure(figure, folder / f"{name}.{ending}")
    files["to turn"] = folder / "landscape.html"
    write_whole(files["to turn"], landscape_page(panels, value, "Landscape"))
    return {name: str(path) for name, path in files.items()}


def _print(
    heading: str, columns: Sequence[str], rows: Sequence[Sequence[object]], files: dict[str, str], one: Landscape
) -> None:
    console = screen()
    console.print()
    console.print(heading, style="bold", markup=False)
    counts = ", ".join(f"{count} {name} examples" for name, count in one.made["examples"].items())
    console.print(f"{one.made['data']}, {counts}", style="dim", markup=False)
    console.print()
    console.print(table(columns, rows, numbers=columns[1:]))
    console.print()
    console.print(facts(files))


def _row(name: str, one: Landscape, value: str) -> tuple[object, ...]:
    import numpy as np

    values = one.values[value]
    finite = values[np.isfinite(values)]
    bad = one.not_finite(value)
    return (
        name,
        *_figures(one.marks[0], "train_loss", "test_loss", "test_error"),
        _shown(finite.max(), value) if len(finite) else None,
        f"{bad} of {values.size}" if bad else "0",
    )


def _figures(mark: Mark, *names: str) -> list[str | None]:
    """Figures of a model itself, as they are shown."""
    return [_shown(mark.values[name], name) if name in mark.values else None for name in names]


def _shown(value: float, name: str) -> str:
    return f"{100 * value:.2f}" if name.endswith("error") else f"{value:.4g}"


def _line_below(one: Landscape) -> str:
    (error,) = _figures(one.marks[0], "test_error")
    return "" if error is None else f"test error {error} %"


def _document(one: Landscape) -> dict[str, Any]:
    at_model = {name: value if isfinite(value) else None for name, value in one.marks[0].values.items()}
    return {"at_model": at_model, "not_finite": {name: one.not_finite(name) for name in one.values}, "made": one.made}


def _known(what: str, word: str, words: Sequence[str]) -> None:
    if word not in words:
        raise one_of(what, word, words)
