"""Published and measured numbers side by side, and whether they differ by more than chance.

A published number is treated as one more run beside our n seeds. If a run has standard deviation s, the number lies
within z s sqrt(1 + 1/n) of our mean in 95 of 100 cases. For s we take the paper's ± where there is one (z = 1.96), and
the standard deviation of our seeds where there are at least two (z of Student's t with n - 1 degrees of freedom). The
tolerance is the larger of both plus half a unit of the last printed digit. With one seed and no ± there is no verdict.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Literal

from fedflat.experiment.stopping import ENDED_STATUSES
from fedflat.experiment.store.run_folder import Record
from fedflat.papers.cells import Cell
from fedflat.papers.numbers import Best, ClientSeconds, Gain, Last, Mean, ModelStatistic, Published, RoundsTo, Statistic
from fedflat.papers.plan import ReproductionPlan
from fedflat.papers.post_hoc import ModelQuery
from fedflat.reporting.result import Result
from fedflat.reporting.tables.summary import rounds_to, series, summarise

Verdict = Literal["within", "above", "below", "censored", "not run", "diverged", "unjudged", "not printed", "ran"]
QUANTILE = 0.975
NORMAL_QUANTILE = 1.959964
"""The quantile of a two-sided 95 % interval, and its value for the normal distribution."""


@dataclass(frozen=True)
class MeasuredRun:
    """The part of a run that statistics are computed from."""

    history: list[dict[str, Any]]
    metric: str
    status: str
    rounds: int
    """Planned number of rounds."""
    seconds: float = 0.0
    models: Mapping[ModelQuery, float | str] = field(default_factory=dict)
    """Statistics of its models, or why there is none."""

    @classmethod
    def of(cls, record: Record, models: Mapping[ModelQuery, float | str] | None = None) -> MeasuredRun:
        """Take the history of a record, with the statistics measured on its models."""
        metric, rounds = Result(record).metric, record.config.training.rounds
        return cls(record.history, metric, record.status, rounds, record.seconds, models or {})


Runs = Mapping[Path, MeasuredRun]
"""Runs by folder."""


@dataclass(frozen=True)
class CellOutcome:
    """A cell with its measured number and the verdict on it."""

    cell: Cell
    values: tuple[float, ...]
    """One per seed that has a number, in the paper's unit."""
    verdict: Verdict
    remark: str = ""
    """The reason, where the verdict is not enough."""
    tolerance: float | None = None
    unreached: int | None = None
    """The number of rounds in which no seed reached the target."""
    stand_ins: tuple[str, ...] = ()
    seconds: float = 0.0
    """Time of all its runs together."""

    @property
    def mean(self) -> float | None:
        """The measured number."""
        return fmean(self.values) if self.values else None

    @property
    def spread(self) -> float | None:
        """Standard deviation over seeds."""
        return stdev(self.values) if len(self.values) > 1 else None

    @property
    def difference(self) -> float | None:
        """Measured minus published; None if they cannot be compared."""
        published = self.cell.published.value if self.cell.published else None
        if self.verdict == "ran" or self.mean is None or published is None:
            return None
        return self.mean - published


def outcomes(plan: ReproductionPlan, measured: Runs) -> list[CellOutcome]:
    """Compute the outcome of every chosen cell, from the runs that exist.

    Args:
        plan: the cells and their runs.
        measured: the existing runs by folder.
    """
    cell_outcomes = []
    for cell in plan.cells:
        runs = [run for source in plan.table.sources(cell) for group in plan.runs_of(source) for run in group]
        folders = {run.folder for run in runs} & measured.keys()
        stand_ins = dict.fromkeys(text for run in runs for text in run.stand_ins)
        outcome = _outcome(plan, measured, cell)
        seconds = sum(measured[folder].seconds for folder in folders)
        cell_outcomes.append(replace(outcome, stand_ins=tuple(stand_ins), seconds=seconds))
    return cell_outcomes


def picture_command(plan: ReproductionPlan, out: Path) -> str:
    """Return the command that draws a figure from the runs with the first seed; empty for tables."""
    runs = [(cell, run) for cell in plan.cells for group in plan.runs_of(cell) for run in group[:1]]
    if not plan.table.file.picture or not runs:
        return ""
    models = dict.fromkeys(f"{run.folder}:{cell.evaluated}" for cell, run in runs)
    return plan.table.file.picture.format(models=" ".join(models), folder=runs[0][1].folder, out=out)


