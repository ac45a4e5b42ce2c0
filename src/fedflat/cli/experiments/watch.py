"""fedflat watch: follow runs of another process."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from fedflat.cli.shared.completion import complete_run
from fedflat.cli.shared.flags import JSON
from fedflat.cli.shared.one_run import STATUS_STYLE, current_status
from fedflat.cli.shared.screen import print_json, screen, shown_bytes, shown_metric, shown_seconds, table, with_unit
from fedflat.errors import UserError, no_folder

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

SILENT_AFTER = 120.0
"""Seconds without output after which a running run counts as silent; ten evaluation intervals if they are longer."""

DEAD_STATUSES = ("interrupted", "silent")
"""Statuses of runs that do not continue by themselves."""


@dataclass(frozen=True)
class WatchedRun:
    """The state of a run, from its files; the fields are those of the JSON output."""

    folder: str
    algorithm: str
    seed: int
    status: str
    """The run's status; ``interrupted`` if its process was killed, ``silent`` if it has not written for a long time."""
    rounds: int
    """Number of rounds up to the last evaluation."""
    of: int
    """Number of rounds of the complete run."""
    metric: str
    """Name of the primary metric."""
    value: float | None
    """The metric in the last evaluation."""
    best: float | None
    """The best value of the metric so far."""
    loss: float | None
    """The test loss in the last evaluation."""
    seconds: float
    """Duration of the run up to the last evaluation."""
    left: float | None
    """Estimated remaining seconds."""
    bytes_up: float | None
    """Bytes that clients have sent to the server."""

    @property
    def has_ended(self) -> bool:
        """Whether the run is finished, stopped, diverged or paused."""
        from fedflat.experiment.stopping import ENDED_STATUSES

        return self.status in (*ENDED_STATUSES, "paused")


def watch(
    runs: list[Path] = typer.Argument(
        metavar="RUNS...",
        help="run folders, or folders that contain runs; new runs are picked up",
        autocompletion=complete_run,
    ),
    interval: float = typer.Option(2.0, "--interval", min=0.1, metavar="SECONDS", help="polling interval"),
    once: bool = typer.Option(False, "--once", help="print the current state and exit"),
    as_json: bool = JSON,
) -> None:
    """Show rounds, metric, loss and remaining time of runs in other processes until all of them have finished.

    The runs are not changed.

    Example: fedflat watch runs --once
    """
    for path in runs:
        if not path.is_dir():
            raise no_folder(path, "a run folder, or a folder that contains runs")
    watched, console = read_runs(runs, report_errors=True), screen()
    if as_json:
        print_json([vars(run) for run in watched])
    elif once:
        console.print(_render(watched))
    elif console.is_terminal:
        _watch_live(runs, watched, interval, console)
    else:
        console.print(_render(watched))
        while not _all_ended(watched):
            time.sleep(interval)
            before, watched = watched, read_runs(runs)
            if watched != before:
                console.print(_render(watched))


def _watch_live(paths: list[Path], watched: list[WatchedRun], interval: float, console: Console) -> None:
    """Update a table on a terminal until all runs have ended or the user presses Ctrl-C."""
    from rich.live import Live

    with Live(_render(watched), console=console, auto_refresh=False) as live:
        try:
            while not _all_ended(watched):
                time.sleep(interval)
                watched = read_runs(paths)
                live.update(_render(watched), refresh=True)
        except KeyboardInterrupt:
            return


def _all_ended(runs: list[WatchedRun]) -> bool:
    return bool(runs) and all(run.has_ended or run.status in DEAD_STATUSES for run in runs)


def read_runs(paths: list[Path], report_errors: bool = False) -> list[WatchedRun]:
    """Return the state of every readable run; each path is a run folder or contains runs.

    Unreadable runs, for example of a newer version, are skipped; ``report_errors`` prints why, or raises the error if
    the only run cannot be read.
    """
    from fedflat.experiment.store.run_collection import runs_below
    from fedflat.experiment.store.run_folder import RunFolder

    folders: list[Path] = []
    for path in paths:
        folders += [path] if RunFolder(path).exists else runs_below(path)
    runs = []
    for folder in dict.fromkeys(folders):
        try:
            runs.append(read_run(folder))
        except UserError as error:
            if report_errors and [folder] == paths:
                raise
            if report_errors:
                print(f"fedflat: {folder} skipped: {error}", file=sys.stderr)
    return runs


