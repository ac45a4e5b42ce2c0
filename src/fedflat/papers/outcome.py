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
CONFIDENCE = 0.975
NORMAL = 1.959964


@dataclass(frozen=True)
class MeasuredRun:
    """What statistics need to know of a run."""

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
        """A record without its models."""
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
        return None if self.verdict == "ran" or self.mean is None or published is None else self.mean - published


def outcomes(plan: ReproductionPlan, measured: Runs) -> list[CellOutcome]:
    """The outcome of every chosen cell, from the runs that exist."""
    return [_with_runs(plan, measured, _outcome(plan, measured, cell)) for cell in plan.cells]


def _with_runs(plan: ReproductionPlan, measured: Runs, outcome: CellOutcome) -> CellOutcome:
    """An outcome with the stand-ins and the time of its runs."""
    runs = [run for cell in plan.table.sources(outcome.cell) for group in plan.runs_of(cell) for run in group]
    seconds = sum(measured[folder].seconds for folder in {run.folder for run in runs} if folder in measured)
    stand_ins = dict.fromkeys(text for run in runs for text in run.stand_ins)
    return replace(outcome, stand_ins=tuple(stand_ins), seconds=seconds)


def picture_command(plan: ReproductionPlan, out: Path) -> str:
    """The command that draws a figure from the runs with the first seed; empty for tables."""
    runs = [(cell, run) for cell in plan.cells for group in plan.runs_of(cell) for run in group[:1]]
    if not plan.table.file.picture or not runs:
        return ""
    models = dict.fromkeys(f"{run.folder}:{cell.evaluated}" for cell, run in runs)
    return plan.table.file.picture.format(models=" ".join(models), folder=runs[0][1].folder, out=out)


def tolerance(published: Published, values: Sequence[float]) -> float | None:
    """By how much a measured mean may differ from a published number; None if nothing is known about the spread."""
    n = len(values)
    allowed = []
    if published.plus_minus is not None:
        allowed.append(NORMAL * published.plus_minus)
    if n > 1:
        from scipy.stats import t

        allowed.append(float(t.ppf(CONFIDENCE, n - 1)) * stdev(values))
    return max(allowed) * math.sqrt(1 + 1 / n) + published.rounding if allowed else None


def value_of(statistic: Statistic, run: MeasuredRun, model: str, planned_rounds: int) -> float | None:
    """A statistic of a run, as a share or in rounds; None if the run has none.

    Args:
        statistic: what to compute.
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
        return run.seconds / run.history[-1]["round"] if run.history and run.history[-1]["round"] else None
    summary = summarise(run.history, model, run.metric)
    if summary is None:
        return None
    if isinstance(statistic, Last):
        return summary.last
    if isinstance(statistic, Best):
        return summary.best
    if isinstance(statistic, Mean):
        until = run.rounds if statistic.until is None else max(1, round(statistic.until * run.rounds / planned_rounds))
        first = max(0, until - statistic.rounds)
        late = [value for at, value in series(run.history, model, run.metric) if first < at <= until]
        return fmean(late) if late else None
    return None


def _outcome(plan: ReproductionPlan, measured: Runs, cell: Cell) -> CellOutcome:
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
        return _diverged(plan, cell)
    reason = next((text for run in runs if (text := _unmeasured(cell, run))), "")
    if reason:
        return CellOutcome(cell, (), "not run", reason)
    values = max((_values(cell, group) for group in groups), key=lambda v: fmean(v) if v else -math.inf)
    missing = "" if len(values) == len(plan.seeds) else f"{len(values)} of {len(plan.seeds)} seeds"
    unreached = max(run.rounds for run in runs) if isinstance(cell.statistic, RoundsTo) and not values else None
    return replace(_judged(plan, cell, values, missing), unreached=unreached)


def _unmeasured(cell: Cell, run: MeasuredRun) -> str:
    """Why a statistic could not be measured on a run's model; empty if it could."""
    if not isinstance(cell.statistic, ModelStatistic):
        return ""
    value = run.models.get(ModelQuery(cell.statistic, cell.evaluated))
    return value if isinstance(value, str) else ""


def _values(cell: Cell, runs: Sequence[MeasuredRun]) -> tuple[float, ...]:
    rounds = cell.configs[0].training.rounds
    values = (value_of(cell.statistic, run, cell.evaluated, rounds) for run in runs if run.status != "diverged")
    unit = 100.0 if cell.unit == "%" else 1.0
    return tuple(value * unit for value in values if value is not None)


def _diverged(plan: ReproductionPlan, cell: Cell) -> CellOutcome:
    if plan.scale.obstacle(cell):
        return CellOutcome(cell, (), "ran", "diverged")
    if cell.published is not None and cell.published.value is None:
        return CellOutcome(cell, (), "within", "diverged, as published")
    return CellOutcome(cell, (), "diverged", "every seed")


def _judged(plan: ReproductionPlan, cell: Cell, values: tuple[float, ...], missing: str) -> CellOutcome:
    published, obstacle = cell.published, plan.scale.obstacle(cell)
    rounds, paper_rounds = plan.scale.rounds, cell.configs[0].training.rounds
    if rounds is not None and rounds < paper_rounds:
        obstacle = obstacle or f"{rounds} rounds instead of {paper_rounds}"
    if obstacle:
        return CellOutcome(cell, values, "ran", obstacle)
    if isinstance(cell.statistic, RoundsTo) and (missing or cell.unreached):
        return _censored(cell, values, missing)
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
    return CellOutcome(cell, values, _side(fmean(values) - published.value, allowed), missing, allowed)


def _censored(cell: Cell, values: tuple[float, ...], missing: str) -> CellOutcome:
    """The outcome where the paper or some seeds did not reach a target."""
    if cell.unreached and not values:
        return CellOutcome(cell, values, "within", "never reached, as published")
    if cell.unreached:
        seeds = f" by {missing}" if missing else ""
        return CellOutcome(cell, values, "below", f"reached here{seeds}, but not in the paper")
    return CellOutcome(cell, values, "censored", f"reached by {missing} in {cell.configs[0].training.rounds} rounds")


def _gain_outcome(plan: ReproductionPlan, measured: Runs, cell: Cell, gain: Gain) -> CellOutcome:
    """The difference of two cells, seed by seed where both have all seeds."""
    of, over = (_outcome(plan, measured, source) for source in plan.table.sources(cell))
    if of.mean is None or over.mean is None:
        return CellOutcome(cell, (), "not run", of.remark or over.remark)
    scale = 100.0 if of.cell.unit == "share" else 1.0
    pairs = zip(of.values, over.values, strict=True) if len(of.values) == len(over.values) else [(of.mean, over.mean)]
    values = tuple(100 * (a - b) / b if gain.relative else scale * (a - b) for a, b in pairs if b)
    if of.verdict == "ran":
        return CellOutcome(cell, values, "ran", of.remark)
    if cell.published is None or cell.published.value is None:
        return CellOutcome(cell, values, "not printed")
    allowed = tolerance(cell.published, values) if values else None
    if allowed is None:
        return CellOutcome(cell, values, "unjudged", of.remark)
    return CellOutcome(cell, values, _side(fmean(values) - cell.published.value, allowed), "", allowed)


def _side(difference: float, allowed: float) -> Verdict:
    return "within" if abs(difference) <= allowed else "above" if difference > 0 else "below"
