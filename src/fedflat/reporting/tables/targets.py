"""Rounds, virtual time and bytes that runs need to reach a target value of the metric."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median, median_high
from typing import TYPE_CHECKING, Any, NamedTuple

from fedflat.reporting.tables.summary import rounds_to

if TYPE_CHECKING:
    from fedflat.experiment.store.run_folder import Record
    from fedflat.reporting.row import Row

VIRTUAL_SECONDS = "virtual_seconds"
"""Key of the virtual time in a run's history."""


def has_virtual_time(records: Iterable[Record]) -> bool:
    """Whether all runs have virtual time; runs without evaluations do not count."""
    histories = [record.history for record in records if record.history]
    return bool(histories) and all(VIRTUAL_SECONDS in history[-1] for history in histories)


class MedianRounds(NamedTuple):
    """Median number of rounds to a target over runs; None if the middle run did not reach it."""

    median: float | None
    reached: int
    """Number of runs that reached the target."""
    runs: int


@dataclass(frozen=True)
class TargetCosts:
    """What several runs needed to reach a target.

    A run that ended before it reached the target is not dropped, but censored: it needs more rounds than it had.
    Medians are None if the middle run did not reach the target; means over the runs that reached it would be biased.
    """

    rounds: tuple[int | None, ...]
    """The first round at the target, per run; None if the run did not reach it."""
    ends: tuple[int, ...]
    """The last round of every run."""
    seconds: float | None = None
    """Median of the virtual seconds; also None if a run has no virtual time."""
    bytes: float | None = None
    """Median of the bytes sent, up and down."""

    @property
    def reached(self) -> int:
        """Number of runs that reached the target."""
        return sum(rounds is not None for rounds in self.rounds)

    @property
    def median(self) -> float | None:
        """Median of the rounds."""
        return _median(math.inf if rounds is None else rounds for rounds in self.rounds)

    @property
    def text(self) -> str:
        """The median, or ``1000+`` if the middle run ended at round 1000 without reaching the target.

        >>> TargetCosts((40, None, 60), (100, 100, 100)).text
        '60'
        >>> TargetCosts((40, None, None), (100, 90, 80)).text
        '80+'
        """
        if not self.rounds:
            return "–"
        if self.median is not None:
            return f"{self.median:g}"
        lower_bounds = [end if rounds is None else rounds for rounds, end in zip(self.rounds, self.ends, strict=True)]
        return f"{median_high(lower_bounds)}+"

    def document(self, target: float) -> dict[str, Any]:
        """Return all values for a report; ``each`` has the rounds of each run as text, e.g. ``100+``."""
        pairs = zip(self.rounds, self.ends, strict=True)
        return {
            "target": target,
            "seconds": self.seconds,
            "bytes": self.bytes,
            "text": self.text,
            "median": self.median,
            "reached": self.reached,
            "runs": len(self.rounds),
            "each": [f"{end}+" if rounds is None else str(rounds) for rounds, end in pairs],
        }


def costs_to_target(row: Row, metric: str, target: float, lower_is_better: bool) -> TargetCosts:
    """Compute what the evaluated runs of a row needed until ``metric`` was ``target`` or better."""
    runs = [record for record in row.records if record.history]
    rounds = [rounds_to(record.history, row.model, metric, target, lower_is_better) for record in runs]
    at_target: list[dict[str, Any]] = []  # the evaluation at which each run reached the target; empty if it did not
    for record, first_round in zip(runs, rounds, strict=True):
        at_target.append(next((entry for entry in record.history if entry["round"] == first_round), {}))
    return TargetCosts(
        tuple(rounds),
        tuple(map(_end, runs)),
        seconds=_median(entry.get(VIRTUAL_SECONDS, math.inf) for entry in at_target),
        bytes=_median(entry["bytes_up"] + entry["bytes_down"] if entry else math.inf for entry in at_target),
    )


def _median(values: Iterable[float]) -> float | None:
    """The median of numbers; None if it is infinite, or if there are none."""
    listed = list(values)
    middle = median(listed) if listed else math.inf
    return middle if math.isfinite(middle) else None


def _end(run: Record) -> int:
    """The last round of a run; for a diverged run, which would never reach a target, the last planned round."""
    return run.config.training.rounds if run.status == "diverged" else int(run.history[-1]["round"])
