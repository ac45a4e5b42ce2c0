"""Progress on stderr: bars on a terminal, plain lines when piped, nothing with --quiet."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from fedflat.cli.shared.screen import screen, shown_bytes, shown_metric, shown_seconds
from fedflat.experiment.callback import RemoteCallback
from fedflat.units import is_share

if TYPE_CHECKING:
    from rich.progress import TaskID

    from fedflat.experiment.callback import RunProgress
    from fedflat.experiment.campaign.estimate import Forecast
    from fedflat.experiment.config import Config
    from fedflat.experiment.store.run_folder import Record

LINES = 10
"""Approximate number of lines per run when piped."""
SECONDS_BETWEEN_LINES = 1.0


class Progress(RemoteCallback):
    """Base class of progress displays; shows nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Restore the terminal."""

    def run_over(self) -> None:
        """A run of several has finished, or was already finished."""

    def foretell(self, forecast: Forecast) -> None:
        """A long run has started; show its estimate."""


@dataclass
class Shown:
    """Last reported state of a run."""

    number: int
    """Number in order of start."""
    first_round: int
    last_round: int
    begun: float
    last_line: float


class Lines(Progress):
    """A plain line at about every tenth of the rounds."""

    def __init__(self, runs: int = 1) -> None:
        self.runs, self.over, self.begun = runs, 0, 0
        self._shown: dict[Config, Shown] = {}

    def run_over(self) -> None:
        self.over += 1
        self.begun = max(self.begun, self.over)

    def foretell(self, forecast: Forecast) -> None:
        print(in_words(forecast), file=sys.stderr, flush=True)

    def began(self, run: RunProgress) -> None:
        self.begun += 1
        now, rounds = time.monotonic(), run.rounds
        self._shown[run.config] = Shown(self.begun, rounds, rounds, now, now)

    def round_done(self, run: RunProgress) -> None:
        if is_fresh(run) or not run.config.is_evaluated(run.rounds):  # otherwise its evaluation follows
            self._look(run)

    def evaluated(self, run: RunProgress) -> None:
        self._look(run)

    def _look(self, run: RunProgress) -> None:
        """Report progress of a run if it has advanced."""
        now, done, total, shown = (
            time.monotonic(),
            run.rounds,
            run.config.training.rounds,
            self._shown[run.config],
        )
        further = done - shown.last_round
        if done == total or further == 0 or further * LINES < total or now - shown.last_line < SECONDS_BETWEEN_LINES:
            return
        shown.last_line, shown.last_round = now, done
        left = (now - shown.begun) / (done - shown.first_round) * (total - done)
        self._say(run, f"round {done}/{total}, {newest_figures(run)}, about {shown_seconds(left)} left")

    def ended(self, run: RunProgress, record: Record) -> None:
        rounds = run.rounds
        self._say(
            run,
            f"{record.status} after {rounds} round{'s' * (rounds != 1)}, {newest_figures(run)}, "
            f"{shown_seconds(record.seconds)}",
        )

    def _say(self, run: RunProgress, text: str) -> None:
        number = f"[{self._shown[run.config].number}/{self.runs}] " if self.runs > 1 else ""
        print(f"{number}{name_of(run)}: {text}", file=sys.stderr, flush=True)


class Bars(Progress):
    """A bar per running run and, for several, an overall bar."""

    def __init__(self, runs: int = 1) -> None:
        from rich import progress

        self._bars = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(bar_width=24),
            progress.MofNCompleteColumn(),
            progress.TextColumn("{task.fields[unit]}", style="dim"),
            progress.TimeRemainingColumn(compact=True),
            progress.TextColumn("{task.fields[figures]}", style="cyan"),
            console=screen(stderr=True),
            transient=True,
        )
        self._all = self._bars.add_task("all runs", total=runs, unit="runs", figures="") if runs > 1 else None
        self._going: dict[Config, TaskID] = {}

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def run_over(self) -> None:
        if self._all is not None:
            self._bars.advance(self._all)

    def foretell(self, forecast: Forecast) -> None:
        self._bars.console.print(in_words(forecast), style="dim", highlight=False)

    def began(self, run: RunProgress) -> None:
        name, rounds = name_of(run), run.config.training.rounds
        self._going[run.config] = self._bars.add_task(
            name, total=rounds, completed=run.rounds, unit="rounds", figures=""
        )

    def round_done(self, run: RunProgress) -> None:
        self._bars.update(self._going[run.config], completed=run.rounds)

    def evaluated(self, run: RunProgress) -> None:
        self._bars.update(self._going[run.config], figures=newest_figures(run))

    def ended(self, run: RunProgress, record: Record) -> None:
        self._bars.remove_task(self._going.pop(run.config))


def progress(silent: bool, runs: int = 1) -> Progress:
    """The progress display for the current stderr."""
    if silent:
        return Progress()
    return Bars(runs) if sys.stderr.isatty() else Lines(runs)


def in_words(forecast: Forecast) -> str:
    """The estimate of a run as text."""
    each = (
        shown_seconds(forecast.seconds_per_round)
        if forecast.seconds_per_round >= 1
        else f"{forecast.seconds_per_round:.2g} s"
    )
    time_needed = f"{forecast.rounds:,} rounds at about {each}: {shown_seconds(forecast.seconds)}"
    sizes = {"data": forecast.data, "per model": forecast.model, "per cohort": forecast.cohort}
    memory = ", ".join(f"{shown_bytes(size)} {name}" for name, size in sizes.items())
    if forecast.states:
        memory += f", up to {shown_bytes(forecast.states)} client state for {forecast.clients:,} clients"
    gpu = f"; {' of '.join(shown_bytes(size) for size in forecast.gpu)} of the GPU" if forecast.gpu else ""
    disk = f"; up to {shown_bytes(forecast.disk)} on disk" if forecast.disk else ""
    return f"plan: {time_needed}; memory: {memory}{gpu}{disk}"


def name_of(run: RunProgress) -> str:
    """Algorithm and seed of a run."""
    return f"{run.config.algorithm}, seed {run.config.seed}"


def newest_figures(run: RunProgress) -> str:
    """The latest metric of the primary model and the training loss, with the round if it is not the current one."""
    if not run.history:
        return "not yet evaluated"
    test, metric = run.history[-1]["test"], run.metric
    value = test.get(run.primary, test["server"]).get(metric)
    loss = run.history[-1]["train_loss"]
    unit = " %" if is_share(metric) else ""
    when = "" if is_fresh(run) else f" after round {run.history[-1]['round']}"
    return f"{metric} {shown_metric(value, metric)}{unit}" + ("" if loss is None else f", train loss {loss:.3g}") + when


def is_fresh(run: RunProgress) -> bool:
    """Whether the latest evaluation is of the current round."""
    return bool(run.history) and run.history[-1]["round"] == run.rounds
