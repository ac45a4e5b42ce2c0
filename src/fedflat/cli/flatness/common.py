"""Code shared by flatness commands: flags, opening and naming models, and output as files, tables and numbers.

A command receives its shared flags as groups (``DataFlags``, ``ModelFlags``, ``OutputFlags``). It measures models with
``measure_models`` and passes a document, and a function that prints it as tables, to ``OutputFlags.publish``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any, TypeVar

import typer

from fedflat.cli.shared.completion import complete_run
from fedflat.cli.shared.flags import DATA_DIR, JSON, QUIET, SEED, current_context, no_default, optional
from fedflat.cli.shared.screen import (
    fetch_if_missing,
    key_values,
    print_json,
    screen,
    shown_metric,
    status_line,
    table,
    with_unit,
)
from fedflat.errors import UserError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from fedflat.experiment.analysis.post_hoc import PostHoc
    from fedflat.experiment.analysis.run_model import RunModel
    from fedflat.flatness import Objective

MODELS = typer.Argument(
    metavar="MODEL...",
    help="RUN (its last average, or the server model), RUN:wima, RUN:server@50, RUN:client3@50 (local model), "
    "or with --module a weights file (.pt, .safetensors)",
    autocompletion=complete_run,
)
EXAMPLES = optional("--examples", "number of random examples", "all", metavar="N", min=1)
BATCH = optional(
    "--batch-size", "examples per forward pass", "by example size; for CIFAR 97 on a CPU, 488 on a GPU", min=1
)
DEVICE = typer.Option("auto", "--device", metavar="NAME", help="auto, cpu or cuda")
PRECISION = optional("--precision", "float32, tf32 or float64", "float32; float64 for float64 runs", metavar="NAME")
OUT = optional(
    "--out",
    "output folder for numbers and figures",
    "flatness/ inside the first run, or beside the first file",
    metavar="FOLDER",
)
DEFAULT_SUBSETS = 3

T = TypeVar("T")
Progress = Callable[[str], None]
SETTINGS = "settings.json"
MAX_LISTED = 20
"""Maximum number of clients, classes or rounds listed individually."""


@dataclass(frozen=True)
class DataFlags:
    """Flags that choose the data to measure on."""

    on: str = typer.Option("train", "--on", metavar="SET", help="train (all clients' data) or test")
    client: int | None = no_default("--client", "measure on one client's data (first client: 0)", metavar="I", min=0)
    examples: int | None = EXAMPLES
    subsets: int | None = optional(
        "--subsets", "number of random subsets of --examples, for error bars", f"{DEFAULT_SUBSETS}", min=1
    )
    seed: int = SEED
    batch: int | None = BATCH

    def __post_init__(self) -> None:
        if self.subsets is not None and self.examples is None:
            raise UserError("--subsets needs --examples, the number of examples per subset")

    @property
    def name(self) -> str:
        """Name of the data, for headings and files."""
        return self.on if self.client is None else f"client {self.client}"

    def objectives(self, model: RunModel) -> list[Objective]:
        """Return the loss of a model on each random subset of the data."""
        return model.objectives(
            self.on,
            client=self.client,
            examples=self.examples,
            subsets=self.subsets or DEFAULT_SUBSETS,
            seed=self.seed,
            batch=self.batch,
        )


@dataclass(frozen=True)
class ModelFlags:
    """Flags that say how to open models, and what weights files belong to."""

    device: str = DEVICE
    precision: str | None = PRECISION
    module: str | None = no_default(
        "--module", "function or class that builds the torch module of weights files", metavar="FILE.py:FUNCTION"
    )
    dataset: str | None = no_default(
        "--dataset", "dataset to measure weights files on (see fedflat data list)", metavar="NAME"
    )
    data_dir: Path | None = DATA_DIR


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


def measure_models(
    references: Sequence[str],
    data: DataFlags,
    opening: ModelFlags,
    output: OutputFlags,
    measure: Callable[[Objective, Progress], T],
) -> tuple[dict[str, RunModel], dict[str, list[T]]]:
    """Open models and measure each of them on every random subset of the data.

    Args:
        references: the models, as in ``open_models``.
        data, opening, output: flags of the command.
        measure: measures an objective, and passes descriptions of its progress to its second argument.

    Returns:
        The models by name, and by name the results on each subset.
    """
    results: dict[str, list[T]] = {}
    with status_line(output.silent) as progress:
        models = open_models(references, output.silent, opening)
        for name, model in models.items():

            def describe(text: str, name: str = name) -> None:
                progress(f"{name}: {text}")

            results[name] = [measure(objective, describe) for objective in data.objectives(model)]
    return models, results


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


def open_models(references: Sequence[str], silent: bool, flags: ModelFlags) -> dict[str, RunModel]:
    """Open models by references such as ``RUN:wima@50`` or ``model.pt``; download missing datasets first.

    Args:
        references: models of runs, or weights files.
        silent: show no progress of downloads.
        flags: device and precision; for weights files, also their module and dataset.

    Returns:
        The models by their shortest distinct names.
    """
    from fedflat.experiment.analysis.external_model import build_module, external_config, open_external_model
    from fedflat.experiment.analysis.reopen import is_weights_file, parse_reference
    from fedflat.experiment.analysis.run_model import open_model_or_client
    from fedflat.experiment.store.run_folder import load_record

    files = [text for text in references if is_weights_file(text)]
    _require_module_and_dataset(files, flags.module, flags.dataset)
    how = {"device": flags.device, "precision": flags.precision}
    for text in references:
        _require_once(text, references)
        if text not in files:
            fetch_if_missing(load_record(parse_reference(text).run).config, silent)
    config = external_config(flags.dataset, flags.data_dir) if flags.dataset else None
    if config is not None:
        fetch_if_missing(config, silent)
    models: list[RunModel] = []
    for text in references:
        if text in files:
            assert flags.module is not None and config is not None
            models.append(open_external_model(Path(text), build_module(flags.module), config, **how))
        else:
            models.append(open_model_or_client(text, **how))
    labels = [model.label for model in models]
    for label in labels:
        _require_once(label, labels)
    return dict(zip(short_names(models), models, strict=True))


def _require_module_and_dataset(files: Sequence[str], module: str | None, dataset: str | None) -> None:
    """Reject weights files without --module and --dataset, and these flags without a weights file."""
    if files and (module is None or dataset is None):
        raise UserError(
            f"{files[0]} is a weights file and needs --module FILE.py:FUNCTION (a function that builds its module) and "
            "--dataset NAME; for a model of a run, name the run's folder"
        )
    if not files and (module is not None or dataset is not None):
        flag = "--dataset" if module is None else "--module"
        raise UserError(f"{flag} is for weights files (.pt, .safetensors), and none is listed; runs do not need it")


def _require_once(name: str, names: Sequence[str]) -> None:
    if list(names).count(name) > 1:
        raise UserError(f"{name} is listed twice; list each model once")


def short_names(models: Sequence[RunModel]) -> list[str]:
    """Return distinct names that are as short as possible.

    Models of a single run are named by model and round. Otherwise the name is that of the model's row in comparisons,
    with the round unless it is the last. If two names coincide, the seed is added; if they still coincide, labels are
    used.
    """
    runs = {model.label.partition(":")[0] for model in models}
    if len(runs) == 1 and len(models) > 1:
        names = [_model_and_round(model) for model in models]
    else:
        names = [_algorithm_and_model(model) for model in models]
    if len(set(names)) == len(names):
        return names
    with_seeds = [f"{_algorithm_and_model(model)} (seed {model.record.config.seed})" for model in models]
    return with_seeds if len(set(with_seeds)) == len(with_seeds) else [model.label for model in models]


def _model_and_round(model: RunModel) -> str:
    return model.name if model.rounds is None else f"{model.name}@{model.rounds}"


def _algorithm_and_model(model: RunModel) -> str:
    """Return the algorithm and average of a model, as in comparisons, followed by the round unless it is the last.

    For a weights file, return the model's name.
    """
    from fedflat.experiment.analysis.external_model import ExternalModel
    from fedflat.reporting.row import Row

    if isinstance(model, ExternalModel):
        return model.name
    label = Row(model.record.config.algorithm, model.name, (model.record,)).label
    return label if model.rounds is None else f"{label}, round {model.rounds}"


def default_folder(models: dict[str, RunModel], measurement: str) -> Path:
    """Return the default output folder of a measurement: in the first model's run, or beside its weights file."""
    from fedflat.experiment.analysis.external_model import ExternalModel

    model = next(iter(models.values()))
    if isinstance(model, ExternalModel):
        return model.file.parent / "flatness" / measurement
    if model.record.folder is None:
        raise UserError("this run has no folder; choose an output folder with --out")
    return model.record.folder.path / "flatness" / measurement


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


def test_metric(model: RunModel) -> dict[str, float | None]:
    """Evaluate the task's metric on the test set; returns it by name, None if the dataset has no test examples."""
    from fedflat.experiment.analysis.run_model import with_statistics
    from fedflat.experiment.analysis.scoring import Scorer

    problem, metric = model.problem, model.problem.task.metric
    if not len(problem.data.test):
        return {metric: None}
    state = with_statistics(problem, model.state, model.training_positions)
    return {metric: Scorer(problem, state).scores(problem.data.test)[metric]}


def test_column(document: Mapping[str, Any]) -> tuple[str, dict[str, str]]:
    """Return the heading of the test metric, and its values as text by model; ``document`` holds them by model."""
    # By model: the name of its metric and the value.
    tests = {name: next(iter(model["test"].items())) for name, model in document["models"].items()}
    first_metric, _ = next(iter(tests.values()))
    texts = {name: shown_metric(value, metric) for name, (metric, value) in tests.items()}
    return f"test {with_unit(first_metric)}", texts


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
