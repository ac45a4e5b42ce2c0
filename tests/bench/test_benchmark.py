"""Benchmarks: invalid requests, the reported numbers, and a small benchmark from the command line."""

from __future__ import annotations

import itertools
import json
import platform
import threading
from dataclasses import dataclass, replace
from multiprocessing import Pipe
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from fedflat.bench import contender_process
from fedflat.bench.benchmark import Log, _measure_in_turns, _measure_one_by_one, benchmark
from fedflat.bench.contender_process import (
    ContenderProcess,
    Failed,
    LocalContender,
    NoMoreRounds,
    RoundTimer,
    RoundTimes,
    _run_contender,
)
from fedflat.bench.contenders import Fedflat, Plain, SpeedBound
from fedflat.bench.machine import Load, cpu_seconds, hardware, host_memory, kill_group
from fedflat.bench.request import Request
from fedflat.bench.results import ContenderResult, row, samples_per_round
from fedflat.bench.setting import BenchmarkSetting
from fedflat.cli.application import app
from fedflat.cli.experiments.bench import print_benchmark, split_counts, split_names
from fedflat.errors import UserError

SMALL = BenchmarkSetting(
    "mlp(hidden=4)", "random(size=60,side=4)", clients_per_round=2, local_steps=2, batch_size=5, device="cpu", workers=1
)
ROW = {
    "contender": str,
    "algorithm": str | None,
    "precision": str,
    "engine": str | None,
    "clients": int,
    "seconds_per_round": float,
    "seconds": list,
    "cpu_seconds_per_round": float | None,
    "samples_per_round": float,
    "samples_per_second": float,
    "share_of_bound": float | None,
    "times_plain": float | None,
    "set_up_seconds": float,
    "peak_device_bytes": int | None,
    "peak_host_bytes": int | None,
    "loss": float | None,
    "versions": dict | None,
}


