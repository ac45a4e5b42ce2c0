"""Other simulators: their environments, processes and set-ups, tested without any of them."""

from __future__ import annotations

import itertools
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from typer.testing import CliRunner

from fedflat.bench import environments, peers
from fedflat.bench.benchmark import Log, _installed_contenders
from fedflat.bench.contender_process import Failed, RoundTimes
from fedflat.bench.contenders import Fedflat, Plain
from fedflat.bench.drivers import __main__ as driver
from fedflat.bench.drivers import client_tensors, local_epochs, participation, plain_loop
from fedflat.bench.machine import cpu_seconds, set_paused
from fedflat.bench.peers import (
    FOLDER_VARIABLE,
    SIMULATORS,
    BlazeFL,
    Flower,
    Fluke,
    SimulatorProcess,
    read_simulator,
    write_simulator,
)
from fedflat.bench.request import Request
from fedflat.bench.results import ContenderResult, different_work, row
from fedflat.bench.setting import BenchmarkSetting
from fedflat.bench.setups import SETUPS
from fedflat.cli.application import app
from fedflat.errors import UserError
from fedflat.operating_system import fork_context, with_descendants
from tests.time_limits import scaled

SMALL = BenchmarkSetting(
    "mlp(hidden=4)", "random(size=60,side=4)", clients_per_round=2, local_steps=2, batch_size=5, device="cpu"
)
DRIVER = """#!{python} -S
import os, subprocess, sys, time
from multiprocessing.connection import Client
connection = Client(os.environ["FEDFLAT_BENCH_FOLDER"] + "/socket", "AF_UNIX")
subprocess.Popen(["sleep", "100"])
subprocess.Popen(["sleep", "100"], start_new_session=True)
while True:
    count = connection.recv()
    if count == 12:
        sys.exit("2026-01-01 00:00:00,000 - Simulator - ERROR - it failed\\nended early")
    if count == 13:
        sys.exit("ValueError: it broke\\n-----")
    if count == 14:
        time.sleep(0.5)
    if count == 15:
        time.sleep(100)
    if count == 16:
        connection.close()
        time.sleep(0.2)
        sys.exit("ValueError: it broke later")
    connection.send_bytes({answer!r})
"""


@pytest.fixture
def environment(tmp_path):
    """An environment whose Python is a driver: rounds of 500 s; it fails at 12, 13 and 16, and hangs at 15."""
    python = tmp_path / "environment" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(DRIVER.format(python=sys.executable, answer=pickle.dumps(RoundTimes([500.0], None, 2.0))))
    python.chmod(0o755)
    return python.parent.parent


def test_a_peer_is_measured_in_another_process(environment, monkeypatch):
    process = SimulatorProcess(Flower(SMALL, clients=6, environment=environment))
    try:
        first = process.rounds(1)
        assert first.seconds[0] < 500.0 and first.loss == 2.0, "the first round includes the start, measured here"
        pids = with_descendants(process.pid)
        assert len(pids) == 3, "the driver and the processes that it started"
        process.pause()
        assert process.rounds(1) == RoundTimes([500.0], None, 2.0), "Flower's processes must answer each other"
        monkeypatch.setattr(Flower, "pausable", True)
        process.pause()
        _await_states(pids[1:], "T")
        assert _state(pids[0]) == "S", "the driver can react if this process is killed"
        process.resume()
        assert read_simulator(process._folder).clients == 6
        process._connection.send(15)  # a round that takes long
    finally:
        start = time.perf_counter()
        process.end()
    assert time.perf_counter() - start < 90
    _await_states(pids, "", "Z")
    assert not process._folder.exists()


def test_a_driver_ends_with_its_paused_processes_if_the_measuring_process_is_killed(tmp_path, monkeypatch):
    write_simulator(Fluke(SMALL), tmp_path)
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    messages, inherited = Pipe(duplex=False)
    fork = fork_context("this test")

    def run(simulator):
        subprocess.Popen(["sleep", "100"], pass_fds=[inherited.fileno()])
        inherited.send("started")
        time.sleep(100)

    def measure():
        late = fork.Process(target=driver.main, args=(0,))  # as if its parent had been killed while it started
        late.start()
        late.join(scaled(5))
        process = fork.Process(target=driver.main, args=(os.getpid(),))
        process.start()
        messages.recv()
        set_paused(process.pid, True)
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(driver, "import_module", lambda name: SimpleNamespace(run=run))
    measuring = fork.Process(target=measure)
    measuring.start()
    inherited.close()
    measuring.join()
    assert messages.poll(scaled(10)), "the driver or its process has survived"
    with pytest.raises(EOFError):
        messages.recv()


