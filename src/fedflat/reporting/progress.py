"""Progress of runs: bars on a terminal and in a notebook, and plain lines on stderr when piped."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING, Any, Self

from fedflat.display import counted, is_share, shown_metric, shown_seconds
from fedflat.experiment.callback import RemoteCallback
from fedflat.reporting.forecast import describe_forecast

if TYPE_CHECKING:
    from rich.progress import TaskID

    from fedflat.experiment.callback import RunProgress
    from fedflat.experiment.campaign.estimate import Forecast
    from fedflat.experiment.config import Config
    from fedflat.experiment.store.run_folder import Record

LINES_PER_RUN = 10
"""Approximate number of lines per run when piped."""
SECONDS_BETWEEN_LINES, SECONDS_BETWEEN_UPDATES = 1.0, 0.2
"""Least time between two lines of a run, and between two updates of the bars in a notebook."""


class Progress(RemoteCallback):
    """Base class of progress displays; shows nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Restore the terminal."""

    def count_run(self) -> None:
        """Count one of several runs as finished, even if it had finished earlier and is not run again."""

    def show_forecast(self, forecast: Forecast) -> None:
        """Show the estimate of a long run."""


class RemainingTime:
    """Estimates the remaining time of one or several runs from the work done here, measured in complete runs.

    Time and work count from the end of the first round, which includes compilation and the start of workers.

    Args:
        runs: number of runs.
        finished: how many of them had finished earlier.
    """

    def __init__(self, runs: int = 1, finished: int = 0) -> None:
        self.counted = 0  # runs that finished, here or earlier
        self._runs, self._ended = runs, finished
        self._ended_work = 0.0
        self._start_time: float | None = None  # when the first round was done
        self._setting_up: set[Config] = set()  # runs that began before, until their own first round is done
        self._rounds: dict[Config, tuple[int, int]] = {}  # of active runs: rounds when it began or was resumed, and now

    def count_run(self) -> None:
        """Count a run as finished, even if it had finished earlier."""
        self.counted += 1

    def update(self, run: RunProgress) -> None:
        """Note the completed rounds of a run that begins or is in progress."""
        if run.config not in self._rounds and self._start_time is None:
            self._setting_up.add(run.config)
        first, _ = self._rounds.get(run.config, (run.rounds, 0))
        if run.rounds > first and run.config in self._setting_up:
            self._setting_up.remove(run.config)
            self._start_time = time.monotonic() if self._start_time is None else self._start_time
            first = run.rounds
        self._rounds[run.config] = first, run.rounds

    def end(self, run: RunProgress) -> None:
        """Note the end of a run."""
        first, _ = self._rounds.pop(run.config)
        self._ended += 1
        self._ended_work += 1 - first / run.config.training.rounds

    def text(self) -> str:
        """Return the remaining time as text; empty before any work is done."""
        if self._start_time is None:
            return ""
        active = [(first, now, config.training.rounds) for config, (first, now) in self._rounds.items()]
        done = self._ended_work + sum((now - first) / total for first, now, total in active)
        remaining = self._runs - max(self.counted, self._ended) - sum(now / total for _, now, total in active)
        if done <= 0:
            return ""
        return f"about {shown_seconds((time.monotonic() - self._start_time) / done * max(0.0, remaining))} left"


@dataclass
class ReportedRun:
    """The last reported progress of a run."""

    number: int
    """Number of the run, counted from 1 in the order in which runs started."""
    last_round: int
    """Number of completed rounds when the last line was printed."""
    line_time: float
    """When the last line was printed, as of ``time.monotonic``."""
    remaining: RemainingTime = field(default_factory=RemainingTime)


class Lines(Progress):
    """Progress display that prints a plain line to stderr at about every tenth of a run's rounds."""

    def __init__(self, runs: int = 1, finished: int = 0) -> None:
        self.runs, self.started = runs, finished
        self._reported: dict[Config, ReportedRun] = {}
        self._all_runs = RemainingTime(runs, finished)

    def count_run(self) -> None:
        self._all_runs.count_run()
        self.started = max(self.started, self._all_runs.counted)  # a run of another process does not call ``began``

    def show_forecast(self, forecast: Forecast) -> None:
        print(describe_forecast(forecast), file=sys.stderr, flush=True)

    def began(self, run: RunProgress) -> None:
        """Start to report a run; a resumed one has completed some rounds already."""
        self.started += 1
        self._all_runs.update(run)
        reported = ReportedRun(self.started, last_round=run.rounds, line_time=time.monotonic())
        reported.remaining.update(run)
        self._reported[run.config] = reported

    def round_done(self, run: RunProgress) -> None:
        """Report a finished round if a line is due."""
        self._all_runs.update(run)
        # A round that will be evaluated is reported after its evaluation.
        if is_evaluation_current(run) or not run.config.is_evaluated(run.rounds):
            self._report_if_due(run)

    def evaluated(self, run: RunProgress) -> None:
        self._report_if_due(run)

    def _report_if_due(self, run: RunProgress) -> None:
        """Print a line if a tenth of the rounds and a second have passed since the last one.

        The last round is reported by ``ended`` instead.
        """
        now, done, total = time.monotonic(), run.rounds, run.config.training.rounds
        reported = self._reported[run.config]
        reported.remaining.update(run)
        new_rounds = done - reported.last_round
        is_early = new_rounds == 0 or new_rounds * LINES_PER_RUN < total
        if done == total or is_early or now - reported.line_time < SECONDS_BETWEEN_LINES:
            return
        reported.line_time, reported.last_round = now, done
        left = reported.remaining.text()
        self._print(run, ", ".join(filter(None, (f"round {done}/{total}", latest_metrics(run), left))))

    def ended(self, run: RunProgress, record: Record) -> None:
        rounds = counted(run.rounds, "round")
        self._all_runs.end(run)
        self._print(run, f"{record.status} after {rounds}, {latest_metrics(run)}, {shown_seconds(record.seconds)}")

    def _print(self, run: RunProgress, text: str) -> None:
        number = ""
        if self.runs > 1:
            number = f"[{self._reported[run.config].number}/{self.runs}] "
            left = self._all_runs.text()
            text += f"; all runs: {left}" if left and self.started < self.runs else ""
        print(f"{number}{run_name(run)}: {text}", file=sys.stderr, flush=True)


