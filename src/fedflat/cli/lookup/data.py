"""fedflat data: datasets, their files, and their partition over clients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer

from fedflat.cli.shared.downloads import Downloads
from fedflat.cli.shared.flags import JSON, optional
from fedflat.cli.shared.one_run import print_partition
from fedflat.cli.shared.screen import facts, print_json, screen, shown_count, table

data = typer.Typer()

NAME = typer.Argument(metavar="NAME", help="dataset (see fedflat data list)")
FOLDER = optional("--data-dir", "dataset folder", "$FEDFLAT_DATA, or the user cache", metavar="DIR")


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
        list_all(folder=None, as_json=False)


@data.command("list")
def list_all(folder: Path | None = FOLDER, as_json: bool = JSON) -> None:
    """List datasets, partitions and augmentations.

    Example: fedflat data list
    """
    from fedflat.data import AUGMENTATIONS, DATASETS, PARTITION_MODIFIERS, PARTITIONERS, data_dir

    where = data_dir(folder)
    sets = [
        {"name": name, "title": source.title, "files": _presence(len(source.files), len(source.missing(where)))}
        for name, source in DATASETS.items()
        if not source.example
    ]
    more = {
        "partitions": _described(PARTITIONERS),
        "partition_modifiers": _described(PARTITION_MODIFIERS),
        "augmentations": _described(AUGMENTATIONS),
    }
    if as_json:
        print_json({"folder": where, "data": sets, **more})
        return
    console = screen()
    console.print(table(("dataset", "what it is", "files"), (line.values() for line in sets)))
    console.print(f"in {where}", style="dim")
    for key, title in TITLES.items():
        console.print()
        console.print(title, style="bold")
        console.print(table(("text", "what it does"), ((line["text"], line["summary"]) for line in more[key])))


@data.command()
def get(name: str = NAME, folder: Path | None = FOLDER, as_json: bool = JSON) -> None:
    """Download missing or damaged files of a dataset; interrupted downloads are resumed.

    Example: fedflat data get cifar10
    """
    from fedflat.data import data_dir, fetch, names
    from fedflat.errors import one_of

    if name not in names():
        raise one_of("dataset", name, names(), "fedflat data list")
    with Downloads(silent=as_json) as downloads:
        fetch(name, folder, downloads.arrived)
    if as_json:
        print_json({"name": name, "folder": data_dir(folder)})
    else:
        print(f"{name} is complete in {data_dir(folder)}")


@data.command()
def verify(name: str = NAME, folder: Path | None = FOLDER, as_json: bool = JSON) -> None:
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
        words = {True: "verified", False: "hash mismatch", None: "readable; no published hash"}
        screen().print(
            table(
                ("file", "verdict", "sha256 of its content"),
                ((r.file, words[r.as_published], r.sha256) for r in reports),
            )
        )


@data.command()
def describe(
    name: str = NAME,
    partition: str | None = typer.Option(
        None, "--partition", help="also describe a partition, e.g. dirichlet(alpha=0.1)", show_default=False
    ),
    clients: int = typer.Option(50, "--clients", min=1, help="among how many clients"),
    seed: int = typer.Option(0, "--seed", min=0, help="seed of the partition"),
    folder: Path | None = FOLDER,
    as_json: bool = JSON,
) -> None:
    """Describe a dataset and, with --partition, the heterogeneity of its clients.

    Example: fedflat data describe digits --partition 'dirichlet(alpha=0.1)'
    """
    from fedflat.data import describe as description_of
    from fedflat.data import fixes_clients, load, make_partition

    with Downloads(silent=as_json) as downloads:
        loaded = load(name, folder, progress=downloads.arrived)
    about = description_of(loaded)
    divided: dict[str, Any] | None = None
    if partition is not None:
        number, train = None if fixes_clients(partition) else clients, loaded.train
        made = make_partition(
            partition, train.targets, loaded.num_classes, number, seed, groups=train.groups, coarse=train.coarse
        )
        divided = made.describe(loaded.train.targets, loaded.num_classes)
    if as_json:
        print_json(about | ({"partition": divided} if divided is not None else {}))
        return
    _print(about)
    if divided is not None:
        print_partition(divided)
        _print_histogram(divided["histogram"], about["classes"], _counted(about["kind"]))


def _print(about: dict[str, Any]) -> None:
    classes = about["classes"]
    train, test = about["train_class_counts"], about["test_class_counts"]
    screen().print()
    screen().print(
        facts(
            {
                "dataset": about["name"],
                "examples": f"{shown_count(about['train'])} for training, {shown_count(about['test'])} for testing",
                "shape": f"{'x'.join(map(str, about['input_shape']))} ({about['kind']})",
                "classes": f"{len(classes)}: {', '.join(classes[:10])}{', ...' if len(classes) > 10 else ''}",
                f"{_counted(about['kind'])} per class": f"training: {min(train)} to {max(train)}, "
                f"test: {min(test)} to {max(test)}",
                "natural clients": about["groups"] or None,
                "content": about["content"],
            }
        )
    )


def _counted(kind: str) -> str:
    """The counted unit of a class."""
    return {"segmentation": "pixels", "text": "characters"}.get(kind, "examples")


def _print_histogram(histogram: list[list[int]], classes: list[str], counted: str, clients: int = 10) -> None:
    """Class counts of the first clients that fit on the screen."""
    if len(classes) > 20:
        return
    rows = (
        [number, *(count or None for count in counts), sum(counts)] for number, counts in enumerate(histogram[:clients])
    )
    more = f"the first {clients} of {len(histogram)} clients" if len(histogram) > clients else "every client"
    columns = ("client", *classes, "all")
    console = screen()
    console.print()
    console.print(f"{counted.capitalize()} of each class, {more}", style="bold")
    console.print(table(columns, rows, numbers=columns[1:]))


def _presence(files: int, missing: int) -> str:
    if not files:
        return "built in"
    return "here" if not missing else f"{files - missing} of {files} here"


def _described(specs: Mapping[str, type[Any]]) -> list[dict[str, str]]:
    from fedflat.cli.lookup.models import defaults, summary
    from fedflat.text import show

    return [
        {"name": name, "text": show(name, defaults(spec)), "summary": summary(spec)} for name, spec in specs.items()
    ]
