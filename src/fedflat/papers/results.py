"""Stored results: one JSON file per run, with the cells that it measures, its curve, protocol and cost."""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from importlib import resources
from itertools import takewhile
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import torch
from pydantic import Field, ValidationError

import fedflat
from fedflat.errors import UserError, system_reason
from fedflat.experiment.campaign.compare import folder_name
from fedflat.experiment.config import Config
from fedflat.experiment.setup.problem import device_of
from fedflat.experiment.store.files import create_folder, write_atomically
from fedflat.experiment.store.run_folder import Record
from fedflat.papers.cells import Cell
from fedflat.papers.library import PaperTable, find_cell, papers
from fedflat.papers.numbers import Best, Last, Mean, RoundsTo
from fedflat.papers.outcome import MeasuredRun, number_of
from fedflat.papers.plan import PlannedExperiment, ReproductionPlan, model_query
from fedflat.papers.post_hoc import measured_spectra
from fedflat.papers.protocol import ProtocolValues, protocol_hash, protocol_of
from fedflat.papers.schema import PaperData
from fedflat.reporting.tables.summary import rounds_to, series, summarise

FORMAT = 1
"""Version of the format of result files."""
WINDOW = 100
"""Number of rounds, counted from the last, that the stored mean covers."""
CURVE_ROUNDING = 6e-5
"""Largest rounding error of a value in a stored curve, which has four digits."""
EMBEDDED = "measured.json"
"""In the folder of the papers' data: the committed results without curves, written by docs/generate.py."""
Kind = Literal["paper", "search", "tuned", "released"]
Number = int | float


class StoredNumber(PaperData):
    """The number of a cell in one run."""

    published: str | None
    measured: Number | None
    """In the cell's unit; None if the run diverged or did not reach the target."""
    unit: str
    statistic: str


class RunCost(PaperData):
    """The cost of a run."""

    seconds: Number
    seconds_per_round: Number | None = None
    """Mean over rounds after the first tenth of the run, including evaluations."""
    runs_at_once: int = 1
    """Runs that shared the device."""
    backward_passes: int | None = None
    bytes_up: int | None = None
    bytes_down: int | None = None
    note: str = ""


