"""Progress: lines when piped, bars on a terminal and in a notebook, nothing if silent."""

from __future__ import annotations

import re
from functools import partial
from types import SimpleNamespace

import pytest
from rich.console import Console

import fedflat
from fedflat.experiment.config import Config
from fedflat.reporting import progress as progress_module
from fedflat.reporting.progress import Bars, Lines, NotebookBars, Progress, latest_metrics, progress


def run_at(
    done: int,
    rounds: int = 100,
    loss: float | None = 0.25,
    primary: str = "server",
    evaluated: int | None = None,
    every: int = 1,
    algorithm: str = "fedavg",
) -> SimpleNamespace:
    number = done if evaluated is None else evaluated
    history = [{"round": number, "train_loss": loss, "test": {"server": {"accuracy": 0.5, "loss": 1.0}}}]
    config = Config(algorithm=algorithm, training={"rounds": rounds}, evaluation={"every": every})
    return SimpleNamespace(
        config=config,
        rounds=done,
        history=history,
        primary=primary,
        metric="accuracy",
    )


def go_through(shown: Progress, rounds: int) -> None:
    shown.began(run_at(0, rounds))
    for done in range(1, rounds + 1):
        shown.round_done(run_at(done, rounds, evaluated=done - 1))
        shown.evaluated(run_at(done, rounds))
    shown.ended(run_at(rounds, rounds), SimpleNamespace(status="finished", seconds=3.0))
    shown.count_run()


@pytest.fixture
def clock(monkeypatch):
    """A clock that advances by hand, or by ``step`` at every call."""
    state = SimpleNamespace(now=0.0, step=0.0)

    def look() -> float:
        state.now += state.step
        return state.now

    monkeypatch.setattr(progress_module, "time", SimpleNamespace(monotonic=look))
    return state


def test_a_line_at_about_every_tenth_of_the_rounds(capsys, clock):
    clock.step = 2.0
    go_through(Lines(), 100)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 10
    assert lines[0] == "fedavg, seed 0: round 10/100, accuracy 50.00 %, local train loss 0.25, about 3 min 20 s left"
    assert lines[-1] == "fedavg, seed 0: finished after 100 rounds, accuracy 50.00 %, local train loss 0.25, 3.0 s"


def test_metrics_of_an_earlier_round_name_it(capsys, clock):
    clock.step = 2.0
    lines = Lines()
    lines.began(run_at(0, 4, every=2))
    lines.round_done(run_at(1, 4, evaluated=0, every=2))
    lines.round_done(run_at(2, 4, evaluated=0, every=2))  # evaluated next
    lines.evaluated(run_at(2, 4, every=2))
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 2
    assert "round 1/4, accuracy 50.00 %, local train loss 0.25 after round 0" in told[0] and "left" not in told[0]
    assert "round 2/4, accuracy 50.00 %, local train loss 0.25, about" in told[1]


def test_at_most_one_line_per_second(capsys, clock):
    clock.step = 0.018  # 100 rounds take less than two seconds
    go_through(Lines(), 100)
    assert len(capsys.readouterr().err.splitlines()) == 2


def test_runs_are_numbered_in_a_comparison(capsys, clock):
    lines = Lines(2)
    go_through(lines, 1)
    go_through(lines, 1)
    told = capsys.readouterr().err.splitlines()
    assert told[0].startswith("[1/2] fedavg, seed 0: finished after 1 round,") and told[1].startswith("[2/2] ")


@pytest.mark.parametrize(("runs", "finished"), [(3, 0), (5, 2)])
def test_lines_of_a_comparison_show_the_time_left_for_all_runs(capsys, clock, runs, finished):
    lines = Lines(runs, finished)
    lines.began(run_at(0, 2))
    clock.now = 100.0
    lines.round_done(run_at(1, 2))  # includes the set-up
    clock.now = 110.0
    lines.ended(run_at(2, 2), SimpleNamespace(status="finished", seconds=20.0))  # 10 s per round, and 4 are left
    told = capsys.readouterr().err.splitlines()
    assert "left" not in told[0] and told[1].endswith("; all runs: about 40.0 s left")
    assert told[1].startswith(f"[{finished + 1}/{runs}]")


