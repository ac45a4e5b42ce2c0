"""Gather run folders for a report: read them, check that they are complete, and group them by dataset and partition."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from fedflat.data import fixes_clients, full_partition
from fedflat.display import counted
from fedflat.errors import UserError
from fedflat.experiment.analysis.reopen import is_weights_file
from fedflat.experiment.config import Config
from fedflat.experiment.store.run_collection import runs_below
from fedflat.experiment.store.run_folder import Record, RunFolder, load_record
from fedflat.reporting.comparison import Comparison
from fedflat.reporting.distinct import drop_repeated, relative_paths, run_path
from fedflat.reporting.figures.style import LineStyle, line_styles
from fedflat.reporting.row import LabelledRow, rows_of
from fedflat.setting_names import flat

PARTITION_SETTINGS = ("dataset", "partition", "partition_seed", "clients", "validation")
"""Settings of ``data`` that, with a seed, determine the partition."""
IRRELEVANT_SETTINGS = frozenset(
    {"algorithm", "seed", "data.dir", "evaluation.save_every"}
    | {f"engine.{name}" for name in ("name", "lanes", "compile", "workers", "device", "checkpoint_every")}
)
"""Settings that, like ``flatness``, do not affect results, and algorithm and seed, which reports list separately."""


@dataclass(frozen=True)
class Gathered:
    """The runs of a report, and skipped folders with reasons."""

    records: list[Record]
    left_out: list[tuple[str, str]]
    """(folder, reason) of every folder that was skipped."""


def gather(paths: Iterable[Path]) -> Gathered:
    """Read the runs in these folders or below them.

    A run that is unreadable, or repeats another one, is skipped and listed in ``left_out`` with the reason.
    """
    records: dict[Path, Record] = {}  # by resolved path, so that a folder given twice counts once
    left_out: list[tuple[str, str]] = []  # (folder, reason)
    for path in paths:
        if is_weights_file(str(path)):
            raise UserError(
                f"{path} is a weights file, but a report needs run folders; measure it together with a run, the run "
                f"first, and report the run, which stores the results: fedflat flatness sharpness RUN {path} "
                "--module FILE.py:FUNCTION --dataset NAME"
            )
        if not path.is_dir():
            problem = "is not a folder" if path.exists() else "does not exist"
            raise UserError(f"{path} {problem}; expected a run folder, or a folder that contains runs")
        folders = [path] if RunFolder(path).exists else runs_below(path)
        for folder in folders:
            try:
                records.setdefault(folder.resolve(), _load_complete(folder))
            except UserError as error:
                left_out.append((relative_paths(str(folder)), relative_paths(str(error))))
        without_config = _folders_with(path, "metrics.jsonl") | _folders_with(path, "status.json")
        for folder in sorted(without_config.difference(folders)):
            path_text = relative_paths(str(folder))
            left_out.append((path_text, f"{path_text} has no config.yaml and is incomplete; copy it again"))
    # Irrelevant settings may differ.
    distinct, repeated = drop_repeated(
        records.values(), lambda config: (config.algorithm, config.seed, str(settings_of(config)))
    )
    left_out += repeated
    if not distinct:
        reason = f" ({left_out[0][1]})" if left_out else ""
        raise UserError(f"no runs to report on{reason}; expected folders created by fedflat run")
    return Gathered(distinct, left_out)


def _folders_with(path: Path, name: str) -> set[Path]:
    """Find the folders at or below a path that contain a file of this name."""
    return {file.parent for file in path.rglob(name)}


def _load_complete(path: Path) -> Record:
    """Load the record of a run folder; raise a ``UserError`` if the folder is incomplete."""
    record = load_record(path)
    RunFolder(path).partition()  # raises an error if it is incomplete
    return record


@dataclass(frozen=True)
class Group:
    """Runs with the same dataset and partition, so that runs with the same seed can be compared in pairs."""

    name: str
    """Name of the dataset and partition, for titles."""
    records: list[Record]
    partitions: Mapping[int, dict[str, Any]]
    """Partition statistics by seed."""

    @cached_property
    def rows(self) -> list[LabelledRow]:
        """The rows of a table: runs that differ only in their seed, one row for each model that they evaluated.

        A row is labelled with its algorithm, model and the settings in which experiments differ.
        """
        return rows_of(self.records, settings_of)

    @cached_property
    def styles(self) -> dict[str, LineStyle]:
        """Colour and marker of each row, by label."""
        return line_styles(row.label for row in self.rows)

    @property
    def protocol(self) -> str:
        """Text on the model, participation and local training of these runs, where all runs share them."""
        descriptions = [_training_protocol(record.config) for record in self.records]
        shared = [texts[0] for texts in zip(*descriptions, strict=True) if len(set(texts)) == 1]
        return ", ".join(shared)

    @property
    def metric(self) -> str:
        """The primary metric of these runs."""
        return Comparison(self.records).metric

    @property
    def lower_is_better(self) -> bool:
        """Whether lower values of the primary metric are better."""
        return Comparison(self.records).lower_is_better


def group_runs(records: Sequence[Record], apart: bool = False) -> list[Group]:
    """Group runs by dataset and partition.

    Several groups raise a ``UserError`` unless ``apart`` allows them, because runs on different partitions are not
    comparable.
    """
    groups: dict[tuple[object, ...], list[Record]] = {}
    for record in records:
        groups.setdefault(partition_settings(record.config), []).append(record)
    names = [_shown_data(group[0]) for group in groups.values()]
    if len(groups) > 1 and not apart:
        examples = "; ".join(names[:3]) + ("; ..." if len(names) > 3 else "")
        raise UserError(
            f"these runs have {len(groups)} different partitions ({examples}), so equal seeds are not paired; "
            "select runs with one partition, or report each partition separately (--apart)"
        )
    return [Group(name, group, _partitions(group)) for name, group in zip(names, groups.values(), strict=True)]


def partition_settings(config: Config) -> tuple[object, ...]:
    """Return the values of the settings that, with a seed, determine the partition."""
    return tuple(getattr(config.data, name) for name in PARTITION_SETTINGS)


def _partitions(records: Iterable[Record]) -> dict[int, dict[str, Any]]:
    """Return the partition statistics of each seed, as its first run stored them.

    Raises a ``UserError`` if another run with this seed has a different partition.
    """
    partitions: dict[int, dict[str, Any]] = {}
    first_runs: dict[int, Record] = {}  # for the error message
    for record in records:
        assert record.folder is not None
        seed, partition = record.config.seed, record.folder.partition()
        first_run = first_runs.setdefault(seed, record)
        first_hash = partitions.setdefault(seed, partition)["hash"]
        if partition["hash"] != first_hash:
            raise UserError(
                f"{run_path(first_run)} and {run_path(record)} have seed {seed} but different partitions "
                f"(hash {first_hash[:8]} and {partition['hash'][:8]}); repeat one of them on the same data"
            )
    return dict(sorted(partitions.items()))


def settings_of(config: Config) -> dict[str, Any]:
    """Return the settings that may affect results, except algorithm and seed, by full name, e.g. ``training.lr``."""
    settings = flat(config.model_dump(mode="json", exclude={"flatness"}))
    return {name: value for name, value in settings if name not in IRRELEVANT_SETTINGS}


def _shown_data(record: Record) -> str:
    """Describe the dataset and the partition of a run in words, for a title."""
    data = record.config.data
    # A dataset from a file is named by the file.
    dataset = re.sub(r"^\w+\(path=(?:.*/)?([^/,]+)\)$", r"\1", data.dataset)
    parts = [relative_paths(dataset), shown_partition(data.partition)]
    if data.partition_seed is not None:
        parts.append(f"seed {data.partition_seed}")
    clients = data.clients
    if record.folder is not None and fixes_clients(data.partition):
        partition = record.folder.partition()
        clients = partition["clients"] + partition["unseen"]
    if clients is not None:
        parts.append(counted(clients, "client"))
    if data.validation:
        parts.append(f"{100 * data.validation:g} % validation")
    return ", ".join(parts)


def _training_protocol(config: Config) -> list[str]:
    """Return short texts on the model, clients per round, rounds, local training, batch size and learning rate."""
    training = config.training
    if training.local_steps is None:
        local_training = counted(training.local_epochs, "local epoch")
    else:
        local_training = counted(training.local_steps, "local step")
    return [
        config.model,
        f"{counted(config.federation.clients_per_round, 'client')} per round",
        counted(training.rounds, "round"),
        local_training,
        f"batch size {training.batch_size}",
        f"learning rate {training.lr:g}",
    ]


def shown_partition(text: str) -> str:
    """Write a partition with all its parameters, defaults included, but leave out a ``sigma`` of zero.

    >>> shown_partition("dirichlet"), shown_partition("iid(sigma=0.5)")
    ('dirichlet(alpha=0.1)', 'iid(sigma=0.5)')
    """
    return re.sub(r"\(sigma=0\.0\)|,sigma=0\.0\b", "", full_partition(text)).replace(",", ", ")
