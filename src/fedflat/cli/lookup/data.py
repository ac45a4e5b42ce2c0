"""fedflat data: datasets, their files, and their partition over clients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer

from fedflat.cli.shared.command_group import CommandGroup
from fedflat.cli.shared.completion import complete_dataset, complete_partition
from fedflat.cli.shared.flags import DATA_DIR, JSON, no_default, optional
from fedflat.cli.shared.one_run import print_partition
from fedflat.cli.shared.screen import (
    Downloads,
    key_values,
    print_json,
    print_section,
    screen,
    shown_count,
    shown_hash,
    table,
)

data = typer.Typer(cls=CommandGroup)

NAME = typer.Argument(metavar="NAME", help="dataset (see fedflat data list)", autocompletion=complete_dataset)
HISTOGRAM_CLASSES, HISTOGRAM_CLIENTS = 20, 10
"""Largest number of classes for which a histogram is printed, and largest number of clients in it."""
TITLES = {
    "partitions": "Partitions (--partition)",
    "partition_modifiers": "Partition modifiers, appended with +",
    "augmentations": "Augmentations (--augmentation, joined by +)",
}


@data.callback(invoke_without_command=True)
def about(context: typer.Context) -> None:
    """Datasets: list (default), get, verify, describe.

    Example: fedflat data describe digits --partition 'dirichlet(alpha=0.1)'
    """
    if context.invoked_subcommand is None:
        context.invoke(context.command.commands["list"])  # type: ignore[attr-defined]


@data.command("list")
def list_all(folder: Path | None = DATA_DIR, as_json: bool = JSON) -> None:
    """List datasets, partitions and augmentations.

    Example: fedflat data list
    """
    from fedflat.data import AUGMENTATIONS, DATASETS, PARTITION_MODIFIERS, PARTITIONERS, data_dir

    folder = data_dir(folder)
    datasets = []
    for name, source in DATASETS.items():
        if not source.example:  # only formats for user data have an example
            files = _describe_files(len(source.files), len(source.missing(folder)))
            datasets.append({"name": name, "title": source.title, "files": files})
    components = {
        "partitions": _summaries(PARTITIONERS),
        "partition_modifiers": _summaries(PARTITION_MODIFIERS),
        "augmentations": _summaries(AUGMENTATIONS),
    }
    if as_json:
        print_json({"folder": folder, "data": datasets, **components})
        return
    console = screen()
    console.print(table(("dataset", "what it is", "files"), (dataset.values() for dataset in datasets)))
    console.print(f"in {folder}", style="dim")
    for key, title in TITLES.items():
        rows = ((component["text"], component["summary"]) for component in components[key])
        print_section(title, table(("text", "what it does"), rows))


@data.command()
def get(name: str = NAME, folder: Path | None = DATA_DIR, as_json: bool = JSON) -> None:
    """Download missing or damaged files of a dataset; interrupted downloads are resumed.

    Example: fedflat data get cifar10
    """
    from fedflat.data import DATASETS, data_dir, fetch, names, spell_dataset
    from fedflat.errors import one_of

    name = spell_dataset(name)
    if name not in names():
        raise one_of("dataset", name, names(), "fedflat data list")
    with Downloads(silent=as_json) as downloads:
        fetch(name, folder, downloads.progress)
    if as_json:
        print_json({"name": name, "folder": data_dir(folder)})
    elif not DATASETS[name].files:
        print(f"{name} is built in and has no files")
    else:
        print(f"{name} is complete in {data_dir(folder)}")


@data.command()
def verify(name: str = NAME, folder: Path | None = DATA_DIR, as_json: bool = JSON) -> None:
    """Verify the files of a dataset against known hashes.

    Example: fedflat data verify cifar10
    """
    from fedflat.data import verify as verify_files

    reports = verify_files(name, folder)
    if as_json:
        print_json({"name": name, "files": [asdict(report) for report in reports]})
    elif not reports:
        print(f"{name} is built in and has no files")
    else:
        verdicts = {True: "verified", False: "hash mismatch", None: "readable; no published hash"}
        rows = ((report.file, verdicts[report.as_published], shown_hash(report.sha256)) for report in reports)
        screen().print(table(("file", "verdict", "sha256 of its content"), rows))


@data.command()
def describe(
    name: str = NAME,
    partition: str | None = no_default(
        "--partition", "also describe a partition, e.g. dirichlet(alpha=0.1)", autocompletion=complete_partition
    ),
    clients: int | None = optional("--clients", "number of clients", "50, or that of the partition", min=1),
    seed: int = typer.Option(0, "--seed", min=0, help="seed of the partition"),
    task: str = typer.Option("auto", "--task", help="as for a run; mse, huber: predict integer targets as numbers"),
    folder: Path | None = DATA_DIR,
    as_json: bool = JSON,
) -> None:
    """Describe a dataset and, with --partition, the heterogeneity of its clients.

    Example: fedflat data describe digits --partition 'dirichlet(alpha=0.1)'
    """
    from fedflat.data import describe as describe_dataset
    from fedflat.data import fixes_clients, load, make_partition
    from fedflat.data.scaling import scale_advice
    from fedflat.engines.problem.task import TASK_TARGETS, task_for
    from fedflat.errors import one_of
    from fedflat.experiment.config import DataSettings

    if task not in ("auto", *TASK_TARGETS):
        raise one_of("task", task, ["auto", *TASK_TARGETS])
    is_regression = TASK_TARGETS.get(task) == "numbers"
    with Downloads(silent=as_json) as downloads:
        dataset = load(name, folder, progress=downloads.progress, numbers=is_regression)
    task_for(dataset, task)  # an unsuitable task raises an error
    description = describe_dataset(dataset)
    partition_description: dict[str, Any] | None = None
    if partition is not None:
        train, classes = dataset.train, dataset.num_classes
        default = None if fixes_clients(partition) else DataSettings.model_fields["clients"].default
        partitioned = make_partition(
            partition, train.targets, classes, clients or default, seed, groups=train.groups, coarse=train.coarse
        )
        partition_description = partitioned.describe(train.targets, classes)
        if dataset.group_names and partition_description["partitioner"].startswith("natural"):
            assert train.groups is not None  # they have names
            groups = train.groups[[int(indices[0]) for indices in partitioned.clients]]
            partition_description["client_names"] = [dataset.group_names[group] for group in groups]
    if as_json:
        print_json(description if partition is None else description | {"partition": partition_description})
        return
    _print_dataset(description)
    if advice := scale_advice(dataset):
        screen().print(f"\n{advice[0].upper()}{advice[1:]}.", style="yellow")
    if partition_description is not None:
        print_partition(partition_description)
        names = partition_description.get("client_names")
        if description["classes"] or names:
            _print_histogram(
                partition_description["histogram"], description["classes"], _class_unit(description), names
            )


def _normalisation(mean: list[float], std: list[float], kind: str) -> str:
    """Describe how inputs are normalised; only images stored as bytes and standardised vectors are.

    >>> _normalisation([0.5], [0.25], "image")
    '(pixel / 255 - mean) / std; mean 0.5, std 0.25'
    """
    if not mean:
        return "none, inputs are used as stored"
    if kind == "vector":
        return "standardised: (value - mean) / std of each column"
    means, deviations = (", ".join(f"{value:.4g}" for value in values) for values in (mean, std))
    return f"(pixel / 255 - mean) / std; mean {means}, std {deviations}"


def _print_dataset(description: dict[str, Any]) -> None:
    """Print the size, input shape, targets, number of natural clients and content hash of a dataset."""
    kind, columns = description["kind"], description["columns"]
    texts = {
        "dataset": description["name"],
        "examples": f"{shown_count(description['train'])} for training, {shown_count(description['test'])} for testing",
        "shape": f"{'x'.join(map(str, description['input_shape']))} ({kind})",
        **({"input columns": _counted_names(len(columns), columns)} if columns else {}),
        "normalisation": _normalisation(description["mean"], description["std"], kind),
        **_target_texts(description),
        "natural clients": _counted_names(description["groups"], description["group_names"]),
        "content": shown_hash(description["content"]),
    }
    screen().print()
    screen().print(key_values(texts))


def _target_texts(description: dict[str, Any]) -> dict[str, str]:
    """Return texts by label on the targets: number and names of classes, examples per class; or numbers per example."""
    if description["targets"] == "numbers":
        columns = description["target_shape"][0] if description["target_shape"] else 1
        return {"targets": f"numbers (regression), {columns} per example"}
    from fedflat.reporting.tables.summary import shown_range

    classes = description["classes"]
    singular, plural = ("class", "classes") if description["targets"] == "classes" else ("label", "labels")
    train, test = description["train_class_counts"], description["test_class_counts"]
    return {
        plural: _counted_names(len(classes), classes) or "0",
        f"{_class_unit(description)} per {singular}": f"training: {shown_range(train)}, test: {shown_range(test)}",
    }


def _counted_names(count: int, names: list[str]) -> str | None:
    """Return a number and the first ten names; None for 0.

    >>> _counted_names(2, ["north", "south"]), _counted_names(3, [])
    ('2: north, south', '3')
    """
    if not count:
        return None
    shown = ", ".join(names[:10]) + (", ..." if len(names) > 10 else "")
    return f"{count}: {shown}" if names else str(count)


def _class_unit(description: dict[str, Any]) -> str:
    """Return what classes are assigned to in a dataset: examples, pixels or, in text, tokens."""
    per_token = description["kind"] == "text" and description["target_shape"]
    return "tokens" if per_token else "pixels" if description["kind"] == "segmentation" else "examples"


def _print_histogram(histogram: list[list[int]], classes: list[str], unit: str, names: list[str] | None) -> None:
    """Print the class counts of the first clients, unless there are too many classes for the screen.

    Args:
        histogram: for every client, its number of examples (or pixels) of each class.
        classes: names of the classes; for regression, none.
        unit: what classes are assigned to, e.g. ``examples`` or ``pixels``.
        names: names of the clients; by default their numbers.
    """
    if len(classes) > HISTOGRAM_CLASSES:
        return
    rows: list[list[object]] = []
    for client, counts in enumerate(histogram[:HISTOGRAM_CLIENTS]):
        per_class = [count or None for count in counts[: len(classes)]]
        rows.append([names[client] if names else client, *per_class, sum(counts)])
    which = "every client"
    if len(histogram) > HISTOGRAM_CLIENTS:
        which = f"the first {HISTOGRAM_CLIENTS} of {len(histogram)} clients"
    columns = ("client", *classes, "all")
    title = f"{unit.capitalize()} of {'each class, ' if classes else ''}{which}"
    print_section(title, table(columns, rows, numeric=columns[1:]))


def _describe_files(files: int, missing: int) -> str:
    """Describe how many of a dataset's files are in the folder."""
    if not files:
        return "built in"
    return "here" if not missing else f"{files - missing} of {files} here"


def _summaries(specs: Mapping[str, type[Any]]) -> list[dict[str, str]]:
    """Return the name, the text with default parameters, such as ``dirichlet(alpha=0.5)``, and the summary of each."""
    from fedflat.cli.lookup.models import defaults, summary
    from fedflat.text import show

    return [
        {"name": name, "text": show(name, defaults(spec)), "summary": summary(spec)} for name, spec in specs.items()
    ]
