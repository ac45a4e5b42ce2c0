"""Caveats of a report section: diverged, unfinished or censored runs, few seeds, models of unequal loss or size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedflat.display import counted
from fedflat.flatness.checks import describe_unequal_losses, describe_unequal_sizes
from fedflat.reporting.row import MIXED_DATA, MIXED_PLUGINS, WORSE_THAN_MEAN
from fedflat.reporting.tables.summary import MEAN_LABEL, MIN_SIGNED_RANK_PAIRS, detectable_effect, shown_range

FEW_SEEDS = 5
"""Number of seeds below which a report states its statistical limits."""
MAX_LISTED = 5
"""Maximum number of runs or rows named in one caveat."""
MAX_DIVERGED = 12
"""Maximum number of diverged runs with a caveat each."""
BAD, WARN, INFO = "bad", "warn", "info"
"""Severities; the page styles a caveat by this name."""
TEST_NAMES = {
    "paired t": f"paired t test (fewer than {MIN_SIGNED_RANK_PAIRS} pairs)",
    "signed rank": "Wilcoxon's signed-rank test",
}

Values = Mapping[str, Any]
Notes = list[tuple[str, str]]
"""Caveats as (severity, text)."""


def notes_of(section: Values) -> list[dict[str, str]]:
    """Return the caveats of a report's section, each with its severity (``kind``) and text."""
    rows = section["rows"]
    hashes = section["data_hashes"]
    notes: Notes = [(BAD, f"{MIXED_DATA} (hashes {_listed(hashes)}).")] if section["mixed_data"] else []
    notes += _run_notes(section["runs"]) + _seed_notes(rows) + _difference_notes(section)
    notes += _summary_notes(rows) + _target_notes(rows) + _time_notes(rows) + _flatness_notes(section["views"])
    return [{"kind": kind, "text": text} for kind, text in notes]


def _run_notes(runs: Sequence[Values]) -> Notes:
    """Note runs that diverged, have not finished or stopped early."""
    diverged = [run for run in runs if run["status"] == "diverged"]
    notes: Notes = []
    for run in diverged[:MAX_DIVERGED]:
        where = f"{run['algorithm']}, seed {run['seed']}, diverged at round {run['rounds']}"
        notes.append((BAD, f"{where}{_reason(run)}."))
    if len(diverged) > MAX_DIVERGED:
        notes.append((BAD, f"… and {len(diverged) - MAX_DIVERGED} more."))
    if diverged:
        text = "Diverged runs rank last. Means and differences exclude them, which favours their algorithms."
        notes.append((BAD, text))
    unfinished = [run for run in runs if run["status"] in ("running", "paused")]
    if unfinished:
        names = _listed(
            [f"{run['algorithm']} seed {run['seed']} ({run['rounds']} of {run['of']} rounds)" for run in unfinished]
        )
        notes.append((WARN, f"{len(unfinished)} of {len(runs)} runs are unfinished, and means exclude them: {names}."))
    stopped = sum(run["status"] == "stopped" for run in runs)
    if stopped:
        notes.append((INFO, f"{counted(stopped, 'run')} stopped early, as configured."))
    return notes


def _reason(run: Values) -> str:
    """Return why a run diverged, in brackets and without the round, which the caveat already states."""
    reason = run["reason"].removeprefix(f"round {run['rounds']}: ").rstrip(".")
    return f" ({reason})" if reason else ""


def _seed_notes(rows: Sequence[Values]) -> Notes:
    """Note rows with too few or different numbers of seeds."""
    counts = {len(row["seeds"]) for row in rows}
    fewest = min(counts)
    if fewest == 1:
        text = "At least one row has a single seed: no spread, no interval, no test, and its rank may be chance."
        return [(WARN, text)]
    notes: Notes = []
    if len(counts) > 1:
        seeds = f"({fewest} to {max(counts)})"
        notes.append((WARN, f"Rows have different numbers of seeds {seeds}; differences use common seeds only."))
    if fewest < FEW_SEEDS:
        # An interval within the range of the values misses the median if all values lie above or all below it.
        coverage = 100 * (1 - 2 * 0.5**fewest)
        text = (
            f"{fewest} seeds are few. With 80 % power, a paired t test of {fewest} seeds detects only differences "
            f"of at least {detectable_effect(fewest):.1f} standard deviations, so smaller ones may exist. The "
            f"bootstrap interval of {fewest} values is too narrow ({coverage:.0f} % coverage at best, not 95 %); "
            "prefer the t interval."
        )
        notes.append((WARN, text))
    return notes


