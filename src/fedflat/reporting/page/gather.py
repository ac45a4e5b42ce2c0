"""Gather run folders for a report: read them, check that they are complete, and group them by dataset and partition."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from fedflat.data import full_partition
from fedflat.errors import UserError
from fedflat.experiment.config import Config
from fedflat.experiment.stopping import ENDED_STATUSES
from fedflat.experiment.store.run_folder import Record, RunFolder, load_record
from fedflat.reporting.result import Result, Row
from fedflat.text import write_value

PARTITION_SETTINGS = ("dataset", "partition", "partition_seed", "clients", "validation")
"""Settings of ``data`` that, with a seed, determine the partition."""
IRRELEVANT_SETTINGS = frozenset(
    {"algorithm", "seed", "data.dir", "evaluation.save_every", "flatness"}
    | {f"engine.{name}" for name in ("name", "lanes", "compile", "workers", "device", "checkpoint_every")}
)
"""Settings that do not affect results, and the two that a report compares."""


@dataclass(frozen=True)
class Gathered:
    """The runs of a report, and skipped folders with reasons."""

    records: list[Record]
    left_out: list[tuple[str, str]] = field(default_factory=list)


def gather(paths: Iterable[Path]) -> Gathered:
    """The runs in these folders or below them.

    A folder given explicitly must be readable; an unreadable one found below is skipped.
    """
    records: dict[Path, Record] = {}
    left_out: list[tuple[str, str]] = []
    for path in paths:
        if not path.is_dir():
            raise UserError(f"{path} does not exist; expected a run folder, or a folder that contains runs")
        if RunFolder(path).exists:
            records.setdefault(path.resolve(), whole_record(path))
            continue
        found = sorted(file.parent for file in path.rglob("config.yaml"))
        for folder in found:
            try:
                records.setdefault(folder.resolve(), whole_record(folder))
            except UserError as why:
                left_out.append((str(folder), str(why)))
        half = {file.parent for name in ("metrics.jsonl", "status.json") for file in path.rglob(name)} - set(found)
        left_out += [
            (str(folder), f"{folder} has no config.yaml and is incomplete; copy it again") for folder in sorted(half)
        ]
    kept = _once(list(records.values()), left_out)
    if not kept:
        first = f" ({left_out[0][1]})" if left_out else ""
        raise UserError(f"no runs to report on{first}; expected folders created by fedflat run")
    return Gathered(kept, left_out)


def whole_record(path: Path) -> Record:
    """The record of a run folder; raises a ``UserError`` if it is incomplete."""
    record, folder = load_record(path), RunFolder(path)
    status, partition = folder.status(), folder.partition()
    if "hash" not in partition or "histogram" not in partition:
        raise UserError(f"{path / 'partition.json'} is incomplete; copy the run again")
    said, there = int(status.get("rounds", 0)), int(record.history[-1]["round"]) if record.history else 0
    due = said - 1 if record.status == "diverged" else said  # the round of divergence is not evaluated
    if record.status in ENDED_STATUSES and due - there >= record.config.evaluation.every:
        raise UserError(
            f"{path} is incomplete: it ended after {said} rounds, but metrics.jsonl ends at {there}; copy it again"
        )
    return record


def _once(records: list[Record], left_out: list[tuple[str, str]]) -> list[Record]:
    """Drop runs that repeat another one, which would count a seed twice."""
    seen: dict[tuple[object, ...], str] = {}
    kept = []
    for record in records:
        key = (record.config.algorithm, record.config.seed, tuple(sorted(settings_of(record.config).items())))
        if key in seen:
            left_out.append((where(record), f"{where(record)} repeats {seen[key]}: the same settings and seed"))
        else:
            seen[key] = where(record)
            kept.append(record)
    return kept


@dataclass(frozen=True)
class Group:
    """Runs with the same dataset and partition; those with the same seed form pairs."""

    name: str
    records: list[Record]
    partitions: Mapping[int, dict[str, Any]]
    """Partition statistics by seed."""

    @cached_property
    def rows(self) -> list[tuple[str, Row, dict[str, str]]]:
        """One row per algorithm and model over all seeds: label, runs, and distinguishing settings."""
        together: dict[tuple[object, ...], list[Record]] = {}
        for record in self.records:
            key = (record.config.algorithm, *sorted(settings_of(record.config).items()))
            together.setdefault(key, []).append(record)
        flat = [settings_of(records[0].config) for records in together.values()]
        differing = [name for name in flat[0] if len({some.get(name) for some in flat}) > 1]
        rows, taken = [], set()
        for records, settings in zip(together.values(), flat, strict=True):
            own = {name: settings[name] for name in differing}
            models = dict.fromkeys(name for record in records for name in record.evaluated) or {"server": None}
            for model in models:
                row = Row(records[0].config.algorithm, model, tuple(sorted(records, key=lambda r: r.config.seed)))
                label = ", ".join([row.label, *(f"{name.split('.')[-1]}={value}" for name, value in own.items())])
                if label in taken:  # the same training with another average
                    continue
                taken.add(label)
                rows.append((label, row, own))
        return rows

    @property
    def metric(self) -> str:
        """The primary metric of these runs."""
        return next((Result(record).metric for record in self.records if record.history), "accuracy")


def grouped(records: Sequence[Record], apart: bool = False) -> list[Group]:
    """Group runs by dataset and partition; several groups need ``apart``."""
    found: dict[tuple[object, ...], list[Record]] = {}
    for record in records:
        found.setdefault(tuple(getattr(record.config.data, name) for name in PARTITION_SETTINGS), []).append(record)
    if len(found) > 1 and not apart:
        some = "; ".join(_in_words(group[0].config) for group in list(found.values())[:3])
        more = "; ..." if len(found) > 3 else ""
        raise UserError(
            f"these runs have {len(found)} different partitions ({some}{more}), so equal seeds are not paired; "
            "select runs with one partition, or report each partition separately (--apart)"
        )
    return [Group(_in_words(group[0].config), group, _partitions(group)) for group in found.values()]


def _partitions(records: Iterable[Record]) -> dict[int, dict[str, Any]]:
    """The partition of each seed; raises a ``UserError`` if two runs of one seed differ."""
    partitions: dict[int, tuple[dict[str, Any], Record]] = {}
    for record in records:
        assert record.folder is not None
        partition = record.folder.partition()
        other, first = partitions.setdefault(record.config.seed, (partition, record))
        if other["hash"] != partition["hash"]:
            hashes = f"{other['hash'][:8]} and {partition['hash'][:8]}"
            raise UserError(
                f"{where(first)} and {where(record)} have seed {record.config.seed} but different partitions "
                f"(hash {hashes}); repeat one of them on the same data"
            )
    return {seed: partition for seed, (partition, _) in sorted(partitions.items())}


def settings_of(config: Config) -> dict[str, str]:
    """Settings that may affect results, by full name, without algorithm and seed."""
    found: dict[str, str] = {}

    def walk(values: Mapping[str, Any], prefix: str) -> None:
        for name, value in values.items():
            full = f"{prefix}{name}"
            if full in IRRELEVANT_SETTINGS:
                continue
            if isinstance(value, dict):
                walk(value, f"{full}.")
            else:
                found[full] = write_value(value)

    walk(config.model_dump(mode="json"), "")
    return found


def where(record: Record) -> str:
    """The folder of a run."""
    return "" if record.folder is None else str(record.folder.path)


def _in_words(config: Config) -> str:
    data = config.data
    extras = [f"seed {data.partition_seed}"] if data.partition_seed is not None else []
    extras += [f"{data.clients} clients"] if data.clients is not None else []
    extras += [f"{100 * data.validation:g} % held out"] if data.validation else []
    return ", ".join([f"{data.dataset}, {partition_in_words(data.partition)}", *extras])


def partition_in_words(text: str) -> str:
    """A partition with all parameters except a zero ``sigma``.

    >>> partition_in_words("dirichlet"), partition_in_words("iid(sigma=0.5)")
    ('dirichlet(alpha=0.1)', 'iid(sigma=0.5)')
    """
    return re.sub(r"\(sigma=0\.0\)|,sigma=0\.0\b", "", full_partition(text)).replace(",", ", ")
