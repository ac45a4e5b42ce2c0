"""Estimated memory, disk and time against what runs actually use."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

import pytest
import torch

from fedflat.bench.setting import RandomImages
from fedflat.engines.gpu.engine import LaneEngine
from fedflat.engines.gpu.lane import RESERVE
from fedflat.engines.problem.problem import Problem
from fedflat.experiment.campaign import estimate
from fedflat.experiment.campaign.disk_space import run_disk
from fedflat.experiment.campaign.estimate import (
    Forecast,
    GpuForecast,
    ProbedSpeed,
    forecast,
    probe,
    remaining_work,
)
from fedflat.experiment.campaign.sweep import Sweep, plan_sweep, run_sweep
from fedflat.experiment.campaign.sweep_file import read_sweep
from fedflat.experiment.config import Config, parse_config
from fedflat.experiment.run import Run
from fedflat.experiment.setup import engine as setup_engine
from fedflat.experiment.store.checkpoint import SECONDS_BETWEEN, CheckpointInterval
from fedflat.reporting.forecast import ForecastCallback, describe_forecast

SMALL = {
    "model": "mlp(hidden=8)",
    "data": {"clients": 12, "partition": "iid"},
    "federation": {"clients_per_round": 4},
    "training": {"rounds": 40, "local_steps": 1},
    "evaluation": {"every": 40},
    "engine": {"workers": 1},
}
FAST = ProbedSpeed(step=0.0, example=0.0, at_once=1, clients=12, examples=1000, tested=100)


def run_with_forecasts(algorithm: str, folder: Path | None = None, long: float = 0.0) -> tuple[list[Forecast], Run]:
    """Execute a run; returns the forecasts that it showed and the run."""
    forecasts: list[Forecast] = []
    run = Run(
        parse_config({**SMALL, "algorithm": algorithm}), folder, callbacks=(ForecastCallback(forecasts.append, long),)
    )
    run.execute()
    return forecasts, run


def test_a_forecast_is_shown_once(tmp_path: Path) -> None:
    forecasts, run = run_with_forecasts("scaffold+wima", tmp_path / "run")
    (shown,) = forecasts
    size = 4 * run.problem.layout.size
    assert shown.model == size
    assert shown.states == 12 * size
    assert shown.cohort == 4 * 3 * size  # displacement, control variate, and its change
    assert shown.rounds == 37
    assert shown.seconds == pytest.approx(37 * shown.seconds_per_round)
    rows = tmp_path / "run" / "state" / "clients" / "rows.bin"
    assert rows.stat().st_size <= 2 * shown.states <= shown.disk
    written = sum(file.stat().st_size for file in (tmp_path / "run").rglob("*") if file.is_file())
    assert 0.5 * written < shown.disk < 2 * written


def test_stateless_runs_without_a_folder_need_no_disk() -> None:
    (shown,), _ = run_with_forecasts("fedavg")
    assert shown.states == shown.disk == 0
    assert shown.gpu is None


def test_only_possible_participants_are_counted() -> None:
    many = {**SMALL, "algorithm": "scaffold", "data": {"clients": 10**6, "partition": "virtual"}}
    run = Run(parse_config(many))
    shown = forecast(run, 1.0)
    assert shown.clients == 4 * 40 and shown.states == 4 * 40 * 4 * run.problem.layout.size
    whole = run_disk(run.config, run.problem.layout.size, 0, 10**6)
    assert (
        whole
        == run_disk(run.config, run.problem.layout.size, 0, 4 * 40)
        != run_disk(run.config, run.problem.layout.size, 0, 4)
    )


def test_short_runs_have_no_forecast() -> None:
    assert run_with_forecasts("fedavg", long=1000.0)[0] == []


def test_client_statistics_are_counted() -> None:
    own = {
        **SMALL,
        "model": "resnet20(norm=batch)",
        "training": {"rounds": 3, "local_steps": 1, "batch_size": 4, "statistics": "own"},
    }
    run = Run(parse_config(own), data=RandomImages(size=48, side=8).dataset())
    run._open()
    assert forecast(run, 1.0).states == 12 * 4 * run.problem.buffer_layout.size


def test_describe_forecast() -> None:
    gpu = GpuForecast(2 * 10**9, 14 * 10**10, "tf32", "1.4 to 1.7", lanes=10, lane=10**8, fitting=1234)
    expected = Forecast(1000, 2000, 3000, 4_000_000, 1000, 5000, 7200.0, 0.05, 144_000, gpu)
    text = describe_forecast(expected)
    for number in ("144,000", "0.05 s", "2 h", "2 GB", "140 GB", "4 MB", "1,000"):
        assert number in text
    assert "10 lanes of 100 MB, 1,234 clients fit at once, precision tf32" in text
    assert text.endswith("bf16 would be faster (1.4 to 1.7 times as fast on an H200): --set engine.precision=bf16")
    for speedup, end in (("", "faster: --set engine.precision=bf16"), (None, "precision tf32")):
        assert describe_forecast(replace(expected, gpu=replace(gpu, bf16_speedup=speedup))).endswith(end)


@pytest.mark.parametrize(
    ("lanes", "precision", "expected"),
    [
        (4, "tf32", (4 + 8, "1.4 to 1.7")),
        (3, "tf32", (3, "1.4 to 1.7")),
        (4, "float32", (12, "")),
        (4, "bf16", (12, None)),
    ],
)
def test_the_forecast_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, lanes: int, precision: str, expected: tuple[int, str | None]
) -> None:
    """Lanes of 90 bytes, four if all of them fit, and 10 bytes per client in the cohort."""
    answers = {"max_memory_reserved": 500, "empty_cache": None, "mem_get_info": (RESERVE + 899, 10**9)}
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda answer=answer: answer)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: not including_emulation)
    engine = LaneEngine(Run(parse_config(SMALL)).problem)
    engine.lanes, engine.is_short_of_memory = [SimpleNamespace(memory=90)] * lanes, lanes < 4  # type: ignore[list-item]
    run = SimpleNamespace(engine=engine, config=parse_config({"model": "cnn", "engine": {"precision": precision}}))
    shown = estimate._gpu_forecast(run, 10)  # type: ignore[arg-type]
    assert (shown.fitting, shown.bf16_speedup) == expected
    assert (shown.lanes, shown.lane, shown.reserved, shown.total) == (lanes, 90, 500, 10**9)


def test_probes_are_compiled_if_the_run_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A probe has fewer rounds and steps, which alone would not be worth compiling."""
    probed: list[str] = []
    monkeypatch.setattr(setup_engine, "compiler", lambda: "c++")
    monkeypatch.setattr(Problem, "suits_kernels", lambda *_: True)
    monkeypatch.setattr(Problem, "use_kernels", lambda problem, _: setattr(problem, "kernel_source", object()))
    monkeypatch.setattr(estimate, "_execute_quietly", lambda run, rounds: probed.append(run.config.engine.compile))
    monkeypatch.setattr(estimate, "probe", lambda made: probed.append(made.engine.compile) or FAST)
    for rounds in (2, 1000):
        estimate.measure_speed(parse_config({**SMALL, "training": {"rounds": rounds, "local_steps": 2}}))
    assert probed == ["off", "off", "on", "on"]


