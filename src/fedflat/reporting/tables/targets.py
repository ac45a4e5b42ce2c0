"""Rounds, virtual time and bytes that runs need to reach a target value of the metric."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from fedflat.reporting.tables.summary import RoundsToTarget, rounds_to

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


class TargetCosts(NamedTuple):
    """Medians over runs of what they needed to reach a target.

    A median is None if the middle run did not reach the target.
    """

    rounds: float | None
    reached: int
    """Number of runs that reached the target."""
    runs: int
    seconds: float | None
    """Virtual seconds; also None if a run has no virtual time."""
    bytes: float | None
    """Bytes sent, up and down."""

    def entries(self, target: float) -> dict[str, Any]:
        """The entries of a comparison's table, by name."""
        return {
            f"rounds to {target:g}": MedianRounds(self.rounds, self.reached, self.runs),
            f"virtual seconds to {target:g}": self.seconds,
            f"bytes to {target:g}": self.bytes,
        }


def costs_to_target(row: Row, metric: str, target: float, lower_is_better: bool) -> TargetCosts:
    """Compute what the runs of a row needed until ``metric`` was ``target`` or better."""
    rounds, seconds, sent = list[float](), list[float](), list[float]()
    for record in row.records:
        first_round = rounds_to(record.history, row.model, metric, target, lower_is_better)
        if first_round is None:
            entry: dict[str, float] = {}
        else:
            entry = next(entry for entry in record.history if entry["round"] == first_round)
        rounds.append(math.inf if first_round is None else first_round)
        seconds.append(entry.get(VIRTUAL_SECONDS, math.inf))
        sent.append(entry["bytes_up"] + entry["bytes_down"] if entry else math.inf)
    reached = sum(map(math.isfinite, rounds))
    return TargetCosts(_median(rounds), reached, len(rounds), _median(seconds), _median(sent))


def _median(values: Sequence[float]) -> float | None:
    """The median of numbers, or None if it is infinite."""
    middle = median(values)
    return middle if math.isfinite(middle) else None


def target_values(row: Row, metric: str, lower_is_better: bool, target: float) -> dict[str, Any]:
    """Compute what a row's runs needed to reach a target value of the metric, as plain values.

    The result holds the ``median`` number of rounds over runs and its ``text``, how many of the ``runs`` have
    ``reached`` the target, and the rounds of ``each`` run as text: ``100+`` if the run ended at round 100 without
    reaching the target. ``seconds`` and ``bytes`` are the medians of virtual time and of traffic, or None.
    """
    runs = [record for record in row.records if record.history]
    needed = costs_to_target(row, metric, target, lower_is_better)
    costs = {"target": target, "seconds": needed.seconds, "bytes": needed.bytes}
    if not runs:
        return {**costs, "text": "–", "median": None, "reached": 0, "runs": 0, "each": []}
    rounds = tuple(rounds_to(record.history, row.model, metric, target, lower_is_better) for record in runs)
    ends = _ends(runs)
    reached = RoundsToTarget(target, rounds, ends)
    return {
        **costs,
        "text": reached.text,
        "median": reached.median,
        "reached": reached.count,
        "runs": len(runs),
        "each": [f"{end}+" if number is None else str(number) for number, end in zip(rounds, ends, strict=True)],
    }


def _ends(runs: Sequence[Record]) -> tuple[int, ...]:
    """The last round of each run; a diverged run, which would never reach a target, counts with all planned rounds."""
    return tuple(
        record.config.training.rounds if record.status == "diverged" else int(record.history[-1]["round"])
        for record in runs
    )
