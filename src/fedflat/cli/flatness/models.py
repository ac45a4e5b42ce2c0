"""Code shared by flatness commands that measure models: their flags, and opening, naming and measuring models."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import typer

from fedflat.cli.flatness.common import OutputFlags, Progress
from fedflat.cli.shared.completion import complete_run
from fedflat.cli.shared.flags import DATA_DIR, SEED, no_default, optional
from fedflat.cli.shared.screen import fetch_if_missing, screen, shown_count, shown_metric, status_line, with_unit
from fedflat.errors import UserError

if TYPE_CHECKING:
    from torch import nn

    from fedflat.data import Dataset
    from fedflat.experiment.analysis.run_model import RunModel
    from fedflat.flatness import Objective

T = TypeVar("T")
DEFAULT_SUBSETS = 3
MAX_LISTED_CHANNELS = 4
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


@dataclass(frozen=True)
class DataFlags:
    """Flags that choose the data to measure on."""

    on: str = typer.Option("train", "--on", metavar="SET", help="train (all clients' data) or test")
    client: int | None = no_default("--client", "measure on one client's data (first client: 0)", metavar="I", min=0)
    examples: int | None = optional(
        "--examples", "number of random examples in each of the --subsets", "all, in one set", metavar="N", min=1
    )
    subsets: int | None = optional(
        "--subsets", "number of random subsets of --examples, for error bars", f"{DEFAULT_SUBSETS}", min=1
    )
    seed: int = SEED
    batch_size: int | None = BATCH

    def __post_init__(self) -> None:
        if self.subsets is not None and self.examples is None:
            raise UserError("--subsets needs --examples, the number of examples per subset")

    @property
    def name(self) -> str:
        """Name of the data, for headings and files."""
        return self.on if self.client is None else f"client {self.client}"

    def describe(self, model: RunModel, subsets: Sequence[Objective]) -> str:
        """Return number of examples and precision, e.g. ``3 subsets of 500 of 1,442 examples, float32``.

        ``subsets`` is the loss of the model on each random subset of the data.
        """
        count = shown_count(subsets[0].examples)
        if len(subsets) > 1:
            total = model.objective(self.on, client=self.client).examples
            count = f"{len(subsets)} subsets of {count} of {shown_count(total)}"
        return f"{count} examples, {subsets[0].precision}"

    def objectives(self, model: RunModel) -> list[Objective]:
        """Return the loss of a model on each random subset of the data."""
        return model.objectives(
            self.on,
            client=self.client,
            examples=self.examples,
            subsets=self.subsets or DEFAULT_SUBSETS,
            seed=self.seed,
            batch_size=self.batch_size,
        )


def print_caveats(models: Mapping[str, RunModel], losses: Mapping[str, Sequence[float]], on: str = "train") -> None:
    """Print what the loss is, how the inputs of weights files are normalised, and why models are not comparable.

    Args:
        models: the measured models by name.
        losses: for each model, its loss on each subset.
        on: the set on which the losses were measured.
    """
    from fedflat.flatness.checks import describe_unequal_losses, describe_unequal_sizes

    means = {name: fmean(values) for name, values in losses.items()}
    files = print_normalisation(models, means, on)
    if len(files) < len(models):
        note = "loss: mean over these examples; a run's local train loss differs: it is a mean over local steps"
        screen().print(note, style="dim")
    warnings = [describe_unequal_sizes({name: model.problem.layout.size for name, model in models.items()})]
    if on == "train":
        warnings.append(describe_unequal_losses(means, has_runs=len(files) < len(models)))
    for warning in filter(None, warnings):
        screen().print(warning, style="yellow")


def print_normalisation(models: Mapping[str, RunModel], losses: Mapping[str, float], on: str = "train") -> list[str]:
    """Print how the inputs of weights files are normalised, and their losses; return the names of these files."""
    from fedflat.experiment.analysis.external_model import ExternalModel

    files = [name for name, model in models.items() if isinstance(model, ExternalModel)]
    if files:
        shown = ", ".join(f"{name} {losses[name]:.4g}" for name in files)
        normalisation = _describe_normalisation(models[files[0]].problem.data)
        check = f"check that the {on} loss on these examples agrees with your script (model.eval()): {shown}"
        screen().print(f"{normalisation}; {check}")
    return files


def _describe_normalisation(data: Dataset) -> str:
    if not data.mean:
        return "inputs are not normalised"
    if len(data.mean) > MAX_LISTED_CHANNELS:
        return "each input column is standardised"
    mean, std = (", ".join(f"{value:.4g}" for value in values) for values in (data.mean, data.std))
    return f"inputs normalised with mean {mean}, std {std}"


@dataclass(frozen=True)
class ModelFlags:
    """Flags that say how to open models, and the module and dataset of weights files."""

    device: str = DEVICE
    precision: str | None = PRECISION
    module: str | None = no_default(
        "--module",
        "function or class that builds the torch module of weights files, and of runs with a user-supplied network",
        metavar="FILE.py:FUNCTION",
    )
    dataset: str | None = no_default(
        "--dataset", "dataset to measure weights files on (see fedflat data list)", metavar="NAME"
    )
    data_dir: Path | None = DATA_DIR


class MeasuredModels(NamedTuple, Generic[T]):
    """Models with their measurements."""

    data: DataFlags
    models: dict[str, RunModel]
    results: dict[str, list[T]]
    """By model, the result on each random subset of the data."""
    examples: str
    """Text on the number of examples and subsets, and on the precision."""

    def document(self, values: Mapping[str, dict[str, Any]], **settings: object) -> dict[str, Any]:
        """Return the data, ``settings`` and, for each model, its test metric and ``values``; JSON-compatible."""
        documents = {
            name: {
                "model": model.label,
                "described": model.description,
                "parameters": model.problem.layout.size,
                "test": _test_metric(model),
                **values[name],
            }
            for name, model in self.models.items()
        }
        return {"on": self.data.name, "seed": self.data.seed, **settings, "models": documents}

    def print_caveats(self, loss: Callable[[T], float]) -> None:
        """Print caveats about the models, given the loss of a result."""
        losses = {name: [loss(result) for result in subsets] for name, subsets in self.results.items()}
        print_caveats(self.models, losses, self.data.on)


def measure_models(
    references: Sequence[str],
    data: DataFlags,
    opening: ModelFlags,
    output: OutputFlags,
    measure: Callable[[Objective, Progress], T],
) -> MeasuredModels[T]:
    """Open models and measure each of them on every random subset of the data.

    Args:
        references: the models, as in ``open_models``.
        data, opening, output: flags of the command.
        measure: measures an objective, and passes descriptions of its progress to its second argument.
    """
    from fedflat.experiment.analysis.landscapes import require_same_dataset
    from fedflat.experiment.analysis.reopen import is_weights_file

    if data.client is not None and (files := [text for text in references if is_weights_file(text)]):
        raise UserError(f"--client selects a client of a run, but {files[0]} is a weights file; leave --client out")
    results: dict[str, list[T]] = {}
    examples = ""
    with status_line(output.silent) as progress:
        models = open_models(references, output.silent, opening)
        require_same_dataset(list(models.values()), list(models))
        for name, model in models.items():

            def describe(text: str, name: str = name) -> None:
                progress(f"{name}: {text}")

            objectives = data.objectives(model)
            examples = examples or data.describe(model, objectives)
            results[name] = [measure(objective, describe) for objective in objectives]
    return MeasuredModels(data, models, results, examples)


def open_models(references: Sequence[str], silent: bool, flags: ModelFlags) -> dict[str, RunModel]:
    """Open models by references such as ``RUN:wima@50`` or ``model.pt``; download missing datasets first.

    Args:
        references: models of runs, or weights files.
        silent: show no progress of downloads.
        flags: device and precision; for weights files, also their module and dataset. The module is also the network
            of runs with a user-supplied one.

    Returns:
        The models by their shortest distinct names.
    """
    from fedflat.experiment.analysis.external_model import build_module, external_config, open_external_model
    from fedflat.experiment.analysis.reopen import is_weights_file, parse_reference
    from fedflat.experiment.analysis.run_model import open_model_or_client
    from fedflat.experiment.setup.problem import is_user_supplied
    from fedflat.experiment.store.run_collection import run_glob
    from fedflat.experiment.store.run_folder import RunFolder, load_record

    files = [text for text in references if is_weights_file(text)]
    _require_module_and_dataset(files, flags)
    networks: dict[str, nn.Module] = {}  # of runs that were trained with a user-supplied network
    how = {"device": flags.device, "precision": flags.precision}
    _require_distinct(references)
    for text in references:
        if text not in files:
            folder = parse_reference(text).run
            if (pattern := run_glob(folder)) and not RunFolder(folder).exists:
                raise UserError(f"{folder} is not a run but contains runs; pass one of them, or several: {pattern}")
            run_config = load_record(folder).config
            fetch_if_missing(run_config, silent)
            if flags.module is not None and is_user_supplied(run_config.model):
                networks[text] = build_module(flags.module)
    if flags.module is not None and not files and not networks:
        raise UserError(
            "--module is for weights files (.pt, .safetensors) and runs with a user-supplied network, but none is "
            "listed; other runs do not need it"
        )
    config = external_config(flags.dataset, flags.data_dir) if flags.dataset else None
    if config is not None:
        fetch_if_missing(config, silent)
    models: list[RunModel] = []
    for text in references:
        if text in files:
            assert flags.module is not None and config is not None
            models.append(open_external_model(Path(text), build_module(flags.module), config, **how))
        else:
            models.append(open_model_or_client(text, network=networks.get(text), **how))
    _require_distinct([model.label for model in models])
    return dict(zip(short_names(models), models, strict=True))


def _require_module_and_dataset(files: Sequence[str], flags: ModelFlags) -> None:
    """Reject weights files without --module and --dataset, and flags for their data without a weights file."""
    if files and (flags.module is None or flags.dataset is None):
        raise UserError(
            f"{files[0]} is a weights file and needs --module FILE.py:FUNCTION (a function that builds its module) and "
            "--dataset NAME; for a model of a run, name the run's folder"
        )
    if not files and flags.dataset is not None:
        raise UserError("--dataset is for weights files (.pt, .safetensors), but none is listed; runs do not need it")
    if not files and flags.data_dir is not None:
        raise UserError("--data-dir is for weights files; the data of a run are in the folder data.dir of its config")


def _require_distinct(names: Sequence[str]) -> None:
    name, count = Counter(names).most_common(1)[0]
    if count > 1:
        raise UserError(f"{name} is listed twice; list each model once")


def short_names(models: Sequence[RunModel]) -> list[str]:
    """Return distinct names that are as short as possible.

    Models of a single run are named by model and round. Otherwise the name is that of the model's row in comparisons,
    with the round unless it is the last. If two names coincide, the seed is added; if they still coincide, labels are
    used, without the folders that all of them share.
    """
    runs = {model.label.partition(":")[0] for model in models}
    name_of = _model_and_round if len(runs) == 1 and len(models) > 1 else _algorithm_and_model
    with_seeds = [f"{_algorithm_and_model(model)} (seed {model.record.config.seed})" for model in models]
    for names in ([name_of(model) for model in models], with_seeds):
        if len(set(names)) == len(names):
            return names
    paths = [model.label.split("/") for model in models]
    shared = len(list(takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False))))
    return ["/".join(path[shared:]) for path in paths]


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


def _test_metric(model: RunModel) -> dict[str, float | None]:
    """Evaluate the task's metric on the test set; returns it by name, None if the dataset has no test examples."""
    from fedflat.experiment.analysis.run_model import with_statistics
    from fedflat.experiment.analysis.scoring import Scorer

    problem, metric = model.problem, model.problem.task.metric
    if not len(problem.data.test):
        return {metric: None}
    state = with_statistics(problem, model.state, model.training_positions)
    return {metric: Scorer(problem, state).scores(problem.data.test)[metric]}


def test_column(document: Mapping[str, Any]) -> tuple[str, dict[str, str]]:
    """Return the heading of the test metric, and its values as text by model, from a document with the models."""
    # By model: the name of its metric and the value.
    tests = {name: next(iter(model["test"].items())) for name, model in document["models"].items()}
    first_metric, _ = next(iter(tests.values()))
    texts = {name: shown_metric(value, metric) for name, (metric, value) in tests.items()}
    return f"test {with_unit(first_metric)}", texts