def test_a_driver_ends_its_processes_even_if_it_is_terminated_while_it_does_so(tmp_path, monkeypatch):
    write_simulator(Fluke(SMALL), tmp_path)
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    pids, kill = [], driver.kill_processes

    def run(simulator):
        pids.append(subprocess.Popen(["sleep", "100"], pass_fds=[inherited.fileno()]).pid)

    def kill_after_signal(processes):
        if pids and pids.pop():
            os.kill(os.getpid(), signal.SIGTERM)
        kill(processes)

    messages, inherited = Pipe(duplex=False)
    monkeypatch.setattr(driver, "import_module", lambda name: SimpleNamespace(run=run))
    monkeypatch.setattr(driver, "kill_processes", kill_after_signal)
    process = fork_context("this test").Process(target=driver.main, args=(os.getpid(),))
    process.start()
    inherited.close()
    process.join()
    assert messages.poll(scaled(10)), "the driver's process has survived"


def _await_states(pids, *states):
    """Wait until all processes have one of some states: T stopped, Z ended, empty if they are gone, too."""
    deadline = time.monotonic() + scaled(20)
    while not {_state(pid) for pid in pids} <= set(states):
        assert time.monotonic() < deadline, [_state(pid) for pid in pids]
        time.sleep(0.01)


def _state(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return ""


@pytest.mark.parametrize(
    ("rounds", "reason"), [(12, "it failed"), (13, "ValueError: it broke"), (16, "ValueError: it broke later")]
)
def test_a_peer_that_breaks_gives_the_reason(environment, rounds, reason):
    process = SimulatorProcess(Flower(SMALL, environment=environment))
    try:
        process.rounds(1)
        _, *children = with_descendants(process.pid)
        assert process.rounds(rounds) == Failed(reason)
        assert len(children) == 2
        _await_states(children, "", "Z")
    finally:
        process.end()


def test_a_peer_that_hangs_is_left_out(environment, monkeypatch):
    """The work of its processes is simulated, because a busy machine may leave them no CPU time."""
    work = itertools.count()
    monkeypatch.setattr(peers, "HANG_SECONDS", 0.1)
    monkeypatch.setattr(peers, "POLLING_SECONDS", 0.02)
    monkeypatch.setattr(peers, "cpu_seconds", lambda pid: cpu_seconds(pid) + next(work))
    process = SimulatorProcess(BlazeFL(SMALL, environment=environment))
    try:
        assert isinstance(process.rounds(14), RoundTimes), "it works, for longer than the limit"
        assert b"OMP_NUM_THREADS=1" in Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
        # It works for some time and then hangs; the work before must not count.
        work, pids = itertools.chain([1e3, 2e3], itertools.repeat(3e3)), with_descendants(process.pid)
        assert "seems to hang" in process.rounds(15).reason
        _await_states(pids, "", "Z")  # it would disturb the other contenders
    finally:
        process.end()


def test_a_driver_reads_the_setting(tmp_path):
    with_folder = replace(SMALL, data_dir=tmp_path / "data")
    for setting in (SMALL, with_folder):
        write_simulator(Fluke(setting, clients=7), tmp_path)
        assert read_simulator(tmp_path) == Fluke(setting, clients=7)


def test_whole_epochs_and_normalised_data(tmp_path, monkeypatch):
    simulator = Fluke(SMALL, clients=6)
    write_simulator(simulator, tmp_path)
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    plain_loop.cache_clear()
    inputs, targets = client_tensors(simulator, 1)
    assert inputs.shape == (10, 3, 4, 4) and targets.shape == (10,) and abs(inputs.mean()) < 1
    assert local_epochs(simulator) == 1
    for clients, per_round in ((100, 29), (6, 6), (1000, 1)):
        share = participation(Fluke(replace(SMALL, clients_per_round=per_round), clients=clients))
        assert int(clients * share) == per_round and share <= 1.0
    for sizes in ([7] * 6, [20] * 6, [10] * 5 + [5]):
        plain_loop().partition = SimpleNamespace(clients=[np.arange(size) for size in sizes])
        with pytest.raises(UserError, match=f"whole epochs.* has {min(sizes)}"):
            local_epochs(simulator)
    with pytest.raises(UserError, match="--augmentation none"):
        client_tensors(Fluke(replace(SMALL, augmentation="crop-flip")), 1)
    plain_loop.cache_clear()


def test_an_environment_is_installed_once(tmp_path, monkeypatch):
    commands, python = [], tmp_path / "peers" / "fluke" / "bin" / "python"

    def run(command):
        commands.append(command)
        python.parent.mkdir(parents=True, exist_ok=True)
        python.touch()
        return '{"python": "3.11", "fluke-fl": "1.0"}'

    monkeypatch.setattr(environments, "_run", run)
    folder, lines = tmp_path / "peers" / "fluke", []
    for _ in range(2):
        environments.install(Fluke, folder, lines.append)
    assert len(lines) == 1 and len(commands) == 3 and "fluke-fl" in commands[1]
    python.unlink()  # Python was upgraded
    environments.install(Fluke, folder, lines.append)
    assert len(lines) == 2
    assert environments.installed_versions(folder)["fluke-fl"] == "1.0"
    result = ContenderResult(Fluke(SMALL, environment=folder), [1.0], 2.0, None, None, 2.0)
    assert row(result, [result], 20)["versions"] == {"python": "3.11", "fluke-fl": "1.0"}


def test_a_simulator_that_cannot_be_installed_is_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(environments, "find_python", lambda simulator: sys.executable)
    monkeypatch.setattr(Fluke, "requirements", ("no such package",))
    log = Log(lambda line: None)
    request = Request(SMALL, clients=(6,), against=("fluke",), peer_dir=tmp_path)
    monkeypatch.setattr(environments, "_run", lambda command: _fail())
    names = [contender.name for contender in _installed_contenders(request, log)]
    assert names == ["fedflat", "bound"] and "could not be installed" in log.notes[0]
    with pytest.raises(UserError, match="could not be installed: ERROR: x"):
        monkeypatch.undo()
        environments._run(["sh", "-c", "echo ERROR: x >&2; echo hint; exit 1"])


def _fail():
    raise UserError("could not be installed: no")


def test_another_python_is_searched_on_the_path(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(BlazeFL, "pythons", (97, 99))
    for minor, script in ((99, "exit 1"), (98, "exit 0")):
        command = tmp_path / f"python3.{minor}"
        command.write_text(f"#!/bin/sh\n{script}\n")
        command.chmod(0o755)
    assert environments.find_python(BlazeFL) == str(tmp_path / "python3.98"), "3.99 exists, but does not work"
    (tmp_path / "python3.98").unlink()
    with pytest.raises(UserError, match=r"needs Python 3\.97 to 3\.99"):
        environments.find_python(BlazeFL)


def test_a_contender_that_skips_work_is_noticed():
    def result(contender, loss):
        return ContenderResult(contender, [1.0], 1.0, None, None, loss)

    ours, plain, simulator = Fedflat(SMALL, clients=6), Plain(SMALL, clients=6), Fluke(SMALL, clients=6)
    (note,) = different_work([result(ours, 1.0), result(plain, 1.1), result(simulator, 2.2)])
    assert note.startswith("fluke") and "to 2.2000" in note
    assert different_work([result(plain, 1.0)]) == []


def test_published_set_ups(monkeypatch):
    requests = []
    monkeypatch.setattr("fedflat.bench.benchmark.benchmark", lambda request, *_: requests.append(request) or {})
    for name in SETUPS:
        result = CliRunner().invoke(app, ["bench", "--setup", name, "--json", "--lr", "0.5"])
        assert result.exit_code == 0 and json.loads(result.stdout) == {}
    pfl, blazefl, nvflare = requests
    assert pfl.clients == [1000] and pfl.setting.clients_per_round == 50 and pfl.setting.lr == 0.5
    assert blazefl.setting.local_steps * blazefl.setting.batch_size == 5 * 50_000 // blazefl.clients[0]
    assert nvflare.clients == [8] and nvflare.setting.batch_size == 64
    result = CliRunner().invoke(app, ["bench", "--setup", "blaze"])
    assert result.exit_code == 2 and "did you mean blazefl" in result.stderr


def test_every_peer_can_be_named():
    request = Request(SMALL, clients=(6,), against=tuple(SIMULATORS))
    request.check()
    assert [contender.name for contender in request.contenders()][1:-1] == [
        simulator.name for simulator in SIMULATORS.values()
    ]