def tolerance(published: Published, values: Sequence[float]) -> float | None:
    """Compute by how much a measured mean may differ from a published number; see the head of this module.

    Args:
        published: the printed number.
        values: one measured value per seed.

    Returns:
        The tolerance in the unit of the values; None if nothing is known about the spread.
    """
    n = len(values)
    half_widths = []
    if published.plus_minus is not None:
        half_widths.append(NORMAL_QUANTILE * published.plus_minus)
    if n > 1:
        from scipy.stats import t

        half_widths.append(float(t.ppf(QUANTILE, n - 1)) * stdev(values))
    return max(half_widths) * math.sqrt(1 + 1 / n) + published.rounding if half_widths else None


def value_of(statistic: Statistic, run: MeasuredRun, model: str, planned_rounds: int) -> float | None:
    """Compute a statistic of a run, as a share or in rounds; None if the run has none.

    Args:
        statistic: the statistic.
        run: the run.
        model: the evaluated model.
        planned_rounds: the paper's number of rounds, to which ``Mean.until`` refers.
    """
    if isinstance(statistic, RoundsTo):
        return rounds_to(run.history, model, run.metric, statistic.target)
    if isinstance(statistic, ModelStatistic):
        value = run.models.get(ModelQuery(statistic, model))
        return None if isinstance(value, str) else value
    if isinstance(statistic, ClientSeconds):
        rounds = run.history[-1]["round"] if run.history else 0
        return run.seconds / rounds if rounds else None
    summary = summarise(run.history, model, run.metric)
    if summary is None:
        return None
    if isinstance(statistic, Last):
        return summary.last
    if isinstance(statistic, Best):
        return summary.best
    if isinstance(statistic, Mean):
        last = run.rounds
        if statistic.until is not None:  # in the same proportion if the run is shorter than the paper's
            last = max(1, round(statistic.until * run.rounds / planned_rounds))
        start = max(0, last - statistic.rounds)
        window = [value for rounds, value in series(run.history, model, run.metric) if start < rounds <= last]
        return fmean(window) if window else None
    return None


def _outcome(plan: ReproductionPlan, measured: Runs, cell: Cell) -> CellOutcome:
    """Compute the outcome of a cell, without stand-ins and time; of several experiments the best counts."""
    if isinstance(cell.statistic, Gain):
        return _gain_outcome(plan, measured, cell, cell.statistic)
    if cell.name in plan.lacking:
        return CellOutcome(cell, (), "not run", plan.lacking[cell.name])
    groups = [[measured[run.folder] for run in runs if run.folder in measured] for runs in plan.runs_of(cell)]
    runs = [run for group in groups for run in group]
    if not all(groups):
        return CellOutcome(cell, (), "not run")
    if any(run.status not in ENDED_STATUSES for run in runs):
        return CellOutcome(cell, (), "not run", "not finished; the same command resumes it")
    if all(run.status == "diverged" for run in runs):
        return _diverged_outcome(plan, cell)
    if isinstance(cell.statistic, ModelStatistic):
        for run in runs:
            value = run.models.get(ModelQuery(cell.statistic, cell.evaluated))
            if isinstance(value, str):  # the reason why it could not be measured
                return CellOutcome(cell, (), "not run", value)
    values = max((_values(cell, group) for group in groups), key=lambda v: fmean(v) if v else -math.inf)
    seeds = "" if len(values) == len(plan.seeds) else f"{len(values)} of {len(plan.seeds)} seeds"
    unreached = max(run.rounds for run in runs) if isinstance(cell.statistic, RoundsTo) and not values else None
    return replace(_judge(plan, cell, values, seeds), unreached=unreached)


def _values(cell: Cell, runs: Sequence[MeasuredRun]) -> tuple[float, ...]:
    """Compute a cell's statistic in the paper's unit, for every run that has it and did not diverge."""
    rounds = cell.configs[0].training.rounds
    values = (value_of(cell.statistic, run, cell.evaluated, rounds) for run in runs if run.status != "diverged")
    scale = 100.0 if cell.unit == "%" else 1.0
    return tuple(value * scale for value in values if value is not None)


