"""Published and measured numbers side by side, and whether they differ by more than chance.

A published number is treated as one more run in addition to our n seeds. If single runs have standard deviation s, the
number lies within z s sqrt(1 + 1/n) of our mean in 95 of 100 cases. There are up to two estimates of s: the paper's ±,
if it prints one (z = 1.96), and the standard deviation over our seeds, if there are at least two (z from Student's t
with n - 1 degrees of freedom). The tolerance is z s sqrt(1 + 1/n) with the estimate that gives the larger value, plus
half a unit of the last printed digit. With one seed and no ± there is no verdict.
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
from fedflat.papers.plan import Deviations, ReproductionPlan
from fedflat.papers.post_hoc import ModelQuery
from fedflat.reporting.tables.summary import rounds_to, series, summarise

Verdict = Literal["within", "above", "below", "censored", "not run", "diverged", "unjudged", "not printed", "ran"]
QUANTILE = 0.975
NORMAL_QUANTILE = 1.959964
"""Probability whose quantile bounds a two-sided 95 % interval, and this quantile of the normal distribution."""


@dataclass(frozen=True)
class MeasuredRun:
    """The part of a run that statistics are computed from.

    Attributes:
        history: one dictionary per evaluation.
        metric: name of the primary metric.
        status: for example ``finished`` or ``diverged``.
        rounds: planned number of rounds.
        seconds: duration.
        model_statistics: statistics measured on its models; a text states why one could not be measured.
        clients: number of clients; None if unknown.
    """

    history: list[dict[str, Any]]
    metric: str
    status: str
    rounds: int
    seconds: float = 0.0
    model_statistics: Mapping[ModelQuery, float | str] = field(default_factory=dict)
    clients: int | None = None

    @classmethod
    def of(cls, record: Record, model_statistics: Mapping[ModelQuery, float | str] | None = None) -> MeasuredRun:
        """Create it from the record of a run and the statistics measured on its models."""
        rounds = record.config.training.rounds
        clients = record.folder.partition().get("clients") if record.folder else None
        statistics = model_statistics or {}
        return cls(record.history, record.metric, record.status, rounds, record.seconds, statistics, clients)


@dataclass(frozen=True)
class RunNumber:
    """The number of a cell in one run.

    Attributes:
        value: the number in the paper's unit; None if the run diverged or did not reach the target.
        status: for example ``finished`` or ``diverged``.
        rounds: planned number of rounds.
        reason: why the number could not be measured; empty if it could.
    """

    value: float | None
    status: str
    rounds: int
    reason: str = ""


Runs = Mapping[Path, MeasuredRun]
"""Runs by folder."""


@dataclass(frozen=True)
class CellOutcome:
    """The measured numbers of a cell, and the verdict on how they compare with the published number.

    Attributes:
        cell: the cell of the published table.
        by_seed: measured numbers in the paper's unit, by seed; only of seeds that have a number.
        verdict: for example ``within`` or ``not run``; ``ran`` if the runs deviate from the paper too much to judge.
        remark: the reason for the verdict, where it needs one.
        tolerance: how far the mean may lie from the published number; None if not computed.
        unreached_in: number of rounds in which no seed reached the target; None for other statistics.
        stand_ins: what replaced data or models of the paper, such as ``digits for cifar10``.
        seconds: duration of all its runs, added up.
    """

    cell: Cell
    by_seed: Mapping[int, float]
    verdict: Verdict
    remark: str = ""
    tolerance: float | None = None
    unreached_in: int | None = None
    stand_ins: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def values(self) -> tuple[float, ...]:
        """The measured numbers."""
        return tuple(self.by_seed.values())

    @property
    def mean(self) -> float | None:
        """Mean of the measured values; None without values."""
        return fmean(self.values) if self.values else None

    @property
    def spread(self) -> float | None:
        """Standard deviation over seeds; None with fewer than two."""
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
        runs = [run for source in plan.table.sources(cell) for experiment in plan.runs_of(source) for run in experiment]
        stand_ins = dict.fromkeys(stand_in for run in runs for stand_in in run.stand_ins)
        # Both cells of a gain may use the same run, whose time counts once.
        existing_folders = {run.folder for run in runs} & measured.keys()
        seconds = sum(measured[folder].seconds for folder in existing_folders)
        outcome = _outcome(plan, measured, cell)
        warning = _warn_of_clients(cell, [measured[folder].clients for folder in existing_folders])
        if warning and not plan.deviations.small:
            outcome = replace(outcome, remark="; ".join(filter(None, (outcome.remark, warning))))
        cell_outcomes.append(replace(outcome, stand_ins=tuple(stand_ins), seconds=seconds))
    return cell_outcomes


def _warn_of_clients(cell: Cell, clients: Sequence[int | None]) -> str:
    """Return a warning if a dataset with natural clients has another number of them than in the paper.

    FEMNIST and Shakespeare are generated by a script of LEAF, whose options determine the number of clients.
    """
    expected = cell.words.get("paper_clients")
    others = sorted({count for count in clients if count not in (None, expected)})
    return f"{others[0]:,} clients instead of {expected:,}" if expected and others else ""


def tolerance(published: Published, values: Sequence[float]) -> float | None:
    """Compute by how much the mean of measured values may differ from a published number.

    The published number is treated as one more run: if a run has standard deviation s, it lies within
    z s sqrt(1 + 1/n) of the mean of n runs in 95 % of cases. The paper's ± and our seeds each give an estimate of
    z s; the larger one counts.

    Args:
        published: the printed number.
        values: one measured value per seed.

    Returns:
        The tolerance in the unit of the values, including the rounding of the printed number. None if the paper
        prints no ± and there is only one seed.
    """
    n = len(values)
    half_widths = []  # estimates of z s
    if published.plus_minus is not None:
        half_widths.append(NORMAL_QUANTILE * published.plus_minus)
    if n > 1:
        from scipy.special import stdtrit  # quantiles of Student's t; scipy.stats takes seconds to import

        half_widths.append(float(stdtrit(n - 1, QUANTILE)) * stdev(values))
    return max(half_widths) * math.sqrt(1 + 1 / n) + published.rounding if half_widths else None


def value_of(statistic: Statistic, run: MeasuredRun, model: str, planned_rounds: int) -> float | None:
    """Compute a statistic of a run; None if it cannot be computed, e.g. because the target was not reached.

    Args:
        statistic: the statistic.
        run: the run.
        model: the evaluated model: ``server`` or the name of an average.
        planned_rounds: the paper's number of rounds, to which ``Mean.until`` refers.

    Returns:
        Accuracies as shares from 0 to 1; other statistics in their own unit, such as rounds or seconds.
    """
    if isinstance(statistic, RoundsTo):
        return rounds_to(run.history, model, run.metric, statistic.target)
    if isinstance(statistic, ModelStatistic):
        value = run.model_statistics.get(ModelQuery(statistic, model))
        return None if isinstance(value, str) else value  # a text is the reason why there is no value
    if isinstance(statistic, ClientSeconds):
        rounds = run.history[-1]["round"] if run.history else 0
        return run.seconds / rounds if rounds else None
    summary = summarise(run.history, model, run.metric, lower_is_better=False)
    if summary is None:
        return None
    if isinstance(statistic, Last):
        return summary.last
    if isinstance(statistic, Best):
        return summary.best
    if isinstance(statistic, Mean):
        end = run.rounds
        if statistic.until is not None:  # scaled down if the run is shorter than the paper's
            end = max(1, round(statistic.until * run.rounds / planned_rounds))
        start = max(0, end - statistic.rounds)
        window = [value for rounds, value in series(run.history, model, run.metric) if start < rounds <= end]
        return fmean(window) if window else None
    return None


def _outcome(plan: ReproductionPlan, measured: Runs, cell: Cell) -> CellOutcome:
    """Compute the outcome of a cell, without stand-ins and time."""
    if isinstance(cell.statistic, Gain):
        minuend, subtrahend = (_outcome(plan, measured, source) for source in plan.table.sources(cell))
        return gain_outcome(cell, cell.statistic, minuend, subtrahend)
    if cell.name in plan.not_runnable:
        return CellOutcome(cell, {}, "not run", plan.not_runnable[cell.name])
    experiments = [
        {run.config.seed: number_of(cell, measured[run.folder]) for run in runs if run.folder in measured}
        for runs in plan.runs_of(cell)
    ]
    return judge(cell, experiments, plan.deviations, len(plan.seeds))


def number_of(cell: Cell, run: MeasuredRun) -> RunNumber:
    """Compute a cell's number in the paper's unit for one run."""
    if isinstance(cell.statistic, ModelStatistic):
        reason = run.model_statistics.get(ModelQuery(cell.statistic, cell.evaluated))
        if isinstance(reason, str):
            return RunNumber(None, run.status, run.rounds, reason)
    value = None
    if run.status != "diverged":
        value = value_of(cell.statistic, run, cell.evaluated, cell.configs[0].training.rounds)
    if value is not None and cell.unit == "%":
        value *= 100
    return RunNumber(value, run.status, run.rounds)


def judge(
    cell: Cell, experiments: Sequence[Mapping[int, RunNumber]], deviations: Deviations, planned_seeds: int
) -> CellOutcome:
    """Compare the numbers of a cell's runs with the published number.

    Args:
        cell: the cell.
        experiments: for each experiment of the cell, the number of each run by seed. If there are several, the paper
            reports the best accuracy among them, so the experiment with the highest mean is compared.
        deviations: how the runs deviate from the paper, which may rule out a verdict.
        planned_seeds: number of seeds of each experiment.
    """
    runs = [run for experiment in experiments for run in experiment.values()]
    if not all(experiments):  # an experiment without any measured run
        return CellOutcome(cell, {}, "not run")
    if any(run.status not in ENDED_STATUSES for run in runs):
        return CellOutcome(cell, {}, "not run", "not finished; the same command resumes it")
    if all(run.status == "diverged" for run in runs):
        return _diverged_outcome(cell, deviations)
    reasons = [run.reason for run in runs if run.reason]  # why runs have no number
    if reasons:
        return CellOutcome(cell, {}, "not run", reasons[0])
    values_by_experiment = [
        {seed: run.value for seed, run in experiment.items() if run.value is not None} for experiment in experiments
    ]
    by_seed = max(values_by_experiment, key=lambda values: fmean(values.values()) if values else -math.inf)
    seeds = "" if len(by_seed) == planned_seeds else f"{len(by_seed)} of {planned_seeds} seeds"
    outcome = _judge_values(cell, by_seed, seeds, deviations)
    never_reached_target = isinstance(cell.statistic, RoundsTo) and not by_seed
    return replace(outcome, unreached_in=max(run.rounds for run in runs)) if never_reached_target else outcome


def _diverged_outcome(cell: Cell, deviations: Deviations) -> CellOutcome:
    """Return the outcome of a cell whose runs all diverged.

    The verdict is ``within`` (as published) if the paper prints N/A, which means divergence as well, else ``diverged``.
    It is ``ran`` if the runs deviate from the paper too much to judge.
    """
    if deviations.reason_for_no_verdict(cell):
        return CellOutcome(cell, {}, "ran", "diverged")
    if cell.published is not None and cell.published.value is None:  # printed as N/A
        return CellOutcome(cell, {}, "within", "diverged, as published")
    return CellOutcome(cell, {}, "diverged", "every seed")


def _judge_values(cell: Cell, by_seed: Mapping[int, float], seeds: str, deviations: Deviations) -> CellOutcome:
    """Compare measured values with the published number.

    Args:
        cell: the cell.
        by_seed: the values of seeds that have a number.
        seeds: how many seeds these are, e.g. ``2 of 3 seeds``; empty if all.
        deviations: how the runs deviate from the paper.
    """
    published, no_verdict = cell.published, deviations.reason_for_no_verdict(cell)
    if no_verdict:
        return CellOutcome(cell, by_seed, "ran", no_verdict)
    if isinstance(cell.statistic, RoundsTo) and (seeds or cell.is_unreached):
        return _censored_outcome(cell, by_seed, seeds)
    if published is None:
        return CellOutcome(cell, by_seed, "not printed")
    if published.value is None:  # printed as N/A
        return CellOutcome(cell, by_seed, "above", "published as not converging")
    if isinstance(cell.statistic, ClientSeconds):
        return CellOutcome(cell, by_seed, "unjudged", "measured on another machine")
    values = list(by_seed.values())
    allowed = tolerance(published, values) if values else None
    if allowed is None:
        remark = "one seed and no published ±" if values else "no value could be computed"
        return CellOutcome(cell, by_seed, "unjudged", remark)
    return CellOutcome(cell, by_seed, _verdict(fmean(values) - published.value, allowed), seeds, allowed)


def _censored_outcome(cell: Cell, by_seed: Mapping[int, float], seeds: str) -> CellOutcome:
    """Return the outcome of rounds to a target that the paper, or some of our seeds, never reached.

    Args:
        cell: the cell.
        by_seed: rounds to the target of the seeds that reached it.
        seeds: how many seeds reached it, e.g. ``2 of 3 seeds``; empty if all.
    """
    if cell.is_unreached and not by_seed:
        return CellOutcome(cell, by_seed, "within", "never reached, as published")
    if cell.is_unreached:
        by_seeds = f" by {seeds}" if seeds else ""
        return CellOutcome(cell, by_seed, "below", f"reached here{by_seeds}, but not in the paper")
    return CellOutcome(cell, by_seed, "censored", f"reached by {seeds} in {cell.configs[0].training.rounds} rounds")


def gain_outcome(cell: Cell, gain: Gain, minuend: CellOutcome, subtrahend: CellOutcome) -> CellOutcome:
    """Return the outcome of a gain, the difference of two cells.

    It is computed over the seeds for which both cells have a value. A relative gain is in per cent of the subtracted
    cell, an absolute one in points.
    """
    points = 100.0 if minuend.cell.unit == "share" else 1.0  # converts shares to percentage points
    by_seed = {}
    for seed, value in minuend.by_seed.items():
        baseline = subtrahend.by_seed.get(seed)
        if baseline is not None and (baseline or not gain.relative):
            by_seed[seed] = 100 * (value - baseline) / baseline if gain.relative else points * (value - baseline)
    remark = minuend.remark or subtrahend.remark
    if not by_seed:
        return CellOutcome(cell, {}, "not run", remark)
    if "ran" in (minuend.verdict, subtrahend.verdict):  # runs deviate from the paper
        return CellOutcome(cell, by_seed, "ran", remark)
    if cell.published is None or cell.published.value is None:
        return CellOutcome(cell, by_seed, "not printed", remark)
    values = list(by_seed.values())
    allowed = tolerance(cell.published, values)
    if allowed is None:
        return CellOutcome(cell, by_seed, "unjudged", remark)
    return CellOutcome(cell, by_seed, _verdict(fmean(values) - cell.published.value, allowed), remark, allowed)


def _verdict(difference: float, allowed: float) -> Verdict:
    """Judge a difference, measured minus published number, that may be at most ``allowed`` in magnitude."""
    if abs(difference) <= allowed:
        return "within"
    return "above" if difference > 0 else "below"