def read_run(path: Path) -> WatchedRun:
    """Read the state of the run in a folder."""
    from fedflat.experiment.analysis.reopen import primary_model
    from fedflat.experiment.store.run_folder import load_record
    from fedflat.reporting.tables.summary import best_of, series

    record = load_record(path)
    assert record.folder is not None
    metric, model = record.metric, primary_model(record)
    values = [value for _, value in series(record.history, model, metric)]
    last: dict[str, Any] = record.history[-1] if record.history else {}
    last_metrics = last.get("test", {}).get(model, {})
    rounds, total_rounds = int(last.get("round", 0)), record.config.training.rounds
    timing = record.folder.timing()
    seconds_per_round = _seconds_per_round(timing)
    status = current_status(record)
    if status == "running" and _is_silent(path, seconds_per_round * record.config.evaluation.every):
        status = "silent"
    has_estimate = len(timing) > 2 and status == "running"  # the first rounds include the set-up
    return WatchedRun(
        folder=str(path),
        algorithm=record.config.algorithm,
        seed=record.config.seed,
        status=status,
        rounds=rounds,
        of=total_rounds,
        metric=metric,
        value=last_metrics.get(metric),
        best=best_of(values, record.lower_is_better) if values else None,
        loss=last_metrics.get("loss"),
        seconds=record.seconds,
        left=seconds_per_round * (total_rounds - rounds) if has_estimate else None,
        bytes_up=last.get("bytes_up"),
    )


def _seconds_per_round(timing: list[dict[str, Any]]) -> float:
    """Return the seconds per round over the last ten intervals between evaluations; 0 if there is no interval.

    The first interval, which includes the set-up of the first round, counts only if there is no other.

    Args:
        timing: for every evaluation, its ``round`` and the ``seconds`` since the run began.
    """
    recent = (timing[1:] if len(timing) > 2 else timing)[-11:]
    rounds = recent[-1]["round"] - recent[0]["round"] if recent else 0
    return float(recent[-1]["seconds"] - recent[0]["seconds"]) / rounds if rounds > 0 else 0.0


def _is_silent(path: Path, seconds_per_evaluation: float) -> bool:
    """Return whether a run, which perhaps runs on another machine, has not written for a long time."""
    files = [path / name for name in ("config.yaml", "metrics.jsonl", "timing.jsonl")]
    last_written = max(file.stat().st_mtime for file in files if file.exists())
    return time.time() - last_written > max(SILENT_AFTER, 10 * seconds_per_evaluation)


def _render(runs: list[WatchedRun]) -> RenderableType:
    """Return a table with one row per run, and a summary below it."""
    from rich.console import Group
    from rich.text import Text

    from fedflat.experiment.store.run_folder import RunFolder

    if not runs:
        return Text("no run has begun yet", style="dim")
    metrics = {with_unit(run.metric) for run in runs}
    metric = metrics.pop() if len(metrics) == 1 else "metric"
    folders = [Path(run.folder).absolute() for run in runs]
    common = os.path.commonpath([folder.parent for folder in folders])
    columns = ("folder", "algorithm", "seed", "status", "rounds", "", metric, "best", "loss", "sent up", "time", "left")
    rows = [
        (
            folder.relative_to(common),
            run.algorithm,
            run.seed,
            Text(run.status, style=STATUS_STYLE.get(run.status, "")),
            f"{run.rounds} of {run.of}",
            _progress_bar(run.rounds / run.of),
            shown_metric(run.value, run.metric),
            shown_metric(run.best, run.metric),
            shown_metric(run.loss, "loss"),
            shown_bytes(run.bytes_up),
            shown_seconds(run.seconds),
            None if run.left is None else shown_seconds(run.left),
        )
        for run, folder in zip(runs, folders, strict=True)
    ]
    resumable = [run.folder for run in runs if run.status in ("paused", *DEAD_STATUSES)]
    ended = sum(run.has_ended and run.status != "paused" for run in runs)
    summary = f"{ended} of {len(runs)} runs finished"
    if resumable:
        summary += f"; continue with: {RunFolder(Path(resumable[0])).resume_command}"
    grid = table(columns, rows, numeric={"seed", "rounds", *columns[6:]}, optional=("", "best", "sent up", "seed"))
    return Group(grid, Text(summary, style="dim"))


def _progress_bar(fraction: float) -> str:
    return ("█" * round(12 * min(1.0, fraction))).ljust(12, "·")
