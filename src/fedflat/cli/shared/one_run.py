"""Output of a single run and of its partition, on the screen and as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fedflat.cli.lookup.settings import different_from_defaults
from fedflat.cli.shared.screen import (
    key_values,
    print_section,
    screen,
    shown_bytes,
    shown_count,
    shown_hash,
    shown_metric,
    table,
)
from fedflat.cli.shared.sites import describe_secure_aggregation, print_sites, sites_document
from fedflat.display import column_format, counted, shown_seconds, with_unit
from fedflat.errors import UserError
from fedflat.reporting.figures.files import write_figure

if TYPE_CHECKING:
    from rich.text import Text

    from fedflat.experiment.store.run_folder import Record, RunFolder
    from fedflat.reporting.comparison import Comparison
    from fedflat.reporting.result import Result

CURVE = "curve.png"
"""File of the learning curve in a run folder."""
MAX_OTHER_METRICS = 3
"""Largest number of metrics shown in addition to the primary one."""
OTHER_SETS = ("validation", "unseen")
"""Sets of examples that a run may be evaluated on besides the test set; ``unseen``: of clients that never train."""
COSTS = ("backward_passes", "samples", "bytes_down", "bytes_up")
STATUS_STYLE = {
    "finished": "green",
    "stopped": "green",
    "paused": "yellow",
    "running": "cyan",
    "interrupted": "yellow",
    "silent": "yellow",
    "diverged": "bold red",
}
"""Colours of a run's status; a ``silent`` run was probably killed."""


def current_status(record: Record) -> str:
    """Return the status of a run; ``interrupted`` if its status is ``running``, but no process has locked its folder.

    Such a run was killed.
    """
    from fedflat.experiment.store.files import is_free

    if record.status != "running" or record.folder is None:
        return record.status
    try:
        return "interrupted" if is_free(record.folder.path / "checkpoint") else "running"
    except UserError:  # a folder that this user may not write to cannot be locked
        return "running"


def run_document(record: Record) -> dict[str, Any]:
    """Return the results, cost and config of a run as JSON-compatible values."""
    from fedflat.reporting.tables.summary import summarise

    metric = record.metric
    summaries = {name: summarise(record.history, name, metric, record.lower_is_better) for name in record.evaluated}
    last = record.history[-1] if record.history else {}
    flatness_seconds = None
    if record.config.flatness.every is not None and record.folder is not None:
        flatness_seconds = round(record.folder.flatness_seconds(), 3)
    return {
        "folder": folder_of(record),
        "algorithm": record.config.algorithm,
        "seed": record.config.seed,
        "status": record.status,
        "reason": record.reason,
        "rounds": last.get("round"),
        "metric": metric,
        "lower_is_better": record.lower_is_better,
        "last_metrics": last.get("test", {}),
        **{f"last_{name}_metrics": last[name] for name in OTHER_SETS if name in last},
        "models": {name: None if summary is None else vars(summary) for name, summary in summaries.items()},
        "seconds": round(record.seconds, 3),
        "flatness_seconds": flatness_seconds,
        "cost": {name: last.get(name) for name in COSTS},
        **{name: last[name] for name in ("virtual_seconds", "idle_rounds", "staleness", "epsilon") if name in last},
        **sites_document(record),
        "config": record.config.model_dump(mode="json"),
    }


