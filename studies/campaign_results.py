"""Results of the campaign: one JSON file per run, and the comparison with the published numbers."""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from campaign_queue import CampaignJob
from torch import Tensor

import fedflat
from fedflat.experiment.store.run_folder import Record
from fedflat.papers import find_table
from fedflat.papers.cells import Cell
from fedflat.papers.document import OUTCOME_COLUMNS, markdown, outcome_rows
from fedflat.papers.numbers import ModelStatistic
from fedflat.papers.outcome import CellOutcome, MeasuredRun, outcomes, value_of
from fedflat.papers.plan import PlannedExperiment, ReproductionPlan
from fedflat.papers.post_hoc import ModelQuery, measure
from fedflat.reporting.tables.summary import series, summarise

FORMAT = 1
"""Version of the files."""
WINDOW, DECAY = 100, 0.99
"""Of the averages that every run reports in addition: WiMA and EMA."""
Result = dict[str, Any]


class RunMonitor(fedflat.Callback):
    """Times rounds, and averages global models as WiMA and EMA do, but evaluates the averages only at the end.

    An average is left out if the run was resumed too late to include all of its models.
    """

    def __init__(self) -> None:
        self.times: list[tuple[int, float]] = []
        self.averages: dict[str, float] = {}
        self._first_round = 0
        self._window_sum: Tensor | None = None
        self._window_count = 0
        self._ema: Tensor | None = None

    def began(self, run: Any) -> None:
        self._first_round = run.rounds

    def round_done(self, run: Any) -> None:
        model = run.server.model
        weights = torch.cat([model.weights, model.buffers]).double()
        self._ema = weights if self._ema is None else DECAY * self._ema + (1 - DECAY) * weights
        if run.rounds > run.config.training.rounds - WINDOW:
            self._window_sum = weights if self._window_sum is None else self._window_sum + weights
            self._window_count += 1

    def evaluated(self, run: Any) -> None:
        self.times.append((run.rounds, time.monotonic()))
        if run.rounds < run.config.training.rounds:
            return
        means = {}
        if self._window_sum is not None and self._window_count == min(WINDOW, run.rounds):
            means["wima"] = self._window_sum / self._window_count
        if self._ema is not None and self._first_round == 0:
            means["ema"] = self._ema
        model = run.server.model
        for name, mean in means.items():
            weights, buffers = torch.split(mean.to(model.weights.dtype), [len(model.weights), len(model.buffers)])
            state = model._replace(weights=weights, buffers=buffers)
            scores = run.engine.evaluate({name: state}, run.problem.evaluation_sets)
            self.averages[name] = scores[name]["test"][run.metric]

    @property
    def seconds_per_round(self) -> float | None:
        """Mean wall time of a round, evaluations included, after the first tenth of the run."""
        late = [(rounds, at) for rounds, at in self.times if rounds >= self.times[-1][0] / 10]
        return None if len(late) < 2 else (late[-1][1] - late[0][1]) / (late[-1][0] - late[0][0])


def result_of(job: CampaignJob, record: Record, monitor: RunMonitor, options: argparse.Namespace) -> Result:
    """The stored result of a finished run."""
    queries = [ModelQuery(c.statistic, c.evaluated) for c in job.cells if isinstance(c.statistic, ModelStatistic)]
    has_models = record.status != "diverged"
    run = MeasuredRun.of(record, measure(record, queries, options.small) if queries and has_models else {})
    history, last = record.history, record.history[-1]
    models: dict[str, dict[str, Any]] = {}
    for name in last["test"]:
        summary = summarise(history, name, run.metric, record.lower_is_better)
        if summary is not None:
            start = max(0, last["round"] - WINDOW)
            window = [value for rounds, value in series(history, name, run.metric) if rounds > start] or [summary.last]
            mean = {"mean_last_100": rounded(fmean(window)), "evaluations_in_mean": len(window)}
            models[name] = {"last": rounded(summary.last), **mean, "best": rounded(summary.best)}
    for name, value in monitor.averages.items():
        models.setdefault(name, {"last": rounded(value)})
    return {
        "format": FORMAT,
        "paper": job.table.partition("/")[0],
        "experiment": job.name.rpartition("-seed")[0],
        "seed": job.stage.seed,
        "status": record.status,
        "reason": record.reason,
        "cells": {cell_key(cell): cell_value(cell, run) for cell in job.cells},
        "metric": run.metric,
        "metrics": models,
        "final": {name: rounded(value) for name, value in last["test"]["server"].items()},
        "protocol": job.protocol,
        "protocol_hash": job.protocol_hash,
        "cost": {
            "seconds": rounded(record.seconds, 1),
            "seconds_per_round": rounded(monitor.seconds_per_round),
            "runs_at_once": options.jobs,
            "backward_passes": last["backward_passes"],
            "bytes_up": last["bytes_up"],
            "bytes_down": last["bytes_down"],
        },
        "environment": {
            "fedflat": fedflat.__version__,
            "commit": options.commit or commit(),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "hardware": hardware(options.device),
        },
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "curve_rounds": [line["round"] for line in history],
        "curve": {name: [rounded(v, 4) for _, v in series(history, name, run.metric)] for name in last["test"]},
    }