class StoredResult(PaperData):
    """The result of one run: an experiment of a paper with one seed."""

    format: Literal[1]
    kind: Kind = "paper"
    """paper: the paper's settings; search: one learning rate of a search, measured on held-out training data; tuned:
    the hyperparameters that a search selected; released: the authors' code."""
    paper: str
    experiment: str
    """Path of the result's file below the results folder, without kind, seed and suffix."""
    seed: int
    status: str
    reason: str | None = ""
    cells: dict[str, StoredNumber]
    """By table and cell, e.g. ``table2/fedavg/cifar100-lenet-5-accuracy``."""
    metric: str
    metrics: dict[str, dict[str, Number | None]] = Field(default_factory=dict)
    """Last, best and mean value by model."""
    final: dict[str, Number | None] = Field(default_factory=dict)
    spectra: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Hessian eigenvalues by model, with the training loss at which they were measured."""
    protocol: ProtocolValues
    protocol_hash: str
    selection: str = ""
    """How tuned hyperparameters were selected."""
    source: str = ""
    """The file of a study that the result was taken from."""
    cost: RunCost
    environment: dict[str, str | None]
    date: str
    curve_rounds: list[int] = Field(default_factory=list)
    curve: dict[str, list[Number | None]] = Field(default_factory=dict)
    """The metric by model, one value per round of ``curve_rounds``."""
    stayed_initial: bool = False
    """Whether the metric stayed near its initial value; stored in place of the curve by :meth:`without_curves`."""

    @property
    def file(self) -> str:
        """Path of the file below the results folder."""
        folder = "" if self.kind == "paper" else f"{self.kind}/"
        return f"{folder}{self.experiment}-seed{self.seed}.json"

    @property
    def device_seconds(self) -> float:
        """Seconds of device time: the duration of the run divided by the number of runs that shared the device."""
        return self.cost.seconds / self.cost.runs_at_once

    @property
    def has_learned(self) -> bool:
        """Whether the run did not diverge, and its metric (a share) at some point rose well above its initial value.

        It rose if it doubled, or closed a tenth of its distance to 1; this is assumed of a run without a curve.
        """
        curve = [value for value in self.curve.get("server", ()) if value is not None]
        rose = not curve or max(curve) >= min(2 * curve[0], curve[0] + (1 - curve[0]) / 10)
        return self.status != "diverged" and rose and not self.stayed_initial

    def text(self) -> str:
        """Return the result as JSON with one line per top-level key: short, and readable in diffs."""
        values = self.model_dump(mode="json", exclude_unset=True)
        lines = (f" {json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}" for key, value in values.items())
        return "{\n" + ",\n".join(lines) + "\n}\n"

    def without_curves(self) -> StoredResult:
        """Return a copy with only what the ledger and the estimates of GPU time need."""
        unneeded: dict[str, Any] = dict.fromkeys(("metrics", "final", "spectra", "curve", "curve_rounds"), True)
        unneeded["cost"] = {"backward_passes", "bytes_up", "bytes_down", "note"}
        values = self.model_dump(exclude=unneeded, exclude_unset=True)
        needed = ("rounds", "eval_every", "precision")
        values["protocol"] = {key: value for key, value in self.protocol.items() if key in needed}
        values["environment"] = {"hardware": self.environment["hardware"]}
        if self.status != "diverged" and not self.has_learned:
            values["stayed_initial"] = True
        return StoredResult(**values)


def make_result(
    experiment: str,
    cells: Iterable[Cell],
    record: Record,
    run: MeasuredRun,
    averages: Mapping[str, float] | None = None,
    runs_at_once: int = 1,
    commit: str | None = None,
) -> StoredResult:
    """Return the stored result of a finished run.

    Args:
        experiment: name of the experiment, from :func:`experiment_name`; it becomes part of the file's path.
        cells: the cells that the run measures.
        record: the run.
        run: the same run with the statistics measured on its models.
        averages: metrics of averages that the run itself did not evaluate, by name.
        runs_at_once: runs that shared the device.
        commit: commit of the code; None asks git.
    """
    history, last = record.history, record.history[-1]
    models = {name: _summary(record, name, run.metric) for name in last["test"]}
    for name, value in (averages or {}).items():
        models.setdefault(name, {"last": _rounded(value)})
    protocol = protocol_of(record.config)
    return StoredResult(
        format=FORMAT,
        paper=experiment.partition("/")[0],
        experiment=experiment,
        seed=record.config.seed,
        status=record.status,
        reason=record.reason,
        cells={cell_key(cell): _stored_number(cell, run) for cell in cells},
        metric=run.metric,
        metrics=models,
        final={name: _rounded(value) for name, value in last["test"]["server"].items()},
        spectra=measured_spectra(record),
        protocol=protocol,
        protocol_hash=protocol_hash(protocol),
        cost=RunCost(
            seconds=round(record.seconds, 1),
            seconds_per_round=_seconds_per_round(record),
            runs_at_once=runs_at_once,
            backward_passes=last["backward_passes"],
            bytes_up=last["bytes_up"],
            bytes_down=last["bytes_down"],
        ),
        environment={
            "fedflat": fedflat.__version__,
            "commit": commit or _commit(),
            "torch": str(torch.__version__),
            "python": platform.python_version(),
            "hardware": torch.cuda.get_device_name() if device_of(record.config).type == "cuda" else "CPU",
        },
        date=datetime.now(UTC).strftime("%Y-%m-%d"),
        curve_rounds=[line["round"] for line in history],
        curve={name: [_rounded(v, 4) for _, v in series(history, name, run.metric)] for name in last["test"]},
    )


def require_no_other_result(folder: Path, plan: ReproductionPlan) -> None:
    """Raise a ``UserError`` if recording the planned runs would replace a result with other settings."""
    create_folder(folder)
    for planned in plan.runs:
        path = folder / f"{_planned_experiment(plan, planned)[0]}-seed{planned.config.seed}.json"
        if not path.exists():
            continue
        stored, protocol = read_result(path), protocol_of(planned.config)
        if protocol["precision"] == "auto":  # decided when the run starts
            protocol = protocol | {"precision": stored.protocol["precision"]}
        if stored.protocol_hash != protocol_hash(protocol):
            raise UserError(f"{path} holds a result with other settings; choose another folder for --record")


def record_run(
    folder: Path,
    plan: ReproductionPlan,
    planned: PlannedExperiment,
    record: Record,
    run: MeasuredRun,
    runs_at_once: int,
    is_new: bool,
) -> None:
    """Store the result of a run that ``fedflat reproduce`` planned.

    Args:
        folder: the results folder.
        plan: the plan.
        planned: the run in the plan.
        record: the finished run.
        run: the same run with the statistics measured on its models.
        runs_at_once: runs that shared the device.
        is_new: whether this command has executed the run. An earlier run keeps its stored cost, environment and date.
    """
    name, cells = _planned_experiment(plan, planned)
    if record.status != "diverged":  # statistics of the model are measured for the chosen cells only
        cells = [cell for cell in cells if model_query(cell) in (None, *run.model_statistics)]
    result = make_result(name, cells, record, run, runs_at_once=runs_at_once)
    path = folder / result.file
    if not is_new and path.exists():
        stored = read_result(path)
        unchanged = {"cost": stored.cost, "environment": stored.environment, "date": stored.date}
        result = result.model_copy(update={"cells": stored.cells | result.cells, **unchanged})
    write_result(folder, result)


def _planned_experiment(plan: ReproductionPlan, planned: PlannedExperiment) -> tuple[str, list[Cell]]:
    """Return the name of a planned run's experiment, and all cells of the paper that the experiment measures."""
    configs = (config for name in planned.cells for config in plan.table.cells[name].configs)
    paper_config = next(config for config in configs if plan.key(config) == planned.key)
    return experiment_name(plan.table, paper_config), cells_measured_by(plan.table, paper_config)