def _diverged_outcome(plan: ReproductionPlan, cell: Cell) -> CellOutcome:
    """Return the outcome of a cell whose runs all diverged."""
    if plan.scale.obstacle(cell):
        return CellOutcome(cell, (), "ran", "diverged")
    if cell.published is not None and cell.published.value is None:
        return CellOutcome(cell, (), "within", "diverged, as published")
    return CellOutcome(cell, (), "diverged", "every seed")


def _judge(plan: ReproductionPlan, cell: Cell, values: tuple[float, ...], seeds: str) -> CellOutcome:
    """Compare measured values with the published number.

    Args:
        plan: the plan, whose scale may rule out a verdict.
        cell: the cell.
        values: one value per seed that has a number.
        seeds: how many seeds these are, e.g. ``2 of 3 seeds``; empty if all.
    """
    published, obstacle = cell.published, plan.scale.obstacle(cell)
    rounds, paper_rounds = plan.scale.rounds, cell.configs[0].training.rounds
    if rounds is not None and rounds < paper_rounds:
        obstacle = obstacle or f"{rounds} rounds instead of {paper_rounds}"
    if obstacle:
        return CellOutcome(cell, values, "ran", obstacle)
    if isinstance(cell.statistic, RoundsTo) and (seeds or cell.is_unreached):
        return _censored_outcome(cell, values, seeds)
    if published is None:
        return CellOutcome(cell, values, "not printed")
    if published.value is None:
        return CellOutcome(cell, values, "above", "published as not converging")
    if isinstance(cell.statistic, ClientSeconds):
        return CellOutcome(cell, values, "unjudged", "measured on another machine")
    allowed = tolerance(published, values) if values else None
    if allowed is None:
        remark = "one seed and no ±: use --seeds 3" if values else "no value could be computed"
        return CellOutcome(cell, values, "unjudged", remark)
    return CellOutcome(cell, values, _verdict(fmean(values) - published.value, allowed), seeds, allowed)


def _censored_outcome(cell: Cell, values: tuple[float, ...], seeds: str) -> CellOutcome:
    """Return the outcome where the paper or some seeds did not reach a target; ``seeds`` as in ``_judge``."""
    if cell.is_unreached and not values:
        return CellOutcome(cell, values, "within", "never reached, as published")
    if cell.is_unreached:
        by_seeds = f" by {seeds}" if seeds else ""
        return CellOutcome(cell, values, "below", f"reached here{by_seeds}, but not in the paper")
    return CellOutcome(cell, values, "censored", f"reached by {seeds} in {cell.configs[0].training.rounds} rounds")


def _gain_outcome(plan: ReproductionPlan, measured: Runs, cell: Cell, gain: Gain) -> CellOutcome:
    """Return the outcome of a difference of two cells, seed by seed where both have the same number of seeds."""
    minuend, subtrahend = (_outcome(plan, measured, source) for source in plan.table.sources(cell))
    if minuend.mean is None or subtrahend.mean is None:
        return CellOutcome(cell, (), "not run", minuend.remark or subtrahend.remark)
    pairs = [(minuend.mean, subtrahend.mean)]
    if len(minuend.values) == len(subtrahend.values):
        pairs = list(zip(minuend.values, subtrahend.values, strict=True))
    scale = 100.0 if minuend.cell.unit == "share" else 1.0
    values = tuple(100 * (a - b) / b if gain.relative else scale * (a - b) for a, b in pairs if b)
    if minuend.verdict == "ran":
        return CellOutcome(cell, values, "ran", minuend.remark)
    if cell.published is None or cell.published.value is None:
        return CellOutcome(cell, values, "not printed")
    allowed = tolerance(cell.published, values) if values else None
    if allowed is None:
        return CellOutcome(cell, values, "unjudged", minuend.remark)
    return CellOutcome(cell, values, _verdict(fmean(values) - cell.published.value, allowed), "", allowed)


def _verdict(difference: float, allowed: float) -> Verdict:
    """Judge the difference of the measured from the published number."""
    if abs(difference) <= allowed:
        return "within"
    return "above" if difference > 0 else "below"
