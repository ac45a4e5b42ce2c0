"""Output of a single run, on the screen and as JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fedflat.cli.lookup.settings import different_from_defaults
from fedflat.cli.shared.screen import (
    facts,
    screen,
    shown_bytes,
    shown_count,
    shown_metric,
    shown_seconds,
    table,
    with_unit,
)
from fedflat.reporting.figures.files import check_figure as check_figure
from fedflat.reporting.figures.files import write_figure as write_figure

if TYPE_CHECKING:
    from fedflat.experiment.store.run_folder import Record
    from fedflat.reporting.result import Result

COSTS = ("backward_passes", "samples", "bytes_down", "bytes_up")
STATUS_STYLE = {
    "finished": "green",
    "stopped": "yellow",
    "paused": "yellow",
    "running": "yellow",
    "diverged": "bold red",
}


def run_document(record: Record) -> dict[str, Any]:
    """A run as JSON-compatible values."""
    from fedflat.reporting.result import Result
    from fedflat.reporting.tables.summary import summarise

    metric = Result(record).metric
    found = {name: summarise(record.history, name, metric) for name in record.evaluated}
    end = record.history[-1] if record.history else {}
    looks = record.config.flatness.every is not None
    return {
        "folder": folder_of(record),
        "algorithm": record.config.algorithm,
        "seed": record.config.seed,
        "status": record.status,
        "reason": record.reason,
        "rounds": end.get("round"),
        "metric": metric,
        "models": {name: None if summary is None else vars(summary) for name, summary in found.items()},
        "seconds": round(record.seconds, 3),
        "flatness_seconds": None if not looks or record.folder is None else round(record.folder.flatness_seconds(), 3),
        "cost": {name: end.get(name) for name in COSTS},
        "config": record.config.model_dump(mode="json"),
    }


def print_run(record: Record, settings: bool = False) -> None:
    """Print a run's metrics, cost and folder; ``settings`` adds its settings and partition."""
    from rich.text import Text

    document, console = run_document(record), screen()
    metric, cost = document["metric"], document["cost"]
    counts = {summary["mean_count"] for summary in document["models"].values() if summary}
    mean = f"mean of last 100 rounds (n={max(counts)})" if len(counts) == 1 else "mean of last 100 rounds"
    columns = ("model", "last", mean, "best (max over test)")
    rows = []
    for name, summary in document["models"].items():
        last, late, best = (
            shown_metric(summary[key], metric) if summary else None for key in ("last", "mean_last", "best")
        )
        rows.append((name, last, f"{late} (n={summary['mean_count']})" if summary and len(counts) > 1 else late, best))
    about = f"   {record.config.data.dataset}, seed {record.config.seed}   "
    console.print()
    console.print(Text.assemble((record.config.algorithm, "bold"), about, (f"test {with_unit(metric)}", "dim")))
    console.print()
    console.print(table(columns, rows, numbers=columns[1:]))
    console.print()
    more = (
        f": {record.reason}"
        if record.reason
        else f" after {document['rounds']} of {record.config.training.rounds} rounds"
    )
    if record.status in ("running", "paused") and record.folder is not None:
        more += f"{', or interrupted' if record.status == 'running' else ''} (continue with {record.folder.goes_on})"
    console.print(
        facts(
            {
                "status": Text.assemble((record.status, STATUS_STYLE.get(record.status, "")), more),
                "time": _time(document),
                "sent": f"{shown_bytes(cost['bytes_up'])} up, {shown_bytes(cost['bytes_down'])} down",
                "backward passes": shown_count(cost["backward_passes"]),
                "folder": document["folder"],
            }
        )
    )
    if settings:
        console.print()
        console.print("Non-default settings", style="bold")
        console.print(table(("setting", "value", "default"), different_from_defaults(record.config)))
        if record.folder is not None:
            print_partition(record.folder.partition())


def _time(document: dict[str, Any]) -> str:
    """Wall-clock time, and the time spent on flatness measurements."""
    seconds, looks = document["seconds"], document["flatness_seconds"]
    share = (
        ""
        if looks is None
        else f", of which {shown_seconds(looks)} ({100 * looks / max(seconds, looks, 1e-9):.0f} %) for flatness"
    )
    return f"{shown_seconds(seconds)}{share}"


def print_partition(partition: dict[str, Any]) -> None:
    """Print a partition's statistics."""
    from fedflat.data import full_partition

    console = screen()
    console.print()
    console.print(f"Partition: {full_partition(partition['partitioner'])}", style="bold")
    console.print(facts(partition_facts(partition)))


def partition_facts(partition: dict[str, Any]) -> dict[str, object]:
    """Statistics of a partition as text."""
    sizes, described = partition["sizes"], partition.get("described_clients", partition["clients"])
    some = f" (statistics of the first {shown_count(described)})" if described < partition["clients"] else ""
    found: dict[str, object] = {
        "seed": partition["seed"],
        "clients": f"{shown_count(partition['clients'])}{some}",
        "examples per client": f"{sizes['min']} to {sizes['max']}, median {sizes['median']:g}",
        "classes per client": f"{partition['classes_per_client']:.2f} on average",
        "heterogeneity": f"{partition['heterogeneity']:.3f} (mean total variation distance from all data; 0 is i.i.d.)",
        "coverage": f"{100 * partition['coverage']:.1f} % of the training examples",
        "duplicates": f"{shown_count(partition['duplicates'])} examples are used more than once",
    }
    seldom = {
        "unseen": "clients never train",
        "thinned": "examples removed by the long tail",
        "validation": "examples held out for validation",
    }
    found |= {name: f"{shown_count(partition[name])} {words}" for name, words in seldom.items() if partition.get(name)}
    return found | {"hash": partition["hash"]}


def folder_of(record: Record) -> str | None:
    """The folder of a run."""
    return None if record.folder is None else str(record.folder.path)


def draw_curve(result: Result) -> None:
    """Write a run's curve into its folder."""
    if result.record.folder is not None and result.history:
        write_figure(result.plot(), result.record.folder.path / "curve.png")