def print_run(record: Record, settings: bool = False) -> None:
    """Print a run's metrics, cost and folder; ``settings`` adds its settings and, for a simulation, its partition."""
    from rich.text import Text

    from fedflat.experiment.store.files import DamagedFile
    from fedflat.reporting.comparison import Comparison

    document, console = run_document(record), screen()
    metric, cost = document["metric"], document["cost"]
    data, sites = record.config.data, document.get("sites")
    clients = data.partition if sites is None else counted(len(sites), "site")
    about = f"   {data.dataset}, {clients}, seed {record.config.seed}   "
    direction = ", lower is better" if record.lower_is_better else ""
    is_diverged, status = record.status == "diverged", _describe_status(record, document["rounds"])
    console.print()
    console.print(
        Text.assemble((record.config.algorithm, "bold"), about, (f"test {with_unit(metric)}{direction}", "dim"))
    )
    console.print()
    if is_diverged:
        console.print(status)
        console.print()
    # The values of a run that diverged before its first evaluated round are those of the initial model.
    if document["models"] and not (is_diverged and len(record.history) == 1):
        _print_models(document, metric)
        console.print()
        print_row_warnings(Comparison([record]))
    console.print(
        key_values(
            {
                **({} if is_diverged else {"status": status}),
                "time": _describe_time(document["seconds"], document["flatness_seconds"]),
                **_describe_virtual_time(document),
                **_describe_privacy(document),
                **describe_secure_aggregation(document),
                "sent": f"{shown_bytes(cost['bytes_up'])} up, {shown_bytes(cost['bytes_down'])} down",
                "backward passes": shown_count(cost["backward_passes"]),
                "folder": document["folder"],
            }
        )
    )
    print_sites(document)
    if settings:
        changed = table(("setting", "value", "default"), different_from_defaults(record.config))
        print_section("Non-default settings", changed)
        if record.folder is not None and "sites" not in document:  # the data of real sites have no partition
            try:
                print_partition(record.folder.partition())
            except DamagedFile as error:
                console.print(str(error), style="red")


def _describe_virtual_time(document: dict[str, Any]) -> dict[str, str]:
    """Return the virtual time of a run with the number of its rounds without progress; empty if it has none."""
    if "virtual_seconds" not in document:
        return {}
    idle = document["idle_rounds"]
    text = shown_seconds(document["virtual_seconds"])
    return {"virtual time": f"{text}, {idle} rounds without progress" if idle else text}


def _describe_privacy(document: dict[str, Any]) -> dict[str, str]:
    """Return the epsilon that a private run has spent, and its mechanism; empty for other runs."""
    if "epsilon" not in document:
        return {}
    return {"privacy": f"epsilon {document['epsilon']:.3g}, {document['config']['federation']['privacy']}"}


def print_row_warnings(comparison: Comparison) -> None:
    """Warn about models no better than the mean of the targets, and about different versions of plugins or data."""
    from fedflat.reporting.row import MIXED_DATA, MIXED_PLUGINS, WORSE_THAN_MEAN, mixed_data

    rows = comparison.rows()
    worse = [row.label for row in rows if row.is_worse_than_mean]
    mixed = [f"{row.label} ({', '.join(row.mixed_plugins)})" for row in rows if row.mixed_plugins]
    datasets = mixed_data(comparison.records)
    for warning, names in {WORSE_THAN_MEAN: worse, MIXED_PLUGINS: mixed, MIXED_DATA: datasets}.items():
        if names:
            screen().print(f"{warning}: {', '.join(names)}.", style="yellow")


def _print_models(document: dict[str, Any], metric: str) -> None:
    """Print one row per evaluated model of a run's document; n is the number of evaluations that its mean covers.

    A model that has not been evaluated yet has an empty row. The last values of up to ``MAX_OTHER_METRICS`` other
    metrics, and of ``metric`` on further sets of examples, are shown, too.
    """
    models, last_metrics = document["models"], document["last_metrics"]
    sets = {name: scores for name in OTHER_SETS if (scores := document.get(f"last_{name}_metrics"))}
    measured = dict.fromkeys(name for metrics in last_metrics.values() for name in metrics)
    others = [name for name in measured if name not in (metric, "loss")][:MAX_OTHER_METRICS]
    summaries = [summary for summary in models.values() if summary]
    counts = {summary["mean_count"] for summary in summaries}
    number_format = column_format(summary["last"] for summary in summaries)

    def column(values: Mapping[str, Any], key: str, metric: str = metric, number_format: str = number_format) -> Any:
        """Return the texts of a column, given the values of each model by key."""
        return [shown_metric((values.get(name) or {}).get(key), metric, number_format) for name in models]

    mean, means = "mean of last 10 %\nof evaluations", column(models, "mean_last")
    if len(counts) == 1:
        mean += f" (n={max(counts)})"
    else:
        each = zip(means, models.values(), strict=True)
        means = [f"{text} (n={summary['mean_count']})" if summary else text for text, summary in each]
    best, best_key = "best over test", "best"
    if "validation" in sets:
        best, best_key = "at best\nvalidation", "at_best_validation"
    columns = {"model": list(models), "last": column(models, "last"), mean: means, best: column(models, best_key)}
    columns |= {f"last\non {name}": column(scores, metric) for name, scores in sets.items()}
    columns |= {f"last {with_unit(other)}": column(last_metrics, other, other, ".4g") for other in others}
    screen().print(table(columns, zip(*columns.values(), strict=True), numeric=columns.keys() - {"model"}))


