"""What a reader must know before believing a table: what diverged, what is unfinished or censored, how little few
seeds can say.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedflat.reporting.tables.statistics import SIGNED_RANK_FROM, detectable
from fedflat.reporting.tables.summary import from_to

FEW = 5
"""Below so many seeds a report says what they cannot show."""


def notes_of(section: Mapping[str, Any]) -> list[dict[str, str]]:
    """The notes of a section, each with how grave it is: bad, warn or info."""
    rows: Sequence[Mapping[str, Any]] = section["rows"]
    found = [*_ends(section["runs"]), *_seeds(rows), *_pairs(section), *_figures(rows), *_censored(rows), *_time(rows)]
    return [{"kind": kind, "text": text} for kind, text in found]


def _ends(runs: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    found = [
        ("bad", f"{run['algorithm']}, seed {run['seed']}, diverged at round {run['rounds']}{_because(run)}.")
        for run in runs
        if run["status"] == "diverged"
    ]
    if found:
        found.append(
            (
                "bad",
                "Runs that diverged are left out of means and differences, and take the last place in ranks: means flatter them.",
            )
        )
    unfinished = [run for run in runs if run["status"] in ("running", "paused")]
    if unfinished:
        some = ", ".join(
            f"{run['algorithm']} seed {run['seed']} ({run['rounds']} of {run['of']} rounds)" for run in unfinished[:5]
        )
        found.append(
            (
                "warn",
                f"{len(unfinished)} of {len(runs)} runs are not over: {some}{', …' if len(unfinished) > 5 else ''}.",
            )
        )
    stopped = sum(run["status"] == "stopped" for run in runs)
    if stopped:
        found.append(("info", f"{_many(stopped, 'run')} stopped before the last round, as asked for."))
    return _few(found)


def _few(found: list[tuple[str, str]], most: int = 12) -> list[tuple[str, str]]:
    return found if len(found) <= most else [*found[:most], ("bad", f"… and {len(found) - most} notes like these.")]


def _because(run: Mapping[str, Any]) -> str:
    reason = run["reason"].removeprefix(f"round {run['rounds']}: ").rstrip(".")
    return f" ({reason})" if reason else ""


def _seeds(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    counts = {len(row["seeds"]) for row in rows}
    fewest = min(counts)
    if fewest == 1:
        return [
            (
                "warn",
                "At least one row has a single seed: it has no spread, no interval and no test, and its place may be luck.",
            )
        ]
    found = []
    if len(counts) > 1:
        found.append(
            (
                "warn",
                f"Rows have different numbers of seeds ({fewest} to {max(counts)}); differences use the common ones alone.",
            )
        )
    if fewest < FEW:
        found.append(
            (
                "warn",
                f"{fewest} seeds are few. A paired t test of {fewest} finds, with a chance of 80 %, only differences of "
                f"{detectable(fewest):.1f} standard deviations or more; what it does not find may well be there. The bootstrap interval of "
                f"{fewest} values is too narrow ({100 * (1 - 2 * 0.5**fewest):.0f} % at best, not 95 %): believe Student's beside it.",
            )
        )
    return found


def _pairs(section: Mapping[str, Any]) -> list[tuple[str, str]]:
    found = []
    base = None if section["baseline"] is None else section["rows"][section["baseline"]]["label"]
    uneven = [one["label"] for one in section["differences"] if one["uneven"]]
    if uneven:
        found.append(
            (
                "warn",
                f"The means of {', '.join(uneven[:5])}{', …' if len(uneven) > 5 else ''} and {base} are over different numbers of "
                "evaluations (n), as where an average begins late, so they are not compared: use --by last, or more rounds.",
            )
        )
    without = [one["label"] for one in section["differences"] if one["pair"] is None and not one["uneven"]]
    if without:
        found.append(
            (
                "warn",
                f"{', '.join(without[:5])} and {base} share no seed that did not diverge, so there is no difference to give.",
            )
        )
    tests = {one["pair"]["test"] for one in section["differences"] if one["pair"]} - {"none"}
    names = {
        "paired t": f"paired t (fewer than {SIGNED_RANK_FROM} pairs)",
        "signed rank": "Wilcoxon's signed rank, exact",
    }
    if tests:
        which = " and ".join(names[test] for test in sorted(tests))
        count = sum(one["pair"] is not None and one["pair"]["p"] is not None for one in section["differences"])
        family = f", corrected for {count} comparisons after Holm" if count > 1 else ""
        found.append(
            (
                "info",
                f"Differences are paired by seed: the same partition, cohorts and batches. Test: {which}{family}, two-sided.",
            )
        )
    if len(section["rows"]) > 1 and section["ranks"] is None and not section["uneven"]:
        found.append(("warn", "No seed is common to all rows, so there are no ranks."))
    return found


def _figures(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    counts = [count for row in rows for count in row["mean_counts"].values()]
    found = []
    if counts:
        found.append(
            (
                "info",
                f"The mean of the last 100 rounds is over {from_to(counts)} evaluations. The best is chosen on the test set: optimistic.",
            )
        )
    if any(0 < row["rounds"] <= 100 for row in rows):
        found.append(
            (
                "warn",
                "Some runs have no more than 100 rounds, so that their mean of the last 100 holds the first, steep ones as well.",
            )
        )
    if len({row["rounds"] for row in rows}) > 1:
        found.append(("warn", "Rows have different numbers of rounds; their last figures are not of the same moment."))
    return found


def _censored(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    missed = sum(one["runs"] - one["reached"] for row in rows for one in row["reached"])
    if not missed:
        return []
    return [("warn", f"{_many(missed, 'time')} a run ended before it reached a target. Such a run is censored: 1000+ says "
             "that it had not by round 1000. Rounds to a target are medians over all seeds, the censored ones included.")]  # fmt: skip


def _time(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    if not any(row["seconds"] for row in rows):
        return []
    return [
        (
            "info",
            "Seconds are those of the machine at that time, looks at flatness included; runs at the same time slow one another.",
        )
    ]


def _many(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"