def test_bars_show_rounds_and_metrics(capsys, monkeypatch):
    monkeypatch.setattr("rich.console.Console", partial(Console, force_terminal=True, width=160))
    with Bars(2) as bars:
        go_through(bars, 3)
        bars.began(run_at(0, 3))
        bars.round_done(run_at(1, 3))
        bars.evaluated(run_at(1, 3))
        bars._bars.refresh()
    told = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().err)
    assert "all runs" in told and "1/2 runs" in told and "1/3 rounds" in told and "accuracy 50.00 %" in told


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("algorithm", ["scaffold+wima", "scaffold+wima(window=4)+swa(start=0.3,every=2)+ema"])
def test_bars_keep_the_rounds_and_the_metric_in_a_narrow_terminal(capsys, monkeypatch, clock, width, algorithm):
    monkeypatch.setattr("rich.console.Console", partial(Console, force_terminal=True, width=width))
    with Bars() as bars:
        for done in (0, 1, 40):
            clock.now += 100.0
            run = run_at(done, 300, primary="wima", algorithm=algorithm)
            bars.round_done(run) if done else bars.began(run)
            bars.evaluated(run)
        bars._bars.refresh()
    told = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().err)
    assert "━ " in told and " 40/300 rounds about 11 min 7 s left server accuracy" in told
    assert max(map(len, re.split(r"[\r\n]+", told))) <= width


def test_runs_found_finished_do_not_shorten_the_remaining_time(capsys, monkeypatch, clock):
    """Two of six runs were finished before, and a third is resumed in the middle."""
    monkeypatch.setattr("rich.console.Console", partial(Console, force_terminal=True, width=160))
    with Bars(6) as bars:
        bars.count_run()
        bars.count_run()
        bars.began(run_at(5, 10))
        clock.now = 100.0
        bars.round_done(run_at(6, 10))  # includes the set-up
        clock.now = 110.0
        bars.round_done(run_at(7, 10))  # 10 s per round, with 3 rounds left in this run and 33 in all
        bars._bars.refresh()
        halfway = capsys.readouterr().err
        clock.now = 140.0
        bars.ended(run_at(10, 10), SimpleNamespace(status="finished", seconds=3.0))
        bars.count_run()
        bars._bars.refresh()
    assert "about 30.0 s left" in halfway and "about 5 min 30 s left" in halfway
    assert "about 5 min 0 s left" in capsys.readouterr().err


def test_the_display_depends_on_stderr(monkeypatch):
    assert type(progress(silent=True)) is Progress
    assert type(progress(silent=False)) is Lines
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert type(progress(silent=False)) is Bars

    assert type(progress(silent=False, lines_when_piped=False)) is Bars
    monkeypatch.setattr(progress_module, "notebook_shell", object)
    assert type(progress(silent=False)) is NotebookBars


def test_bars_in_a_notebook(clock, monkeypatch):
    pytest.importorskip("IPython")
    clock.step = 1.0
    shown = []
    output = SimpleNamespace(update=lambda page: shown.append(page.data))
    monkeypatch.setattr("IPython.display.display", lambda *_, **options: output if options["display_id"] else None)
    with NotebookBars(2) as bars:
        go_through(bars, 3)
        bars.began(run_at(1, 3))
    assert '<progress value="1" max="3"></progress> 1/3 rounds, accuracy 50.00 %, local train loss 0.25' in shown[1]
    assert shown[-2].startswith('all runs <progress value="1" max="2"></progress> 1/2 runs<br>fedavg, seed 0 ')
    assert shown[-1] == ""


@pytest.mark.parametrize("is_shown", [True, False])
def test_python_shows_bars_on_a_terminal_unless_disabled(is_shown, tmp_path, monkeypatch):
    ended = []

    class Recorded(Progress):
        def ended(self, run, record):
            ended.append("run")

        def count_run(self):
            ended.append("counted")

    monkeypatch.setattr(progress_module, "Bars", lambda *_: Recorded())
    small = {"model": "mlp(hidden=2)", "rounds": 1, "local_steps": 1, "workers": 1}
    fedflat.run(**small, out=tmp_path / "run")  # stderr is not a terminal
    assert not ended
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    fedflat.run(**small, progress=is_shown)
    fedflat.compare("fedavg", seeds=1, **small, progress=is_shown)
    fedflat.sweep({"base": small, "grid": {"seed": [0]}}, out=tmp_path / "sweep", progress=is_shown)
    assert ended == (["run", *["run", "counted"] * 2] if is_shown else [])


def test_silent_progress_prints_nothing(capsys):
    with progress(silent=True, runs=2) as shown:
        go_through(shown, 3)
    assert capsys.readouterr() == ("", "")


def test_metrics_of_a_run_with_averages_name_the_model():
    run = run_at(0, loss=None, primary="wima")
    assert latest_metrics(run) == "server accuracy 50.00 %"  # the average has not started
    run.history[-1]["test"]["wima"] = {"accuracy": 0.75}
    assert latest_metrics(run) == "wima accuracy 75.00 %"
