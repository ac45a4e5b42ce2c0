"""Shared by the flatness commands: model arguments, measurement flags, progress, and writing results."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import typer

from fedflat.cli.shared.flags import optional
from fedflat.cli.shared.screen import facts, screen, table
from fedflat.errors import UserError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from fedflat.experiment.analysis.run_model import RunModel

T = TypeVar("T")
LISTED = 20
"""Maximum number of clients, classes or rounds listed individually."""
MODELS = typer.Argument(
    metavar="MODEL...",
    help="RUN (its last average, or the server model), RUN:wima, RUN:server@50, or RUN:client3@50 (local model)",
)
ON = typer.Option("train", "--on", metavar="SET", help="train (all clients' data) or test")
CLIENT = typer.Option(
    None, "--client", metavar="I", min=0, help="measure on one client's data (first client: 0)", show_default=False
)
EXAMPLES = optional("--examples", "number of random examples", "all", metavar="N", min=1)
SUBSETS = optional("--subsets", "number of random subsets of --examples, for error bars", "3", min=1)
OUT = optional("--out", "output folder for numbers and figures", "a folder inside the first run", metavar="FOLDER")
SEED = typer.Option(0, "--seed", min=0, help="random seed")
BATCH = optional(
    "--batch-size", "examples per forward pass", "by example size; for CIFAR 97 on a CPU, 488 on a GPU", min=1
)
DEVICE = typer.Option("auto", "--device", metavar="NAME", help="auto, cpu or cuda")
PRECISION = optional("--precision", "float32, tf32 or float64", "float32; float64 for float64 runs", metavar="NAME")


def number_of_subsets(wanted: int | None, examples: int | None) -> int:
    """Number of subsets to measure; requires --examples."""
    if wanted is not None and examples is None:
        raise UserError("--subsets needs --examples, the number of examples per subset")
    return wanted or 3


def opened_models(texts: Sequence[str], silent: bool, device: str, precision: str | None) -> list[RunModel]:
    """Open the named models; downloads missing datasets first."""
    from fedflat.cli.shared.downloads import fetch_if_missing
    from fedflat.experiment.analysis.run_model import open_model_or_client, reference
    from fedflat.experiment.store.run_folder import load_record

    for text in texts:
        if list(texts).count(text) > 1:
            raise UserError(f"{text} is listed twice; list each model once")
        fetch_if_missing(load_record(reference(text).run).config, silent)
    return [open_model_or_client(text, device=device, precision=precision) for text in texts]


def short_names(models: Sequence[RunModel]) -> list[str]:
    """The shortest distinct labels: model names, algorithms, algorithms with seeds, or full names."""
    from fedflat.experiment.analysis.reopen import primary_model

    def model_and_round(model: RunModel) -> str:
        return model.name if model.rounds is None else f"{model.name}@{model.rounds}"

    def algorithm(model: RunModel) -> str:
        is_primary = model.name == primary_model(model.record) and model.rounds is None
        return (
            model.record.config.algorithm if is_primary else f"{model.record.config.algorithm} {model_and_round(model)}"
        )

    same_run = len({model.label.partition(":")[0] for model in models}) == 1 and len(models) > 1
    for name in (
        model_and_round if same_run else algorithm,
        lambda model: f"{algorithm(model)} (seed {model.record.config.seed})",
    ):
        labels = [name(model) for model in models]
        if len(set(labels)) == len(labels):
            return labels
    return [model.label for model in models]


def folder_for(model: RunModel, kind: str) -> Path:
    """Default output folder of a measurement."""
    if model.record.folder is None:
        raise UserError("this run has no folder; choose an output folder with --out")
    return model.record.folder.path / "flatness" / kind


@contextmanager
def status_line(silent: bool, first: str = "reading") -> Iterator[Callable[[str], None]]:
    """A status line on a terminal; silent when piped."""
    console = screen(stderr=True)
    if silent or not console.is_terminal:
        yield lambda text: None
        return
    with console.status(first) as status:
        yield status.update


def write_results(folder: Path, name: str, document: dict[str, Any], figure: Figure | None = None) -> dict[str, Path]:
    """Write ``name.json`` and ``name.png`` into ``folder`` (created if missing); returns their paths by kind."""
    from fedflat.cli.shared.one_run import write_figure
    from fedflat.experiment.store.files import create_folder, write_whole

    files = {"numbers": folder / f"{name}.json"}
    create_folder(folder)
    write_whole(files["numbers"], json.dumps(document, indent=2, default=str) + "\n")
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
    """Print a heading, a table whose columns after ``text_columns`` are numeric, and a note."""
    console = screen()
    console.print(f"\n{heading}", style="bold", markup=False)
    if subtitle:
        console.print(subtitle, style="dim", markup=False)
    console.print()
    console.print(table(columns, rows, numbers=tuple(columns)[text_columns:]))
    if note:
        console.print(note, style="dim", markup=False)


def print_files(files: Mapping[str, object]) -> None:
    """List output files, or other facts, below a table."""
    screen().print()
    screen().print(facts(dict(files)))


def thinned(items: Sequence[T], most: int = LISTED) -> list[T]:
    """At most ``most`` evenly spaced items, the last one included."""
    step = -(-len(items) // most) if items else 1
    return [item for place, item in enumerate(items) if (len(items) - 1 - place) % step == 0]


def plus_minus(values: Sequence[float]) -> str:
    """The mean, with the standard deviation if there are several values.

    >>> plus_minus([1.25]), plus_minus([1.0, 2.0, 3.0])
    ('1.25', '2 ± 1')
    """
    from statistics import fmean, stdev

    return f"{fmean(values):.4g}" if len(values) == 1 else f"{fmean(values):.4g} ± {stdev(values):.2g}"