def _describe_status(record: Record, rounds: int | None) -> Text:
    """Return the coloured status, its reason or the evaluated rounds, and where and how to continue a run."""
    from rich.text import Text

    status, total = current_status(record), record.config.training.rounds
    if record.reason:
        details = f": {record.reason}"
    elif rounds is None:
        details = " before its first evaluation"
    elif status == "interrupted":  # later rounds were not recorded
        details = f"; last evaluation: round {rounds} of {total}"
    else:
        details = f" after {rounds} of {total} rounds"
    if status in ("interrupted", "paused") and record.folder is not None:
        from fedflat.experiment.analysis.reopen import resume_command

        details += f"; {_describe_checkpoint(record.folder)}; continue with {resume_command(record.folder)}"
    return Text.assemble((status, STATUS_STYLE.get(status, "")), details)


def _describe_checkpoint(folder: RunFolder) -> str:
    """Return the round of a run's last checkpoint, from which the run would continue, as text."""
    from fedflat.experiment.store.checkpoint import newest_checkpoint

    try:
        checkpoint = newest_checkpoint(folder)
    except UserError as error:
        return str(error)
    return "no checkpoint" if checkpoint is None else f"last checkpoint: round {checkpoint.header['rounds']}"


def _describe_time(seconds: float, flatness_seconds: float | None) -> str:
    """Return the wall-clock time as text, and how much of it flatness measurements took; None if there were none."""
    if flatness_seconds is None:
        return shown_seconds(seconds)
    percent = 100 * flatness_seconds / max(seconds, flatness_seconds, 1e-9)
    return f"{shown_seconds(seconds)}, of which {shown_seconds(flatness_seconds)} ({percent:.0f} %) for flatness"


def print_partition(partition: dict[str, Any]) -> None:
    """Print the statistics of a partition, as stored with a run."""
    from fedflat.data import full_partition

    print_section(f"Partition: {full_partition(partition['partitioner'])}", key_values(_partition_texts(partition)))


def _partition_texts(partition: dict[str, Any]) -> dict[str, object]:
    """Return the statistics of a partition as texts by label."""
    from fedflat.reporting.tables.summary import class_texts, shown_sizes

    clients, sizes = partition["clients"], partition["sizes"]
    # Statistics of very large federations are computed from the first clients.
    described = partition.get("described_clients", clients)
    subset = f" (statistics of the first {shown_count(described)})" if described < clients else ""
    texts: dict[str, object] = {
        "seed": partition["seed"],
        "clients": f"{shown_count(clients)}{subset}",
        "examples per client": shown_sizes(sizes),
        "coverage": f"{100 * partition['coverage']:.1f} % of the training examples",
        "duplicates": f"{shown_count(partition['duplicates'])} examples are used more than once",
    }
    if len(partition["histogram"][0]) > 1:  # regression has no classes
        texts |= class_texts(partition)
    only_if_positive = {
        "unseen": "clients never train",
        "thinned": "examples removed by the long tail",
        "validation": "examples held out for validation",
    }
    for name, meaning in only_if_positive.items():
        if partition.get(name):
            texts[name] = f"{shown_count(partition[name])} {meaning}"
    return texts | {"hash": shown_hash(partition["hash"])}


def folder_of(record: Record) -> str | None:
    """Return the path of a run's folder, or None if it has none."""
    return None if record.folder is None else str(record.folder.path)


def draw_curve(result: Result) -> None:
    """Write a run's learning curve into its folder."""
    if result.record.folder is not None and result.history:
        write_figure(result.plot(), result.record.folder.path / CURVE)