def cell_key(cell: Cell) -> str:
    """The name of a cell within its paper."""
    return f"{cell.table.partition('/')[2]}/{cell.name}"


def cell_value(cell: Cell, run: MeasuredRun) -> dict[str, Any]:
    """Published and measured value of a cell in its unit; measured is None where a target was not reached."""
    value = None
    if run.status != "diverged":
        value = value_of(cell.statistic, run, cell.evaluated, cell.configs[0].training.rounds)
    return {
        "published": cell.published.text if cell.published else None,
        "measured": rounded(100 * value if value is not None and cell.unit == "%" else value),
        "unit": cell.unit,
        "statistic": cell.statistic.text,
    }


def rounded(value: float | None, digits: int = 5) -> float | None:
    """A number as it is stored."""
    return None if value is None else round(value, digits)


def commit() -> str | None:
    """The commit of fedflat's checkout, if it runs from one."""
    command = ["git", "-C", str(Path(fedflat.__file__).parent), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def hardware(device: str) -> str:
    """The name of the GPU, or CPU."""
    return torch.cuda.get_device_name() if device != "cpu" and torch.cuda.is_available() else "CPU"


def as_text(result: Result) -> str:
    """JSON with one line per top-level key: short, and readable in diffs."""
    lines = (f" {json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}" for key, value in result.items())
    return "{\n" + ",\n".join(lines) + "\n}\n"


def measured_run(result: Result, cell: Cell) -> MeasuredRun:
    """A stored result in the form that verdicts are computed from."""
    metric, curves = result["metric"], result["curve"]
    history = [
        {"round": at, "test": {name: {metric: values[index]} for name, values in curves.items()}}
        for index, at in enumerate(result["curve_rounds"])
    ]
    models = {}
    if isinstance(cell.statistic, ModelStatistic):
        models[ModelQuery(cell.statistic, cell.evaluated)] = result["cells"][cell_key(cell)]["measured"]
    rounds, seconds = result["protocol"]["rounds"], result["cost"]["seconds"]
    return MeasuredRun(history, metric, result["status"], rounds, seconds, models)


def cell_outcomes(
    runs: Sequence[tuple[CampaignJob, Result]], options: argparse.Namespace
) -> list[tuple[str, CellOutcome]]:
    """The verdict on every measured cell, by the rule of ``fedflat reproduce``, with the name of its table."""
    by_cell: dict[Cell, list[tuple[CampaignJob, Result]]] = {}
    for job, result in runs:
        for cell in job.cells:
            by_cell.setdefault(cell, []).append((job, result))
    judged = []
    for cell, measurements in by_cell.items():
        job = measurements[0][0]
        deviations, seeds = (
            job.stage.deviations(options),
            tuple(dict.fromkeys(job.stage.seed for job, _ in measurements)),
        )
        planned = [
            PlannedExperiment(job.config, Path(job.name), job.experiment.model_dump_json(), (cell.name,), ())
            for job, _ in measurements
        ]
        plan = ReproductionPlan(find_table(cell.table), (cell,), deviations, seeds, tuple(planned), {})
        stored = {Path(job.name): measured_run(result, cell) for job, result in measurements}
        judged.append((cell.table, outcomes(plan, stored)[0]))
    return judged


def table(runs: Sequence[tuple[CampaignJob, Result]], options: argparse.Namespace) -> str:
    """Published and measured numbers of every measured cell as a Markdown table."""
    judged = cell_outcomes(runs, options)
    rows = zip((name for name, _ in judged), outcome_rows([outcome for _, outcome in judged]), strict=True)
    return markdown(("table", *OUTCOME_COLUMNS), [[name, *row] for name, row in rows])
