"""Published and measured side by side, and whether their difference is within what chance allows.

A published number is taken for one more run beside our n seeds. If the standard deviation of a run were s, it would lie within
z s sqrt(1 + 1/n) of our mean in 95 of 100 cases: for s the paper's own ± where it prints one (z = 1.96), and that of our seeds
(z of Student's t with n - 1 degrees of freedom) where there are at least two. The tolerance is the larger of both, and half a unit of
the last printed digit. With one seed and no ± nothing justifies a tolerance, and no verdict is given.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Literal

from fedflat.experiment.stopping import OVER
from fedflat.experiment.store.record import Record
from fedflat.papers.cells import Cell
from fedflat.papers.numbers import Best, ClientSeconds, Form, Gain, Last, Mean, OfModels, Published, RoundsTo
from fedflat.papers.plan import Plan, sources
from fedflat.papers.post_hoc import Asked
from fedflat.reporting.result import Result
from fedflat.reporting.tables.summary import rounds_to, series, summarise

Verdict = Literal["within", "above", "below", "censored", "not run", "diverged", "unjudged", "not printed", "ran"]
CONFIDENCE = 0.975
NORMAL = 1.959964


@dataclass(frozen=True)
class Measured:
    """One run, as far as numbers are formed from it."""

    history: list[dict[str, Any]]
    metric: str
    status: str
    rounds: int
    seconds: float = 0.0
    models: Mapping[Asked, float | str] = field(default_factory=dict)
    """What was measured on its models afterwards, or why there is no number."""

    @classmethod
    def of(cls, record: Record, models: Mapping[Asked, float | str] | None = None) -> Measured:
        """What counts of a record; its models are let go."""
        return cls(
            record.history,
            Result(record).metric,
            record.status,
            record.config.training.rounds,
            record.seconds,
            models or {},
        )


@dataclass(frozen=True)
class Outcome:
    """A cell with what came of it."""

    cell: Cell
    values: tuple[float, ...]
    """One per seed that gave a number, in the paper's unit."""
    verdict: Verdict
    says: str = ""
    """The reason, where the verdict alone does not tell it."""
    tolerance: float | None = None
    unreached: int | None = None
    """In how many rounds a target was reached by no seed."""
    instead: tuple[str, ...] = ()
    """What stands for what in its runs."""
    seconds: float = 0.0
    """That its runs took, all together."""

    @property
    def mean(self) -> float | None:
        """The measured number."""
        return fmean(self.values) if self.values else None

    @property
    def spread(self) -> float | None:
        """The standard deviation over seeds."""
        return stdev(self.values) if len(self.values) > 1 else None

    @property
    def difference(self) -> float | None:
        """Measured less published; None where the two cannot be compared."""
        published = self.cell.published
        return (
            None
            if self.verdict == "ran" or self.mean is None or published is None or published.value is None
            else self.mean - published.value
        )


def outcomes(plan: Plan, measured: Mapping[Path, Measured]) -> list[Outcome]:
    """The outcome of every chosen cell, from the runs that are there."""
    return [_with_runs(plan, measured, _outcome(plan, measured, cell)) for cell in plan.cells]


def _with_runs(plan: Plan, measured: Mapping[Path, Measured], outcome: Outcome) -> Outcome:
    """An outcome with what stands for what in its runs, and how long they took."""
    runs = [run for cell in sources(outcome.cell) for some in plan.runs_of(cell) for run in some]
    seconds = sum(measured[folder].seconds for folder in {run.folder for run in runs} if folder in measured)
    return replace(outcome, instead=tuple(dict.fromkeys(text for run in runs for text in run.instead)), seconds=seconds)


def picture_command(plan: Plan, out: Path) -> str:
    """The command that draws a figure from the runs with the first seed; empty for tables."""
    runs = [(cell, run) for cell in plan.cells for some in plan.runs_of(cell) for run in some[:1]]
    if not plan.table.file.picture or not runs:
        return ""
    models = dict.fromkeys(f"{run.folder}:{cell.evaluated}" for cell, run in runs)
    return plan.table.file.picture.format(models=" ".join(models), folder=runs[0][1].folder, out=out)


def tolerance(published: Published, values: Sequence[float]) -> float | None:
    """By how much a measured mean may differ from a published number; None where nothing justifies an answer."""
    n = len(values)
    allowed = []
    if published.plus_minus is not None:
        allowed.append(NORMAL * published.plus_minus)
    if n > 1:
        from scipy.stats import t

        allowed.append(float(t.ppf(CONFIDENCE, n - 1)) * stdev(values))
    return max(allowed) * math.sqrt(1 + 1 / n) + published.rounding if allowed else None


def formed(number: Form, run: Measured, model: str, planned_rounds: int) -> float | None:
    """A run's number, as a share or in rounds; None where it gives none."""
    if isinstance(number, RoundsTo):
        return rounds_to(run.history, model, run.metric, number.target)
    if isinstance(number, OfModels):
        found = run.models.get(Asked(number, model))
        return None if isinstance(found, str) else found
    if isinstance(number, ClientSeconds):
        return run.seconds / run.history[-1]["round"] if run.history and run.history[-1]["round"] else None
    summary = summarise(run.history, model, run.metric)
    if summary is None:
        return None
    if isinstance(number, Last):
        return summary.last
    if isinstance(number, Best):
        return summary.best
    if isinstance(number, Mean):
        until = run.rounds if number.until is None else max(1, round(number.until * run.rounds / planned_rounds))
        late = [
            value for at, value in series(run.history, model, run.metric) if max(0, until - number.rounds) < at <= until
        ]
        return fmean(late) if late else None
    return None