def write_result(folder: Path, result: StoredResult) -> Path:
    """Write a result below the results folder, and return the path of its file."""
    path = folder / result.file
    create_folder(path.parent)
    write_atomically(path, result.text())
    return path


def read_result(path: Path) -> StoredResult:
    """Read and validate the file of a result."""
    try:
        return StoredResult.model_validate_json(path.read_text("utf-8"))
    except OSError as error:
        raise UserError(f"cannot read {path}: {system_reason(error)}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path} is no stored result: it is not UTF-8") from None
    except ValidationError as error:
        first = error.errors()[0]
        problem = ": ".join(filter(None, (".".join(map(str, first["loc"])), first["msg"])))
        raise UserError(f"{path} is no stored result: {problem}") from None


def read_results(folder: Path) -> list[StoredResult]:
    """Read every result below a folder; raises a ``UserError`` if one contradicts itself or the papers' data."""
    if not folder.is_dir():
        raise UserError(f"there is no results folder {folder}; fedflat reproduce ... --record {folder} creates it")
    results = {path: read_result(path) for path in sorted(folder.rglob("*.json"))}
    for path, result in results.items():
        try:
            for key in result.cells:
                _check_number(result, key)
            # The protocol of released code has other keys; its hash is that of the study's file.
            is_intact = result.kind == "released" or protocol_hash(result.protocol) == result.protocol_hash
        except UserError as error:
            raise UserError(f"{path} is no stored result: {error}") from None
        except (KeyError, AttributeError):
            is_intact = False
        if not is_intact:
            raise UserError(
                f"{path} was changed: its protocol_hash {result.protocol_hash} is not that of its protocol; restore it"
            )
    return list(results.values())


def _check_number(result: StoredResult, key: str) -> None:
    """Raise a ``UserError`` if a published number is not the paper's, or the curve gives another measured one."""
    cell, number = find_cell(result.paper, key), result.cells[key]
    published = cell.published.text if cell.published else None
    if number.published != published:
        raise UserError(f"{key} has the published number {number.published}, but the paper prints {published}")
    curve = result.curve.get(cell.evaluated, [])
    if not curve or not isinstance(cell.statistic, Last | Best | Mean | RoundsTo):
        return
    # The curve of an average begins later than the run.
    points = zip(result.curve_rounds[::-1], curve[::-1], strict=False)
    history = [{"round": r, "test": {cell.evaluated: {result.metric: value}}} for r, value in points][::-1]
    rounds = int(result.protocol.get("rounds") or result.curve_rounds[-1])  # released code has other settings
    run = MeasuredRun(history, result.metric, result.status, rounds)
    computed: float | None
    if isinstance(cell.statistic, RoundsTo):
        low, computed, high = (
            rounds_to(history, cell.evaluated, result.metric, cell.statistic.target + rounding)
            for rounding in (-CURVE_ROUNDING, 0, CURVE_ROUNDING)
        )
        agrees = number.measured in (low, computed, high)
    else:
        computed, scale = number_of(cell, run).value, 100 if cell.unit == "%" else 1
        if computed is None or number.measured is None:
            agrees = computed is number.measured
        else:
            agrees = abs(computed - number.measured) <= scale * CURVE_ROUNDING
    if not agrees:
        raise UserError(f"{key} has the measured number {number.measured}, but its curve gives {computed}")