def test_a_small_benchmark(tmp_path):
    file = tmp_path / "made" / "bench.json"
    flags = (
        "--model mlp(hidden=4) --dataset random(size=60,side=4) --clients 6 --clients-per-round 2 --local-steps 2 "
        "--batch-size 5 --rounds 3 --warm-up 1 --workers 1 --device cpu --against plain --out"
    )
    result = CliRunner().invoke(app, ["bench", *flags.split(), str(file)])
    assert result.exit_code == 0, result.stderr
    for word in ("fedflat", "plain loop", "bound", "s/round", "samples/s", "share of", "medians"):
        assert word in result.stdout
    found = json.loads(file.read_text())
    settings, results = {"command", "setting", "rounds", "warm_up"}, {"rows", "notes"}
    assert set(found) == {"format", "date", "hardware", "versions"} | settings | results
    assert found["hardware"]["cores"] >= 1 and found["versions"]["torch"]
    assert [line["contender"] for line in found["rows"]] == ["fedflat", "plain loop", "bound"]
    for line in found["rows"]:
        assert set(line) == set(ROW)
        assert all(isinstance(line[key], kind) for key, kind in ROW.items()), line
        assert len(line["seconds"]) == 3 and min(line["seconds"]) > 0
        assert line["samples_per_round"] == 20
    assert found["rows"][0]["times_plain"] > 0 and found["rows"][2]["times_plain"] is None
    ours, plain, bound = (line["loss"] for line in found["rows"])
    assert ours == pytest.approx(plain, abs=1e-6) and bound is None, "the same work ends at the same loss"


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (Request(SMALL, precisions=("tf32",)), "tf32 needs a GPU"),
        (Request(SMALL, precisions=("float16",)), "float16"),
        (Request(SMALL, engines=("lane",)), "did you mean lanes"),
        (Request(SMALL, against=("fate",)), "fate"),
        (Request(SMALL, precisions=("tf32",), against=("flower",)), "float32"),
        (Request(replace(SMALL, augmentation="mixup")), "mixup"),
        (Request(replace(SMALL, model="cnn"), clients=(6,)), "16x16"),
        (Request(replace(SMALL, device="cuda")), "--device cpu"),
        (Request(replace(SMALL, device="tpu")), "unknown device 'tpu'"),
        (Request(replace(SMALL, clients_per_round=9), clients=(8,)), "data.clients=8"),
        (Request(replace(SMALL, partition="iod")), "'iod'; did you mean iid"),
        (Request(replace(SMALL, augmentation="crop"), clients=(6,)), "'crop'"),
        (Request(SMALL, clients=(6, 100)), "60.*100 clients"),
    ],
)
def test_invalid_benchmark_requests_are_rejected(request_, words, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(UserError, match=words):
        request_.check()


@pytest.mark.parametrize(("has_tf32", "precision"), [(True, "tf32"), (False, "float32")])
def test_the_default_precision_is_that_of_a_run(has_tf32, precision, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("fedflat.bench.request.gpu_has_tf32", lambda: has_tf32)
    setting = replace(SMALL, device="auto")
    assert {contender.precision for contender in Request(setting).contenders()} == {precision}
    together = Request(setting, against=("flower",)).contenders()
    assert {contender.precision for contender in together} == {"float32"}, "the precision of other simulators"


def test_the_memory_of_the_loss_is_not_reported(monkeypatch):
    """A GPU with 100 bytes of training and 900 of the loss; the cache keeps memory until it is emptied."""
    cached, peak, sent = 0, 0, []

    def reserve(size):
        nonlocal cached, peak
        cached = max(cached, size)
        peak = max(peak, cached)

    def empty_cache():
        nonlocal cached
        cached = 0

    def reset_peak():
        nonlocal peak
        peak = cached

    event = SimpleNamespace(elapsed_time=lambda other: 1000.0)
    monkeypatch.setattr(contender_process, "_on_gpu", lambda: True)
    monkeypatch.setattr(contender_process, "_recorded_event", lambda: event)
    fakes = {"synchronize": lambda: None, "empty_cache": empty_cache, "reset_peak_memory_stats": reset_peak}
    for name, function in {**fakes, "max_memory_reserved": lambda: peak}.items():
        monkeypatch.setattr(f"torch.cuda.{name}", function)
    requests = iter([1, 2, 1, 0])
    timer = RoundTimer(SimpleNamespace(recv=lambda: next(requests), send=sent.append))
    with pytest.raises(NoMoreRounds):
        for training in (100, 50, 50, 50):
            reserve(training)
            timer.round_done(lambda: reserve(900) or 2.0)
    assert [times.device_bytes for times in sent] == [100, 100, 100] and sent[-1].loss == 2.0


def test_contenders():
    request = Request(
        SMALL, ("fedavg", "scaffold"), engines=("loop", "lanes"), clients=(100, 1000), against=("plain", "flower")
    )
    names = [str(contender) for contender in request.contenders()]
    assert (
        names[0] == "fedflat, fedavg, float32, loop, 100 clients"
        and len([n for n in names if n.startswith("fedflat")]) == 8
    )
    assert names[-3:] == [
        "plain loop, fedavg, float32, 100 clients",
        "flower, fedavg, float32, 100 clients",
        "bound, float32, eager",
    ]


def test_ratios_compare_rounds_that_were_timed_together(monkeypatch):
    monkeypatch.setattr("fedflat.bench.results.available_cores", lambda: 2)
    ours = ContenderResult(Fedflat(SMALL, engine="loop"), [1.0, 3.0, 2.0], 5.0, None, 10)
    plain = ContenderResult(Plain(SMALL), [2.0, 9.0, 4.0], 4.0, None, 10)
    bound = ContenderResult(SpeedBound(SMALL, ""), [1.0, 1.5, 2.0], 4.0, None, 10)
    line = row(ours, [ours, plain, bound], 100)
    assert line["times_plain"] == 2.0 and line["seconds_per_round"] == 2.0 and line["samples_per_second"] == 50
    full = SMALL.clients_per_round * SMALL.batch_size * SMALL.local_steps
    assert line["share_of_bound"] == 0.5 * 100 / full and line["set_up_seconds"] == 3.0, (
        "by samples: clients may have less than the bound"
    )
    of_bound = row(bound, [ours, plain, bound], 100)
    assert (
        of_bound["seconds_per_round"] == 0.75
        and of_bound["samples_per_round"] == full
        and of_bound["samples_per_second"] == full / 0.75
    )


class Instant:
    """Replaces a contender's process; its rounds take one second or fail."""

    def __init__(self, contender):
        self.contender, self.pid = contender, 0

    def rounds(self, count):
        return (
            Failed("is broken") if self.contender.algorithm == "fedsam" else RoundTimes([1.0] * count, None, 2.0, 1.0)
        )

    def pause(self): ...
    def resume(self): ...
    def host_bytes(self): ...
    def end(self): ...


def test_as_many_rounds_are_measured_as_are_asked_for(monkeypatch):
    monkeypatch.setattr("fedflat.bench.benchmark.ContenderProcess", Instant)
    monkeypatch.setattr(Load, "share_of_others", lambda self: 0.0)
    ticks = itertools.count(step=7)
    monkeypatch.setattr("fedflat.bench.benchmark.cpu_seconds", lambda pid: next(ticks))
    found = _measure_in_turns(Request(SMALL, clients=(4,), against=("none",), rounds=12), Log(lambda line: None))
    assert [len(m.seconds) for m in found] == [12, 12]
    assert [m.cpu_seconds for m in found] == [3 * (7 - 1) / 12] * 2, "in three turns, without the loss"


def test_where_nothing_is_measured_the_reason_is_ours_and_not_the_load(monkeypatch):
    monkeypatch.setattr("fedflat.bench.benchmark.ContenderProcess", Instant)
    monkeypatch.setattr(Load, "share_of_others", lambda self: 0.9)
    for against in ("none", "plain"):
        with pytest.raises(UserError, match=r"^fedflat, fedsam, .* was not measured: .*is broken"):
            benchmark(Request(SMALL, ("fedsam",), clients=(4,), against=(against,)), "", lambda line: None)


def test_an_unwritable_output_file_is_reported_before_the_benchmark(tmp_path, monkeypatch):
    monkeypatch.setattr("fedflat.bench.benchmark.benchmark", lambda *_: pytest.fail("measured for nothing"))
    (tmp_path / "file").touch()
    result = CliRunner().invoke(app, ["bench", "--out", str(tmp_path / "file" / "bench.json")])
    assert result.exit_code == 2 and str(tmp_path / "file") in result.stderr


def test_a_processor_without_a_name_is_reported_by_its_architecture(tmp_path, monkeypatch):
    monkeypatch.setattr("fedflat.bench.machine.PROC", tmp_path)
    monkeypatch.setattr("platform.processor", lambda: "")
    assert hardware()["processor"] == platform.machine()


def test_samples_are_counted_without_second_passes():
    assert samples_per_round(SMALL, 6) == 20
    assert samples_per_round(replace(SMALL, partition="virtual(size=3)"), 10**6) == 12


@dataclass(frozen=True)
class Breaks(LocalContender):
    name = "breaks"

    def run_rounds(self, timer):
        timer.round_done()
        raise ValueError("out of\norder")


def test_a_contender_that_fails_reports_the_reason():
    ours, theirs = Pipe()
    thread = threading.Thread(target=_run_contender, args=(theirs, Breaks(SMALL)))
    thread.start()
    ours.send(1)
    assert isinstance(ours.recv(), RoundTimes)
    ours.send(1)
    assert "ValueError: out of order" in ours.recv().reason
    thread.join()


def test_memory_and_load_of_this_process():
    import os

    assert (host_memory(os.getpid()) or 10**8) > 10**7
    load, before = Load(), cpu_seconds(os.getpid())
    sum(range(10**7))
    assert 0 <= load.share_of_others() <= 1
    assert before is None or 0.01 < cpu_seconds(os.getpid()) - before < 60


@pytest.mark.parametrize(("system", "killed"), [("darwin", [7]), ("win32", [])])
def test_groups_of_processes_are_killed_except_on_windows(system, killed, monkeypatch):
    groups = []
    monkeypatch.setattr("sys.platform", system)
    monkeypatch.setattr("os.killpg", lambda group, signal: groups.append(group), raising=False)
    kill_group(7)
    assert groups == killed


@pytest.mark.parametrize("text", ["", "x", "0", "3,-1"])
def test_bad_numbers_of_clients(text):
    with pytest.raises(UserError):
        split_counts(text)


def test_lists_are_split_only_outside_parentheses():
    assert split_names("a, b(c=1,d=2),,a") == ["a", "b(c=1,d=2)"]


def test_the_table_of_a_gpu_has_its_memory(capsys):
    line = dict.fromkeys(ROW) | {
        "contender": "fedflat",
        "clients": 10,
        "seconds_per_round": 0.05,
        "samples_per_second": 5e5,
    }
    line |= {"set_up_seconds": 12.0, "peak_device_bytes": 2 * 10**9, "share_of_bound": 0.75, "times_plain": 20.0}
    document = {
        "rows": [line, line | {"clients": 20}],
        "notes": ["a note"],
        "rounds": 3,
        "warm_up": 1,
        "versions": {"torch": "2"},
    }
    document["setting"] = {
        "model": "cnn",
        "dataset": "random",
        "clients_per_round": 10,
        "local_steps": 50,
        "batch_size": 50,
        "augmentation": "none",
    }
    print_benchmark(document | {"hardware": {"gpus": ["H200"], "processor": "p", "cores": 16}})
    shown = capsys.readouterr().out
    for word in ("GPU memory", "2 GB", "75 %", "20.00", "500,000", "H200", "a note", "clients"):
        assert word in shown


def test_contenders_may_set_up_together_and_nobody_is_measured_meanwhile(monkeypatch) -> None:
    told: list[str] = []
    events: list[str] = []

    class Watched(ContenderProcess):
        def wait_for_rounds(self):
            times = super().wait_for_rounds()
            events.append("done")
            return times

        def rounds(self, count):
            events.append("begins to be measured")
            return super().rounds(count)

    monkeypatch.setattr("fedflat.bench.benchmark.ContenderProcess", Watched)
    request = Request(SMALL, ("fedavg",), clients=(4,), against=("none",), rounds=2, warm_up=0, concurrent_setups=2)
    found = _measure_one_by_one(request, Log(told.append))
    assert [str(m.contender).split(",")[0] for m in found] == ["fedflat", "bound"]
    assert all(len(m.seconds) == 2 and min(m.seconds) > 0 for m in found)
    said = [line.rpartition(": ")[2] for line in told]
    measured = [line for m in found for line in ("measuring 2 rounds", f"{m.median:.4g} s per round")]
    assert said == ["setting up"] * 2 + measured, "each result is printed when it is available"
    assert events[:3] == ["done", "done", "begins to be measured"]
