"""What the commands of fedflat flatness share: how models are named, the flags of a measurement, and progress."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from fedflat.cli.shared.flags import optional
from fedflat.cli.shared.screen import screen
from fedflat.errors import UserError

if TYPE_CHECKING:
    from fedflat.experiment.analysis.measured import Measured

MODELS = typer.Argument(
    metavar="MODEL...",
    help="models: RUN (its last average, or else the server's model), RUN:wima, RUN:server@50, or RUN:client3@50, trained again from there",
)
ON = typer.Option("train", "--on", metavar="SET", help="train (what all clients have) or test")
CLIENT = typer.Option(
    None, "--client", metavar="I", min=0, help="on the data of one client, counted from 0", show_default=False
)
EXAMPLES = optional("--examples", "on so many examples, drawn at random", "all", metavar="N", min=1)
SUBSETS = optional("--subsets", "with --examples: how many subsets, for the error bars", "3", min=1)
OUT = optional("--out", "where numbers and pictures go", "a folder in the first run", metavar="FOLDER")
SEED = typer.Option(0, "--seed", min=0, help="seed of everything drawn at random")
BATCH = optional(
    "--batch-size", "examples in memory at a time", "by their size; of CIFAR's images 97 on a CPU, 488 on a GPU", min=1
)
DEVICE = typer.Option("auto", "--device", metavar="NAME", help="auto, cpu or cuda")
PRECISION = optional("--precision", "float32, tf32 or float64", "float32, or as the run", metavar="NAME")


def number_of_subsets(wanted: int | None, examples: int | None) -> int:
    """How many subsets are measured; refused where nothing says how large they are."""
    if wanted is not None and examples is None:
        raise UserError(
            "--subsets says how many subsets, and not how large they are; give --examples too, or measure on all of them"
        )
    return wanted or 3


def opened_models(texts: Sequence[str], silent: bool, device: str, precision: str | None) -> list[Measured]:
    """The models that texts name, their data fetched beforehand where they are not here."""
    from fedflat.cli.shared.downloads import fetch_if_missing
    from fedflat.experiment.analysis.local_models import measured_point
    from fedflat.experiment.analysis.measured import reference
    from fedflat.experiment.store.record import load_record

    for text in texts:
        if list(texts).count(text) > 1:
            raise UserError(f"{text} is listed twice; list each model once")
        fetch_if_missing(load_record(reference(text).run).config, silent)
    return [measured_point(text, device=device, precision=precision) for text in texts]


def short_names(models: Sequence[Measured]) -> list[str]:
    """Names to draw by: as short as tells the models apart, the algorithm or the model, both, or the whole text."""
    from fedflat.experiment.analysis.reopen import primary_model

    def model_and_round(model: Measured) -> str:
        return model.name if model.rounds is None else f"{model.name}@{model.rounds}"

    def algorithm(model: Measured) -> str:
        usual = model.name == primary_model(model.record) and model.rounds is None
        return model.record.config.algorithm if usual else f"{model.record.config.algorithm} {model_and_round(model)}"

    same_run = len({model.label.partition(":")[0] for model in models}) == 1 and len(models) > 1
    found: list[str] = []
    for name in (
        model_and_round if same_run else algorithm,
        lambda model: f"{algorithm(model)} (seed {model.record.config.seed})",
    ):
        found = [name(model) for model in models]
        if len(set(found)) == len(found):
            return found
    return [model.label for model in models]


def folder_for(model: Measured, kind: str) -> Path:
    """Where the figures of a model go, unless something else is said."""
    if model.record.folder is None:
        raise UserError("this run has no folder to write into; say where with --out")
    return model.record.folder.path / "flatness" / kind


@contextmanager
def told(silent: bool, first: str = "reading") -> Iterator[Callable[[str], None]]:
    """On a terminal, what is being done at the moment; nothing in a pipe."""
    console = screen(stderr=True)
    if silent or not console.is_terminal:
        yield lambda text: None
        return
    with console.status(first) as status:
        yield status.update


def plus_minus(values: Sequence[float]) -> str:
    """A mean, and where there are several values their standard deviation.

    >>> plus_minus([1.25]), plus_minus([1.0, 2.0, 3.0])
    ('1.25', '2 ± 1')
    """
    from statistics import fmean, stdev

    return f"{fmean(values):.4g}" if len(values) == 1 else f"{fmean(values):.4g} ± {stdev(values):.2g}"
