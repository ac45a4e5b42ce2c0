"""Caveats of a report section: diverged, unfinished and censored runs, and too few seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedflat.reporting.tables.summary import SIGNED_RANK_FROM, detectable, from_to

FEW = 5
"""Number of seeds below which a report states its statistical limits."""


def notes_of(section: Mapping[str, Any]) -> list[dict[str, str]]:
    """The caveats of a section, each with its severity: bad, warn or info."""
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
                "Diverged runs are excluded from means and differences, which flatters them, and rank last.",
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
                f"{len(unfinished)} of {len(runs)} runs are unfinished: {some}{', …' if len(unfinished) > 5 else ''}.",
            )
        )
    stopped = sum(run["status"] == "stopped" for run in runs)
    if stopped:
        found.append(("info", f"{_many(stopped, 'run')} stopped early, as configured."))
    return _few(found)


def _few(found: list[tuple[str, str]], most: int = 12) -> list[tuple[str, str]]:
    return found if len(found) <= most else [*found[:most], ("bad", f"… and {len(found) - most} more.")]


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
                "At least one row has a single seed: no spread, no interval, no test, and its rank may be chance.",
            )
        ]
    found = []
    if len(counts) > 1:
        found.append(
            (
                "warn",
                f"Rows have different numbers of seeds ({fewest} to {max(counts)}); differences use common seeds only.",
            )
        )
    if fewest < FEW:
        found.append(
            (
                "warn",
                f"{fewest} seeds are few. With 80 % power, a paired t test of {fewest} seeds detects only differences "
                f"of at least {detectable(fewest):.1f} standard deviations, so smaller ones may exist. The bootstrap "
                f"interval of {fewest} values is too narrow ({100 * (1 - 2 * 0.5**fewest):.0f} % coverage at best, "
                "not 95 %); prefer the t interval.",
            )
        )
    return found


def _pairs(section: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Notes on how differences from the baseline were tested, as (level, text)."""
    messages = []
    base = None if section["baseline"] is None else section["rows"][section["baseline"]]["label"]
    uneven = [row["label"] for row in section["differences"] if row["uneven"]]
    if uneven:
        messages.append(
            (
                "warn",
                f"The means of {', '.join(uneven[:5])}{', …' if len(uneven) > 5 else ''} and {base} cover different "
                "numbers of evaluations (n), e.g. because an average starts late, so they are not compared: use "
                "--by last, or more rounds.",
            )
        )
    unpaired = [row["label"] for row in section["differences"] if row["pair"] is None and not row["uneven"]]
    if unpaired:
        messages.append(
            (
                "warn",
                f"{', '.join(unpaired[:5])} and {base} share no seed on which neither diverged, so no difference.",
            )
        )
    tests = {row["pair"]["test"] for row in section["differences"] if row["pair"]} - {"none"}
    names = {
        "paired t": f"paired t test (fewer than {SIGNED_RANK_FROM} pairs)",
        "signed rank": "Wilcoxon's signed-rank test",
    }
    if tests:
        which = " and ".join(names[test] for test in sorted(tests))
        count = sum(row["pair"] is not None and row["pair"]["p"] is not None for row in section["differences"])
        family = f", Holm-corrected for {count} comparisons" if count > 1 else ""
        messages.append(
            (
                "info",
                f"Differences are paired by seed (same partition, cohorts and batches). Two-sided {which}{family}.",
            )
        )
    if len(section["rows"]) > 1 and section["ranks"] is None and not section["uneven"]:
        messages.append(("warn", "The rows share no seed, so there are no ranks."))
    return messages


def _figures(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    counts = [count for row in rows for count in row["mean_counts"].values()]
    found = []
    if counts:
        found.append(
            (
                "info",
                f"The mean of the last 100 rounds covers {from_to(counts)} evaluations. The best value is selected on "
                "the test set and therefore optimistic.",
            )
        )
    if any(0 < row["rounds"] <= 100 for row in rows):
        found.append(
            (
                "warn",
                "Some runs have at most 100 rounds, so their mean of the last 100 includes early rounds.",
            )
        )
    if len({row["rounds"] for row in rows}) > 1:
        found.append(
            ("warn", "Rows have different numbers of rounds, so their final values are not directly comparable.")
        )
    return found


def _censored(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    missed = sum(target["runs"] - target["reached"] for row in rows for target in row["reached"])
    if not missed:
        return []
    text = (
        f"{_many(missed, 'time')} a run ended before it reached a target. Such runs are censored: 1000+ means not "
        "reached by round 1000. Rounds to a target are medians over all seeds, including censored ones."
    )
    return [("warn", text)]


def _time(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    if not any(row["seconds"] for row in rows):
        return []
    return [
        (
            "info",
            "Seconds are wall-clock times including flatness measurements; concurrent runs slow each other down.",
        )
    ]


def _many(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"