def test_probes_keep_one_problem_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    problems: WeakSet[Problem] = WeakSet()
    alive = []

    class CountedRun(Run):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            alive.append(len(problems))
            super().__init__(*arguments, **options)
            problems.add(self.problem)

    monkeypatch.setattr(estimate, "Run", CountedRun)
    gc.disable()  # Python may otherwise collect a probe that was left in a cycle of references
    try:
        lanes = {"engine": {"name": "lanes", "device": "cpu"}}
        assert estimate.measure_speed(parse_config({**SMALL, **lanes})).whole_round
    finally:
        gc.enable()
    assert alive == [0, 0, 0]


def test_checkpoints_use_a_limited_fraction_of_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved: list[int] = []
    real = Run._checkpoint
    monkeypatch.setattr(Run, "_checkpoint", lambda run: (saved.append(run.server.rounds), real(run))[1])
    monkeypatch.setattr("fedflat.experiment.store.checkpoint.SECONDS_BETWEEN", float("inf"))
    run_with_forecasts("fedavg", tmp_path / "fast")
    assert saved == [40]
    monkeypatch.setattr("fedflat.experiment.store.checkpoint.SECONDS_BETWEEN", 0.0)
    monkeypatch.setattr("fedflat.experiment.store.checkpoint.MAX_TIME_FRACTION", float("inf"))
    run_with_forecasts("fedavg", tmp_path / "slow")
    assert saved[1:] == list(range(1, 41))
    saved.clear()
    monkeypatch.setattr("fedflat.experiment.store.checkpoint.MAX_TIME_FRACTION", 1e-6)
    run_with_forecasts("fedavg", tmp_path / "dear")
    assert saved == [1, 40]