@dataclass
class RunBar:
    """The bar of a run in progress."""

    task: TaskID
    remaining: RemainingTime = field(default_factory=RemainingTime)


class Bars(Progress):
    """Progress display on a terminal: a bar for each run in progress and, for several runs, an overall bar."""

    def __init__(self, runs: int = 1, finished: int = 0) -> None:
        """Create the bars; ``runs`` is the number of runs to display, of which ``finished`` ended earlier."""
        from rich import progress
        from rich.console import Console
        from rich.table import Column

        # Bar and metrics share the rest of the line; ``width`` is their least width. Long names are wrapped.
        self._bars = progress.Progress(
            progress.TextColumn("{task.description}", table_column=Column(overflow="fold")),
            progress.BarColumn(bar_width=None, table_column=Column(ratio=1, width=4)),
            progress.MofNCompleteColumn(table_column=Column(no_wrap=True)),
            progress.TextColumn("{task.fields[unit]}", style="dim"),
            progress.TextColumn("{task.fields[left]}"),
            progress.TextColumn(
                "{task.fields[metrics]}", style="cyan", table_column=Column(ratio=3, width=16, no_wrap=True)
            ),
            expand=True,
            console=Console(stderr=True, highlight=False),
            transient=True,
            redirect_stdout=sys.stdout.isatty(),  # otherwise text printed into a file would go to stderr
        )
        self._all_runs: TaskID | None = None
        if runs > 1:
            self._all_runs = self._bars.add_task("all runs", total=runs, unit="runs", left="", metrics="")
        self._run_bars: dict[Config, RunBar] = {}
        self._remaining = RemainingTime(runs, finished)

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def count_run(self) -> None:
        self._remaining.count_run()
        self._update_all_runs()

    def show_forecast(self, forecast: Forecast) -> None:
        self._bars.console.print(describe_forecast(forecast), style="dim", highlight=False)

    def began(self, run: RunProgress) -> None:
        """Add the bar of a run; a resumed one has completed some rounds already."""
        self._remaining.update(run)
        total = run.config.training.rounds
        task = self._bars.add_task(run_name(run), total=total, completed=run.rounds, unit="rounds", left="", metrics="")
        self._run_bars[run.config] = RunBar(task)
        self._run_bars[run.config].remaining.update(run)

    def round_done(self, run: RunProgress) -> None:
        bar = self._run_bars[run.config]
        for remaining in (self._remaining, bar.remaining):
            remaining.update(run)
        self._bars.update(bar.task, completed=run.rounds, left=bar.remaining.text())
        self._update_all_runs()

    def evaluated(self, run: RunProgress) -> None:
        self._bars.update(self._run_bars[run.config].task, metrics=latest_metrics(run))

    def ended(self, run: RunProgress, record: Record) -> None:
        bar = self._run_bars.pop(run.config)
        self._bars.remove_task(bar.task)
        self._remaining.end(run)
        self._update_all_runs()

    def _update_all_runs(self) -> None:
        """Update the overall bar."""
        if self._all_runs is not None:
            self._bars.update(self._all_runs, completed=self._remaining.counted, left=self._remaining.text())