# --- one cell ------------------------------------------------------------------------------------------------------------------------


def _outcome(plan: Plan, measured: Mapping[Path, Measured], cell: Cell) -> Outcome:
    if isinstance(cell.number, Gain):
        return _of_gain(plan, measured, cell, cell.number)
    if cell.name in plan.lacking:
        return Outcome(cell, (), "not run", plan.lacking[cell.name])
    tried = [[measured[run.folder] for run in runs if run.folder in measured] for runs in plan.runs_of(cell)]
    if not all(tried):
        return Outcome(cell, (), "not run")
    if any(run.status not in OVER for runs in tried for run in runs):
        return Outcome(cell, (), "not run", "not finished; the same command goes on")
    if all(run.status == "diverged" for runs in tried for run in runs):
        return _diverged(plan, cell)
    reason = next((why for runs in tried for run in runs if (why := _why(cell, run))), "")
    if reason:
        return Outcome(cell, (), "not run", reason)
    numbers = [_numbers(cell, runs) for runs in tried]
    values = max(numbers, key=lambda some: fmean(some) if some else -math.inf)
    missing = "" if len(values) == len(plan.seeds) else f"{len(values)} of {len(plan.seeds)} seeds"
    unreached = (
        max(run.rounds for runs in tried for run in runs) if isinstance(cell.number, RoundsTo) and not values else None
    )
    return replace(_judged(plan, cell, values, missing), unreached=unreached)


def _why(cell: Cell, run: Measured) -> str:
    """Why nothing could be measured on a run's model, if that is so."""
    found = run.models.get(Asked(cell.number, cell.evaluated)) if isinstance(cell.number, OfModels) else None
    return found if isinstance(found, str) else ""


def _numbers(cell: Cell, runs: Sequence[Measured]) -> tuple[float, ...]:
    planned = cell.configs[0].training.rounds
    found = (formed(cell.number, run, cell.evaluated, planned) for run in runs if run.status != "diverged")
    unit = 100.0 if cell.unit == "%" else 1.0
    return tuple(value * unit for value in found if value is not None)


def _diverged(plan: Plan, cell: Cell) -> Outcome:
    if plan.scale.obstacle(cell):
        return Outcome(cell, (), "ran", "it diverged")
    as_published = cell.published is not None and cell.published.value is None
    return Outcome(
        cell, (), "within" if as_published else "diverged", "diverged, as published" if as_published else "every seed"
    )


def _judged(plan: Plan, cell: Cell, values: tuple[float, ...], missing: str) -> Outcome:
    published, obstacle = cell.published, plan.scale.obstacle(cell)
    shortened = plan.scale.rounds is not None and plan.scale.rounds < cell.configs[0].training.rounds
    if obstacle or shortened:
        return Outcome(
            cell, values, "ran", obstacle or f"{plan.scale.rounds} rounds instead of {cell.configs[0].training.rounds}"
        )
    if isinstance(cell.number, RoundsTo) and (missing or cell.unreached):
        return _censored(cell, values, missing)
    if published is None:
        return Outcome(cell, values, "not printed")
    if published.value is None:
        return Outcome(cell, values, "above", "published as not converging")
    if isinstance(cell.number, ClientSeconds):
        return Outcome(cell, values, "unjudged", "seconds of another machine")
    allowed = tolerance(published, values) if values else None
    if allowed is None:
        return Outcome(
            cell, values, "unjudged", "one seed and no ±: use --seeds 3" if values else "no number could be formed"
        )
    return Outcome(cell, values, _side(fmean(values) - published.value, allowed), missing, allowed)


def _censored(cell: Cell, values: tuple[float, ...], missing: str) -> Outcome:
    """A target that was not reached, there or here."""
    if cell.unreached and not values:
        return Outcome(cell, values, "within", "never reached, as published")
    if cell.unreached:
        return Outcome(cell, values, "below", f"reached here{f' by {missing}' if missing else ''}, not in the paper")
    return Outcome(cell, values, "censored", f"reached by {missing} in {cell.configs[0].training.rounds} rounds")


def _of_gain(plan: Plan, measured: Mapping[Path, Measured], cell: Cell, gain: Gain) -> Outcome:
    """What follows from two other cells, seed by seed where both have all seeds."""
    of, over = (_outcome(plan, measured, source) for source in cell.formed_from())
    if of.mean is None or over.mean is None:
        return Outcome(cell, (), "not run", of.says or over.says)
    scale = 100.0 if of.cell.unit == "share" else 1.0
    pairs = zip(of.values, over.values, strict=True) if len(of.values) == len(over.values) else [(of.mean, over.mean)]
    values = tuple(100 * (a - b) / b if gain.relative else scale * (a - b) for a, b in pairs if b)
    if of.verdict == "ran":
        return Outcome(cell, values, "ran", of.says)
    if cell.published is None or cell.published.value is None:
        return Outcome(cell, values, "not printed")
    allowed = tolerance(cell.published, values) if values else None
    if allowed is None:
        return Outcome(cell, values, "unjudged", of.says)
    return Outcome(cell, values, _side(fmean(values) - cell.published.value, allowed), "", allowed)


def _side(difference: float, allowed: float) -> Verdict:
    return "within" if abs(difference) <= allowed else "above" if difference > 0 else "below"