def test_slow_checkpoints_are_less_frequent(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("fedflat.experiment.store.checkpoint.time.monotonic", lambda: now)
    open_, asked = CheckpointInterval(None), CheckpointInterval(7)
    assert not open_.is_due(10)
    now += SECONDS_BETWEEN
    assert open_.is_due(10) and open_.is_due(15)
    for pace in (open_, asked):
        with pace.measured():
            now += 2
    now += 10
    assert not open_.is_due(20)  # two seconds in every twelve would be too much
    assert asked.is_due(21) and not asked.is_due(20)
    now += 30
    assert open_.is_due(30)


def configured(algorithm: str = "fedavg", **training: object) -> Config:
    clients = {"data": {"clients": 100}, "federation": {"clients_per_round": 10}}
    return parse_config({"algorithm": algorithm, **clients, "training": {"batch_size": 50, **training}})


def test_time_counts_steps_passes_and_evaluations() -> None:
    """Clients with 500 images take 50 steps in 5 epochs with batch size 50; ten on two cores take five waves."""
    speed = ProbedSpeed(step=0.01, example=0.0001, at_once=2, clients=100, examples=50000, tested=10000)
    assert speed.seconds(configured(), 100) == pytest.approx(100 * 5 * 50 * 0.01 + 100 * 10000 * 0.0001)
    assert speed.seconds(configured("fedsam"), 100) == pytest.approx(100 * 5 * 50 * 0.02 + 100 * 10000 * 0.0001)
    assert speed.seconds(configured(local_steps=2), 100) == pytest.approx(100 * 5 * 2 * 0.01 + 100 * 10000 * 0.0001)


def test_a_round_of_asynchronous_training_is_a_full_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    speed = ProbedSpeed(step=0.01, example=0.0, at_once=2, clients=100, examples=50000, tested=100)
    buffered = configured(local_steps=5).changed(federation={"policy": "fedbuff(buffer=4)"})
    assert speed.seconds(buffered, 10) == pytest.approx(10 * 2 * 5 * 0.01)
    probed: list[Config] = []
    monkeypatch.setattr(estimate, "_build_quietly", probed.append)
    with pytest.raises(TypeError):  # nothing is built
        probe(buffered)
    assert probed[0].federation.policy == "wait", "its only client would otherwise fill the buffer alone"


def test_evaluations_of_averages_and_final_rounds_are_counted() -> None:
    speed = ProbedSpeed(step=0.0, example=0.001, at_once=1, clients=100, examples=50000, tested=1000)
    often = configured("fedavg+swa+ema+wima", rounds=10000)
    often = often.model_copy(update={"evaluation": often.evaluation.model_copy(update={"every": 100, "final": 100})})
    assert speed.seconds(often, 10000) == pytest.approx((10000 / 100 + 100) * 4 * 1000 * 0.001)


def test_a_probe_measures_this_machine() -> None:
    speed = probe(parse_config(SMALL))
    assert 0 < speed.step < 5 and 0 < speed.example < 1
    assert (speed.clients, speed.at_once) == (12, 1) and speed.examples > 1000


@pytest.fixture
def sweep(tmp_path: Path) -> Sweep:
    base = {**SMALL, "training": {"rounds": 2, "local_steps": 1}}
    return plan_sweep(read_sweep({"base": base, "grid": {"algorithm": ["fedavg", "fedsam"], "seed": [0, 1]}}), tmp_path)


def test_remaining_time_is_rounds_times_speed(sweep: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    probed: list[Config] = []

    def two_seconds_per_round(kind: Config) -> ProbedSpeed:
        probed.append(kind)
        return ProbedSpeed(0.0, 0.0, 1, 12, 1000, 100, whole_round=2.0)

    monkeypatch.setattr(estimate, "measure_speed", two_seconds_per_round)
    monkeypatch.setattr(estimate, "available_cores", lambda: 4)
    fedavg, fedsam = 2 * 2 * 2.0, 2 * 2 * 2.0 * 2
    work = remaining_work(sweep.runs)
    assert (work.runs, work.done, work.rounds) == (4, 0, 8)
    assert (work.seconds, work.reason) == (fedavg + fedsam, ""), "fedsam takes two backward passes per step"
    assert len(probed) == 1, "runs that differ only in algorithm and seed share a probe"
    assert remaining_work(sweep.runs, at_once=2).seconds == (fedavg + fedsam) / 2
    results = run_sweep(sweep)
    next(results)
    results.close()
    after = remaining_work(sweep.runs, probing=False)
    assert (after.done, after.rounds, after.seconds, after.reason) == (1, 6, None, "not probed")


def test_a_finished_sweep_takes_no_time(sweep: Sweep) -> None:
    assert 0 < (remaining_work(sweep.runs[:1]).seconds or 0) < 60
    list(run_sweep(sweep))
    assert remaining_work(sweep.runs).seconds == 0.0


def test_missing_data_cannot_be_probed(tmp_path: Path) -> None:
    elsewhere = read_sweep({"base": {"dataset": "cifar10", "data_dir": str(tmp_path)}, "grid": {"seed": [0]}})
    work = remaining_work(plan_sweep(elsewhere, tmp_path).runs)
    assert work.seconds is None and "cifar10" in work.reason