class NotebookBars(Progress):
    """Progress display in a notebook cell: a bar for each run in progress and, for several runs, an overall bar.

    The bars disappear at the end.
    """

    def __init__(self, runs: int = 1) -> None:
        """Prepare the display of ``runs`` runs."""
        self.runs, self.finished = runs, 0
        self._bars: dict[Config, str] = {}  # HTML by run
        self._output: Any = None  # IPython's handle of the displayed HTML
        self._last_update = 0.0

    def __enter__(self) -> Self:
        """Add an output to the cell, which is empty at first."""
        from IPython.display import HTML, display

        self._output = display(HTML(""), display_id=True)
        return self

    def __exit__(self, *_: object) -> None:
        """Remove all bars."""
        self._bars.clear()
        self.runs = 1  # a single run has no overall bar
        self._update(now=True)

    def count_run(self) -> None:
        self.finished += 1
        self._update()

    def began(self, run: RunProgress) -> None:
        self._show(run)

    def round_done(self, run: RunProgress) -> None:
        self._show(run)

    def evaluated(self, run: RunProgress) -> None:
        self._show(run)

    def ended(self, run: RunProgress, record: Record) -> None:
        self._bars.pop(run.config, None)

    def _show(self, run: RunProgress) -> None:
        """Update the bar of a run."""
        rounds = run.config.training.rounds
        self._bars[run.config] = _html_bar(run_name(run), run.rounds, rounds, f"rounds, {latest_metrics(run)}")
        self._update()

    def _update(self, now: bool = False) -> None:
        """Write all bars to the cell, unless they were written recently; ``now`` writes them in any case."""
        from IPython.display import HTML

        if now or time.monotonic() - self._last_update >= SECONDS_BETWEEN_UPDATES:
            self._last_update = time.monotonic()
            overall = [_html_bar("all runs", self.finished, self.runs, "runs")] if self.runs > 1 else []
            self._output.update(HTML("<br>".join([*overall, *self._bars.values()])))


def _html_bar(name: str, done: int, total: int, text: str) -> str:
    """Return a progress bar with its name before and a text after it."""
    return f'{escape(name)} <progress value="{done}" max="{total}"></progress> {done}/{total} {escape(text)}'


def progress(silent: bool, runs: int = 1, finished: int = 0, *, lines_when_piped: bool = True) -> Progress:
    """Return the progress display for the current environment: a notebook, a terminal, or a stderr that is piped.

    Args:
        silent: show nothing.
        runs: number of runs that will follow.
        finished: how many of them finished earlier, in any position.
        lines_when_piped: print lines if stderr is neither a terminal nor a notebook; otherwise show nothing there.
    """
    if silent:
        return Progress()
    if notebook_shell() is not None:
        return NotebookBars(runs)
    if sys.stderr.isatty():
        return Bars(runs, finished)
    return Lines(runs, finished) if lines_when_piped else Progress()


def run_name(run: RunProgress) -> str:
    """Return the algorithm and seed of a run."""
    return f"{run.config.algorithm}, seed {run.config.seed}"


def latest_metrics(run: RunProgress) -> str:
    """Return the primary model's latest metric, the mean loss of local steps and a private run's epsilon as text.

    The round is added if it is earlier than the current one, and the model's name if the run has averages.
    """
    if not run.history:
        return "not yet evaluated"
    evaluation, metric = run.history[-1], run.metric
    test, train_loss = evaluation["test"], evaluation["train_loss"]
    model = run.primary if run.primary in test else "server"  # an average may not have started yet
    name = "" if run.primary == "server" else f"{model} "
    text = f"{name}{metric} {shown_metric(test[model].get(metric), metric)}"
    if is_share(metric):
        text += " %"
    if train_loss is not None:
        text += f", local train loss {train_loss:.3g}"
    if "epsilon" in evaluation:
        text += f", epsilon {evaluation['epsilon']:.3g}"
    return text if is_evaluation_current(run) else f"{text} after round {evaluation['round']}"


def is_evaluation_current(run: RunProgress) -> bool:
    """Return whether the latest evaluation is of the current round."""
    return bool(run.history) and run.history[-1]["round"] == run.rounds


def notebook_shell() -> Any | None:
    """Return the IPython shell of the running notebook, or None outside notebooks."""
    if "IPython" not in sys.modules:
        return None
    from IPython import get_ipython

    shell = get_ipython()  # IPython in a terminal has a shell, too, but no kernel
    return shell if shell is not None and hasattr(shell, "kernel") else None
