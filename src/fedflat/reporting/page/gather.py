"""Run folders brought together for a report: read, checked for being whole, and grouped by the data and partition
that they share.
"""

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
from fedflat.experiment.stopping import OVER
from fedflat.experiment.store.record import Record, load_record
from fedflat.experiment.store.run_folder import RunFolder
from fedflat.reporting.result import Result, Row
from fedflat.text import write_value

OF_THE_SPLIT = ("dataset", "partition", "partition_seed", "clients", "validation")
"""The settings of ``data`` that, with a seed, fix who has what."""
NO_MATTER = frozenset(
    {"algorithm", "seed", "data.dir", "evaluation.save_every", "flatness"}
    | {f"engine.{name}" for name in ("name", "lanes", "compile", "workers", "device", "checkpoint_every")}
)
"""Settings that change no result, beside the two that are compared."""


@dataclass(frozen=True)
class Gathered:
    """The runs of a report, and those that could not be used, with the reason."""

    records: list[Record]
    left_out: list[tuple[str, str]] = field(default_factory=list)


def gather(paths: Iterable[Path]) -> Gathered:
    """The runs in these folders or below them; one that is named itself must be readable, one found below is left out
    if it is not.
    """
    records: dict[Path, Record] = {}
    left_out: list[tuple[str, str]] = []
    for path in paths:
        if not path.is_dir():
            raise UserError(f"there is no folder {path}; expected a run, or a folder in which runs lie")
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
            (str(folder), f"{folder} has no config.yaml, so it was not copied whole; copy it again")
            for folder in sorted(half)
        ]
    kept = _once(list(records.values()), left_out)
    if not kept:
        first = f" ({left_out[0][1]})" if left_out else ""
        raise UserError(
            f"there is no run to report on{first}; expected folders with a config.yaml, as fedflat run makes them"
        )
    return Gathered(kept, left_out)


def whole_record(path: Path) -> Record:
    """The record of a run folder, refused where part of it is missing."""
    record, folder = load_record(path), RunFolder(path)
    status, partition = folder.status(), folder.partition()
    if "hash" not in partition or "histogram" not in partition:
        raise UserError(f"{path / 'partition.json'} is incomplete; copy the run again")
    said, there = int(status.get("rounds", 0)), int(record.history[-1]["round"]) if record.history else 0
    due = said - 1 if record.status == "diverged" else said  # the round in which a run diverged is not evaluated
    if record.status in OVER and due - there >= record.config.evaluation.every:
        raise UserError(
            f"{path} is not whole: it ended after {said} rounds, but its metrics.jsonl ends at {there}; copy it again"
        )
    return record


def _once(records: list[Record], left_out: list[tuple[str, str]]) -> list[Record]:
    """Without runs that repeat another one, which would count a seed twice."""
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
    """Runs on the same data, partition in the same way: those with the same seed can be compared as pairs."""

    name: str
    records: list[Record]
    partitions: Mapping[int, dict[str, Any]]
    """What is known of the partition, by seed."""

    @cached_property
    def rows(self) -> list[tuple[str, Row, dict[str, str]]]:
        """A line for every model of every algorithm, over its seeds: its label, its runs, and the settings in which
        it differs.
        """
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
                if label in taken:  # the same algorithm with another average beside it: training was the same
                    continue
                taken.add(label)
                rows.append((label, row, own))
        return rows

    @property
    def metric(self) -> str:
        """The metric that stands for these runs."""
        return next((Result(record).metric for record in self.records if record.history), "accuracy")


def grouped(records: Sequence[Record], apart: bool = False) -> list[Group]:
    """Runs by their data and partition; more than one of these is refused, unless they are to be reported apart."""
    found: dict[tuple[object, ...], list[Record]] = {}
    for record in records:
        found.setdefault(tuple(getattr(record.config.data, name) for name in OF_THE_SPLIT), []).append(record)
    if len(found) > 1 and not apart:
        some = "; ".join(_in_words(group[0].config) for group in list(found.values())[:3])
        more = "; ..." if len(found) > 3 else ""
        raise UserError(
            f"these runs have {len(found)} different partitions ({some}{more}), so that those of the same seed are no pairs: a difference "
            "would be one of partitions as well as of algorithms; give runs of one partition, or report each partition apart (--apart)"
        )
    return [Group(_in_words(group[0].config), group, _partitions(group)) for group in found.values()]


def _partitions(records: Iterable[Record]) -> dict[int, dict[str, Any]]:
    """The partition of each seed, refused where two runs of one seed were partition differently after all."""
    partitions: dict[int, tuple[dict[str, Any], Record]] = {}
    for record in records:
        assert record.folder is not None
        partition = record.folder.partition()
        other, first = partitions.setdefault(record.config.seed, (partition, record))
        if other["hash"] != partition["hash"]:
            hashes = f"{other['hash'][:8]} and {partition['hash'][:8]}"
            raise UserError(
                f"{where(first)} and {where(record)} both have seed {record.config.seed}, but different partitions (hash {hashes}), so they "
                "cannot be paired; run one of them anew on the same data"
            )
    return {seed: partition for seed, (partition, _) in sorted(partitions.items())}


def settings_of(config: Config) -> dict[str, str]:
    """The settings that may change a result, by full name, without algorithm and seed."""
    found: dict[str, str] = {}

    def walk(values: Mapping[str, Any], prefix: str) -> None:
        for name, value in values.items():
            full = f"{prefix}{name}"
            if full in NO_MATTER:
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
    """A partition with every parameter but that of unequal sizes where there are none.

    >>> partition_in_words("dirichlet"), partition_in_words("iid(sigma=0.5)")
    ('dirichlet(alpha=0.1)', 'iid(sigma=0.5)')
    """
    return re.sub(r"\(sigma=0\.0\)|,sigma=0\.0\b", "", full_partition(text)).replace(",", ", ")
