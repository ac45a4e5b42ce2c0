"""Output of several runs, on the screen and as JSON, with a conclusion."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from fedflat.cli.lookup.settings import flat_settings
from fedflat.cli.shared.one_run import folder_of
from fedflat.cli.shared.screen import screen, shown_bytes, shown_metric, shown_seconds, table, with_unit
from fedflat.reporting.tables.summary import shown_range
from fedflat.text import write_value
from fedflat.units import is_share

if TYPE_CHECKING:
    from rich.text import Text

    from fedflat.reporting.result import Comparison
    from fedflat.reporting.tables.summary import SeedStatistics

FIGURES = ("last", "mean_last", "best")


def comparison_document(comparison: Comparison, targets: Sequence[float] = ()) -> dict[str, Any]:
    """A comparison as JSON-compatible values."""
    lines = []
    for line, differing in zip(comparison.table(targets), differing_settings(comparison), strict=True):
        plain = {
            key: asdict(value) if key in FIGURES else value
            for key, value in line.items()
            if not key.startswith("rounds to ")
        }
        plain["rounds_to"] = [
            dict(zip(("target", "median", "reached", "runs"), (t, *line[f"rounds to {t:g}"]), strict=True))
            for t in targets
        ]
        lines.append(plain | {"settings": differing})
    return {
        "metric": comparison.metric,
        "rows": lines,
        "verdict": verdict(comparison),
        "runs": [
            {
                "folder": folder_of(r),
                "algorithm": r.config.algorithm,
                "seed": r.config.seed,
                "status": r.status,
                "reason": r.reason,
            }
            for r in comparison.records
        ],
    }


def print_comparison(comparison: Comparison, targets: Sequence[float] = ()) -> None:
    """Print the table of a comparison, diverged runs, and the best row."""
    console, metric = screen(), comparison.metric
    lines, differing = comparison.table(targets), differing_settings(comparison)
    counts = evaluation_counts(lines)
    best = (
        max((line["mean_last"].mean for line in lines if "mean_last" in line), default=None)
        if len(counts) == 1
        else None
    )
    columns = ["algorithm", *(["settings"] if any(differing) else []), "mean of last\n100 rounds", "last", "seeds"]
    columns += [f"rounds\nto {target:g}" for target in targets] + ["time", "sent up"]
    rows: list[list[object]] = []
    for line, settings in zip(lines, differing, strict=True):
        row: list[object] = [line["label"], *([_assignments(settings)] if any(differing) else [])]
        mean, last = line.get("mean_last"), line.get("last")
        over = f" (n={shown_range(line['mean_counts'])})" if mean is not None and len(counts) > 1 else ""
        row += [_spread(mean, metric, mean is not None and mean.mean == best, over), _spread(last, metric)]
        row += [f"{line['seeds']} ({line['diverged']} diverged)" if line["diverged"] else line["seeds"]]
        row += [_rounds(*line[f"rounds to {target:g}"]) for target in targets]
        rows.append([*row, shown_seconds(line["seconds"]), shown_bytes(line["bytes_up"])])
    console.print()
    spread = (
        "mean ± standard deviation over seeds" if max((line["seeds"] for line in lines), default=0) > 1 else "one seed"
    )
    many = f"; the mean is over {shown_range(counts)} evaluation{'s' * (max(counts) != 1)}" if counts else ""
    console.print(f"test {with_unit(metric)}: {spread}{many}", style="dim")
    console.print(table(columns, rows, numbers=set(columns) - {"algorithm", "settings"}))
    console.print()
    for record in comparison.records:
        if record.status not in ("finished", "stopped"):
            name = f"{record.config.algorithm}, seed {record.config.seed}"
            console.print(
                f"{name}: {record.status}{f', {record.reason}' if record.reason else ''}",
                style="red" if record.status == "diverged" else "yellow",
            )
    console.print(verdict(comparison), style="bold")


def verdict(comparison: Comparison) -> str:
    """The row with the best mean over the last rounds, and whether its lead exceeds seed variation."""
    lines = comparison.table()
    alive = sorted((line for line in lines if "mean_last" in line), key=lambda line: -line["mean_last"].mean)
    if not lines:
        return "No run has been evaluated yet."
    if not alive:
        return "Every run diverged; there is no best algorithm."
    if any(differing_settings(comparison)):
        return "These runs differ in more than algorithm and seed, so they are not ranked."
    if len(evaluation_counts(lines)) > 1:
        each = ", ".join(f"{line['label']} {shown_range(line['mean_counts'])}" for line in alive)
        return f"The means cover different numbers of evaluations ({each}), so rows are not ranked; use more rounds."
    best, first, metric = alive[0], lines[0], comparison.metric
    some = f", {best['mean_last'].count} of {best['seeds']} seeds without divergence" if best["diverged"] else ""
    says = f"{best['label']} is best by the mean of the last 100 rounds ({_words(best['mean_last'], metric)}{some})"
    if len(alive) == 1:
        return f"{says}; {'nothing to compare with' if len(lines) == 1 else 'all others diverged'}."
    if best is first:
        return f"{says}: {_lead(best, alive[1], metric)}."
    if "mean_last" not in first:
        return f"{says}; {first['label']} diverged."
    return f"{says}: {_lead(best, first, metric)}."


def evaluation_counts(lines: Sequence[dict[str, Any]]) -> set[int]:
    """Numbers of evaluations behind the means."""
    return {count for line in lines for count in line.get("mean_counts", [])}


def _lead(best: dict[str, Any], other: dict[str, Any], metric: str) -> str:
    one, two = best["mean_last"], other["mean_last"]
    ahead = one.mean - two.mean
    points = f"+{shown_metric(ahead, metric)} {'points ' if is_share(metric) else ''}over {other['label']}"
    if one.count < 2 or two.count < 2:
        return f"{points} (one seed shows no variation; use --seeds 3)"
    spreads = f"{shown_metric(one.std, metric)} + {shown_metric(two.std, metric)}"
    return f"{points}; {'exceeds' if ahead > one.std + two.std else 'within'} seed variation ({spreads})"


def differing_settings(comparison: Comparison) -> list[dict[str, Any]]:
    """For every row, the settings in which runs differ, except algorithm and seed."""
    flat = [flat_settings(row.records[0].config) for row in comparison.rows()]
    names = [
        name
        for name in (flat[0] if flat else {})
        if name not in ("algorithm", "seed") and len({str(some[name]) for some in flat}) > 1
    ]
    return [{name: some[name] for name in names} for some in flat]


def _assignments(settings: dict[str, Any]) -> str:
    return ", ".join(f"{name}={write_value(value)}" for name, value in settings.items())


def _words(spread: SeedStatistics, metric: str) -> str:
    unit = " %" if is_share(metric) else ""
    deviation = f" ± {shown_metric(spread.std, metric)}" if spread.count > 1 else ""
    return f"{shown_metric(spread.mean, metric)}{deviation}{unit}"


def _spread(spread: SeedStatistics | None, metric: str, winner: bool = False, over: str = "") -> Text | None:
    from rich.text import Text

    if spread is None:
        return None
    deviation = f" ± {shown_metric(spread.std, metric)}" if spread.count > 1 else ""
    return Text.assemble(
        (shown_metric(spread.mean, metric), "bold green" if winner else ""), (f"{deviation}{over}", "dim")
    )


def _rounds(median: float | None, reached: int, runs: int) -> str:
    return f"{'–' if median is None else f'{median:g}'} ({reached}/{runs})"