@cache
def embedded_results() -> tuple[StoredResult, ...]:
    """The committed results, without their curves."""
    text = (resources.files("fedflat.papers") / "data" / EMBEDDED).read_text("utf-8")
    return tuple(StoredResult.model_validate(values) for values in json.loads(text))


def embedded_text(results: Sequence[StoredResult]) -> str:
    """Return the text of the embedded file, with one line per result."""
    documents = (result.without_curves().model_dump(mode="json", exclude_unset=True) for result in results)
    return "[\n" + ",\n".join(json.dumps(document, ensure_ascii=False) for document in documents) + "\n]\n"


def cell_key(cell: Cell) -> str:
    """Return the name of a cell within its paper."""
    return f"{cell.table.partition('/')[2]}/{cell.name}"


def cells_measured_by(table: PaperTable, config: Config) -> list[Cell]:
    """Return the cells that a run with the paper's config measures: those of ``table``, then those of other tables.

    Cells of other tables are left out if they print no number.
    """
    cells = _cells_by_config(table.paper.name)[config]
    of_table = [cell for cell in cells if cell.table == table.full_name]
    return of_table + [cell for cell in cells if cell.table != table.full_name and cell.published is not None]


def experiment_name(table: PaperTable, config: Config) -> str:
    """Return the name of an experiment: its table, the words that its columns share, and its first row.

    >>> from fedflat.papers import find_table
    >>> table = find_table("fedswa/table2")
    >>> experiment_name(table, table.cells["fedavg/cifar100-lenet-5-rounds"].configs[0])
    'fedswa/table2/cifar100-lenet-5/fedavg'
    """
    cells = [cell for cell in _cells_by_config(table.paper.name)[config] if cell.table == table.full_name]
    row = cells[0].name.split("/")[0]
    columns = [cell.name.split("/")[1].split("-") for cell in cells if cell.name.startswith(f"{row}/")]
    start = _common_start(columns)
    end = _common_start([words[len(start) :][::-1] for words in columns])[::-1]
    if len(cells[0].configs) > 1:  # the paper reports the best of several algorithms
        row = f"{row}.{folder_name(config.algorithm)}"
    return f"{table.full_name}/{'-'.join([*start, *end] or columns[0])}/{row}"


def _common_start(columns: list[list[str]]) -> list[str]:
    """Return the words with which all lists of words begin."""
    return [words[0] for words in takewhile(lambda words: len(set(words)) == 1, zip(*columns, strict=False))]


@cache
def _cells_by_config(paper: str) -> dict[Config, list[Cell]]:
    """Return the cells of a paper by the config of their runs."""
    index: dict[Config, list[Cell]] = {}
    for table in papers()[paper].tables.values():
        for cell in table.cells.values():
            for config in cell.configs:
                index.setdefault(config, []).append(cell)
    return index


def _stored_number(cell: Cell, run: MeasuredRun) -> StoredNumber:
    return StoredNumber(
        published=cell.published.text if cell.published else None,
        measured=_rounded(number_of(cell, run).value),
        unit=cell.unit,
        statistic=cell.statistic.text,
    )


def _summary(record: Record, model: str, metric: str) -> dict[str, Any]:
    """Return the last and best value of a model's metric, and its mean over the last 100 rounds."""
    summary = summarise(record.history, model, metric, record.lower_is_better)
    if summary is None:
        return {}
    start = max(0, record.history[-1]["round"] - WINDOW)
    window = [value for rounds, value in series(record.history, model, metric) if rounds > start] or [summary.last]
    mean = {"mean_last_100": _rounded(fmean(window)), "evaluations_in_mean": len(window)}
    return {"last": _rounded(summary.last), **mean, "best": _rounded(summary.best)}


def _seconds_per_round(record: Record) -> float | None:
    """Return the mean wall time of a round, evaluations included, after the first tenth of the run.

    None if fewer than two timings remain.
    """
    lines = record.folder.timing() if record.folder else []
    late = [line for line in lines if line["round"] >= lines[-1]["round"] / 10]
    if len(late) < 2:
        return None
    first, last = late[0], late[-1]
    return _rounded((last["seconds"] - first["seconds"]) / (last["round"] - first["round"]))


def _rounded(value: float | None, digits: int = 5) -> float | None:
    return None if value is None else round(value, digits)


def _commit() -> str | None:
    """Return the commit of the git repository that contains fedflat's code, or None if there is none."""
    command = ["git", "-C", str(Path(fedflat.__file__).parent), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