def _difference_notes(section: Values) -> Notes:
    """Note how differences from the baseline were tested, and which rows could not be compared."""
    notes: Notes = []
    differences = section["differences"]
    baseline = None if section["baseline"] is None else section["rows"][section["baseline"]]["label"]
    uneven = [row["label"] for row in differences if row["uneven"]]
    if uneven:
        text = (
            f"The means of {_listed(uneven)} and {baseline} cover different numbers of evaluations (n), e.g. because "
            "a run stopped early, so they are not compared: use --by last."
        )
        notes.append((WARN, text))
    unpaired = [row["label"] for row in differences if row["pair"] is None and not row["uneven"]]
    if unpaired:
        text = f"{_listed(unpaired)} and {baseline} share no seed on which both converged, so they are not compared."
        notes.append((WARN, text))
    pairs = [row["pair"] for row in differences if row["pair"] is not None]
    tests = sorted({pair["test"] for pair in pairs} - {"none"})
    if tests:
        tested = sum(pair["p"] is not None for pair in pairs)
        names = " and ".join(TEST_NAMES[test] for test in tests)
        correction = f", Holm-corrected for {tested} comparisons" if tested > 1 else ""
        text = f"Differences are paired by seed (same partition, cohorts and batches). Two-sided {names}{correction}."
        notes.append((INFO, text))
    if len(section["rows"]) > 1 and section["ranks"] is None and not section["uneven"]:
        notes.append((WARN, "The rows share no seed, so there are no ranks."))
    return notes


def _summary_notes(rows: Sequence[Values]) -> Notes:
    """Note what the summary values cover."""
    notes: Notes = []
    worse = [row["label"] for row in rows if row["worse_than_mean"]]
    if worse:
        notes.append((WARN, f"{WORSE_THAN_MEAN}: {_listed(worse)}."))
    mixed = [f"{row['label']} ({', '.join(row['mixed_plugins'])})" for row in rows if row["mixed_plugins"]]
    if mixed:
        notes.append((BAD, f"{MIXED_PLUGINS}: {_listed(mixed)}."))
    counts = [count for row in rows for count in row["mean_counts"].values()]
    if counts:
        text = (
            f"The {MEAN_LABEL} covers {shown_range(counts)} of them. The best value is selected on the test set and "
            "therefore optimistic."
        )
        notes.append((INFO, text))
    if len({row["rounds"] for row in rows if row["mean_counts"]}) > 1:  # of rows that have final values
        text = "Rows have different numbers of rounds, so their final values are not directly comparable."
        notes.append((WARN, text))
    return notes


def _target_notes(rows: Sequence[Values]) -> Notes:
    """Explain censoring if some run did not reach a target."""
    missed = sum(target["runs"] - target["reached"] for row in rows for target in row["reached"])
    text = (
        f"In {counted(missed, 'case')}, a run ended before it reached a target. Such runs are censored: 1000+ means "
        "not reached by round 1000. Rounds to a target are medians over all seeds, including censored ones."
    )
    return [(WARN, text)] if missed else []


def _time_notes(rows: Sequence[Values]) -> Notes:
    """Explain the reported seconds."""
    text = (
        "Seconds are wall-clock times including flatness measurements and set-up, which takes longest in the first "
        "run; concurrent runs slow each other down."
    )
    return [(INFO, text)] if any(row["seconds"] for row in rows) else []


def _flatness_notes(views: Values) -> Notes:
    """Warn if the training losses of the measured models differ too much, or their numbers of parameters."""
    measured = [*views["spectra"], *views["landscapes"], *(row for table in views["tables"] for row in table["rows"])]
    losses: dict[str, float] = {}
    sizes = {entry["label"]: entry["parameters"] for entry in measured if entry.get("parameters")}
    for entry in measured:
        if entry.get("on") == "train" and entry["loss"] is not None:
            losses.setdefault(entry["label"], entry["loss"])
    texts = (describe_unequal_sizes(sizes), describe_unequal_losses(losses))
    return [(WARN, f"Flatness: {text}") for text in texts if text]


def _listed(names: Sequence[str]) -> str:
    """Join the first names, with an ellipsis if there are more."""
    return ", ".join(names[:MAX_LISTED]) + (", …" if len(names) > MAX_LISTED else "")
