"""fedflat watch: follow runs of another process."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from fedflat.cli.shared.flags import JSON
from fedflat.cli.shared.screen import print_json, screen, shown_bytes, shown_metric, shown_seconds, table, with_unit
from fedflat.errors import UserError

if TYPE_CHECKING:
    from rich.console import RenderableType

SILENT_AFTER = 120.0
"""Seconds without output (in addition to ten evaluation intervals) after which a running run counts as silent."""


@dataclass(frozen=True)
class Sight:
    """The state of a run, from its files."""

    folder: str
    algorithm: str
    seed: int
    status: str
    rounds: int
    of: int
    metric: str
    value: float | None
    best: float | None
    loss: float | None
    seconds: float
    left: float | None
    bytes_up: float | None

    @property
    def over(self) -> bool:
        """Whether the run has ended."""
        from fedflat.experiment.stopping import ENDED_STATUSES

        return self.status in (*ENDED_STATUSES, "paused")


def watch(
    runs: list[Path] = typer.Argument(
        metavar="RUNS...", help="run folders, or folders that contain runs; new runs are picked up"
    ),
    every: float = typer.Option(2.0, "--interval", min=0.1, metavar="SECONDS", help="polling interval"),
    once: bool = typer.Option(False, "--once", help="print the current state and exit"),
    as_json: bool = JSON,
) -> None:
    """Follow runs of another process: rounds, metric, loss and remaining time; ends when all have finished.

    Read-only.

    Example: fedflat watch runs --once
    """
    for path in runs:
        if not path.is_dir():
            raise UserError(f"{path} does not exist; expected a run folder, or a folder that contains runs")
    sights, console = look(runs, _tell), screen()
    if as_json:
        print_json([vars(sight) for sight in sights])
        return
    if once or not console.is_terminal:
        console.print(_shown(sights))
        while not once and not _all_over(sights):
            time.sleep(every)
            before, sights = sights, look(runs)
            if sights != before:
                console.print(_shown(sights))
        return
    from rich.live import Live

    with Live(_shown(sights), console=console, auto_refresh=False) as live:
        try:
            while not _all_over(sights):
                time.sleep(every)
                sights = look(runs)
                live.update(_shown(sights), refresh=True)
        except KeyboardInterrupt:
            return


def _all_over(sights: list[Sight]) -> bool:
    return bool(sights) and all(sight.over or sight.status == "silent" for sight in sights)


def _tell(folder: Path, why: UserError) -> None:
    print(f"fedflat: {folder} skipped: {why}", file=sys.stderr)


def look(paths: list[Path], unread: Callable[[Path, UserError], None] = lambda folder, why: None) -> list[Sight]:
    """The state of every run in or below these folders; unreadable ones are retried."""
    from fedflat.experiment.store.run_folder import RunFolder

    folders = dict.fromkeys(
        folder
        for path in paths
        for folder in ([path] if RunFolder(path).exists else sorted(f.parent for f in path.rglob("config.yaml")))
    )
    found = []
    for folder in folders:
        try:
            found.append(sight_of(folder))
        except UserError as why:
            unread(folder, why)
    return found


def sight_of(path: Path, now: float | None = None) -> Sight:
    """The state of one run."""
    from fedflat.experiment.analysis.reopen import primary_model
    from fedflat.experiment.store.run_folder import load_record
    from fedflat.reporting.result import Result
    from fedflat.reporting.tables.summary import series

    record = load_record(path)
    assert record.folder is not None
    metric, model = Result(record).metric, primary_model(record)
    points, losses = series(record.history, model, metric), series(record.history, model, "loss")
    end: dict[str, Any] = record.history[-1] if record.history else {}
    rounds, of = int(end.get("round", 0)), record.config.training.rounds
    pace = _pace(record.folder.timing())
    return Sight(
        folder=str(path),
        algorithm=record.config.algorithm,
        seed=record.config.seed,
        status=_status(record.status, path, pace * record.config.evaluation.every, time.time() if now is None else now),
        rounds=rounds,
        of=of,
        metric=metric,
        value=points[-1][1] if points else None,
        best=max(value for _, value in points) if points else None,
        loss=losses[-1][1] if losses else None,
        seconds=record.seconds,
        left=pace * (of - rounds) if pace and record.status == "running" else None,
        bytes_up=end.get("bytes_up"),
    )


def _pace(timing: list[dict[str, Any]]) -> float:
    """Seconds per round over the last ten evaluations."""
    late = timing[-11:]
    rounds = late[-1]["round"] - late[0]["round"] if late else 0
    return float(late[-1]["seconds"] - late[0]["seconds"]) / rounds if rounds > 0 else 0.0


def _status(said: str, path: Path, between: float, now: float) -> str:
    """The run's status; a killed run still reports that it is running."""
    if said != "running":
        return said
    written = max(
        (path / name).stat().st_mtime
        for name in ("config.yaml", "metrics.jsonl", "timing.jsonl")
        if (path / name).exists()
    )
    return "silent" if now - written > max(SILENT_AFTER, 10 * between) else said


def _shown(sights: list[Sight]) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    if not sights:
        return Text("no run has begun yet", style="dim")
    columns = (
        "run",
        "seed",
        "status",
        "rounds",
        "",
        with_unit(sights[0].metric),
        "best",
        "loss",
        "sent up",
        "time",
        "left",
    )
    rows = [
        (
            *(sight.algorithm, sight.seed, Text(sight.status, style=STYLES.get(sight.status, ""))),
            *(f"{sight.rounds} of {sight.of}", _bar(sight)),
            *(
                shown_metric(sight.value, sight.metric),
                shown_metric(sight.best, sight.metric),
                shown_metric(sight.loss, "loss"),
            ),
            *(
                shown_bytes(sight.bytes_up),
                shown_seconds(sight.seconds),
                None if sight.left is None else shown_seconds(sight.left),
            ),
        )
        for sight in sights
    ]
    from fedflat.experiment.store.run_folder import RunFolder

    over = sum(sight.over for sight in sights)
    silent = [sight.folder for sight in sights if sight.status == "silent"]
    words = f"{over} of {len(sights)} runs finished" + (
        f"; continue with: {RunFolder(Path(silent[0])).goes_on}" if silent else ""
    )
    return Group(table(columns, rows, numbers={"seed", "rounds", *columns[5:]}), Text(words, style="dim"))


STYLES = {
    "finished": "green",
    "stopped": "green",
    "paused": "yellow",
    "running": "cyan",
    "silent": "yellow",
    "diverged": "bold red",
}


def _bar(sight: Sight, width: int = 12) -> str:
    done = round(width * min(1.0, sight.rounds / sight.of))
    return "█" * done + "·" * (width - done)
