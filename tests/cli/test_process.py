"""fedflat in a separate process: pipes, interruptions, limits."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from fedflat.experiment.store.files import LOCK_FILE
from fedflat.processes import ChildProcess, close_children
from tests.cli.conftest import call
from tests.time_limits import scaled

FEDFLAT = (sys.executable, "-m", "fedflat")
ENVIRONMENT = {
    key: value
    for key, value in os.environ.items()
    if key not in ("FORCE_COLOR", "PY_COLORS", "GITHUB_ACTIONS", "COLUMNS")
}
ENVIRONMENT |= {"OMP_NUM_THREADS": "1"}
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def test_waiting_threads_do_not_spin():
    script = (
        "import sys, os; sys.argv = ['fedflat', '--version']\nfrom fedflat.cli import main\n"
        "try: main()\nfinally: print(os.environ['OMP_WAIT_POLICY'], 'torch' in sys.modules)"
    )
    for given, meant in ({}, "PASSIVE"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE"):
        done = subprocess.run(
            [sys.executable, "-c", script],
            check=False,
            capture_output=True,
            text=True,
            env=ENVIRONMENT | given,
            timeout=scaled(120),
        )
        assert done.stdout.startswith("fedflat 0.")
        assert done.stdout.split()[-2:] == [meant, "False"], "torch reads it when it is loaded"


def test_output_has_no_control_characters_unless_on_a_terminal(fedflat, small):
    result = fedflat("run", "fedavg+wima", *small)
    assert result.exit_code == 0
    assert not CONTROL.search(result.stdout + result.stderr)
    assert "finished" in result.stderr and "wima" in result.stdout


def run_with_small_files(pipe, flags):
    """Run the command in a fork of this process that cannot write large files."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (16_000, 16_000))
    result = call("run", "fedavg", *flags, "--quiet", "--out", "run")
    pipe.send((result.exit_code, result.stdout, result.stderr))


@pytest.mark.skipif(not hasattr(resource, "RLIMIT_FSIZE"), reason="no such limit here")
def test_a_file_size_limit_is_reported_in_one_line_and_leaves_no_partial_file(fedflat, tmp_path, small, monkeypatch):
    monkeypatch.setattr("fedflat.processes.START_METHOD", "fork")
    child = ChildProcess(run_with_small_files, small)
    code, printed, complaints = child.receive()
    close_children([child])
    assert code == 2 and printed == ""
    (line,) = complaints.splitlines()
    assert line.startswith("fedflat: ") and "run/checkpoint/state.safetensors: file too large" in line
    written = {path.name for path in (tmp_path / "run").rglob("*") if path.is_file()}
    assert written - {LOCK_FILE} == {"config.yaml", "partition.json", "status.json", "metrics.jsonl", "timing.jsonl"}
    assert fedflat("resume", "run").exit_code == 0


@contextmanager
def endless_run(folder: Path, workers: int, *quiet: str) -> Iterator[subprocess.Popen[str]]:
    """A run that is killed at the end of the test.

    It receives Ctrl-C and SIGHUP, which background jobs and commands under nohup ignore.
    """

    def receive_signals() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)

    flags = (
        "run",
        "fedavg",
        "--rounds",
        "100000",
        "--local-steps",
        "1",
        "--workers",
        str(workers),
        "--device",
        "cpu",
        "--out",
        "run",
        *quiet,
    )
    process = subprocess.Popen(
        [*FEDFLAT, *flags], stderr=subprocess.PIPE, text=True, env=ENVIRONMENT, cwd=folder, start_new_session=True,
        preexec_fn=receive_signals,  # noqa: PLW1509
    )  # fmt: skip
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def test_an_interrupted_command_states_how_to_continue(tmp_path):
    with endless_run(tmp_path, 1) as process:
        metrics = tmp_path / "run" / "metrics.jsonl"
        patience = time.monotonic() + scaled(60)
        while (
            time.monotonic() < patience
            and process.poll() is None
            and not (metrics.exists() and metrics.stat().st_size > 500)
        ):
            time.sleep(0.05)
        process.send_signal(signal.SIGHUP)
        told = process.communicate(timeout=scaled(60))[1]
        assert process.returncode == 129
        last = told.splitlines()[-1]
        assert re.fullmatch(r"fedflat: interrupted.* continue from round \d+ with: fedflat resume run", last)
        assert "Traceback" not in told and not CONTROL.search(told)


def test_an_interrupt_within_generated_code_keeps_the_exit_code(tmp_path):
    """Modules that define dataclasses run generated code while they are imported."""
    plugin = tmp_path / "plugin.py"
    plugin.write_text("exec('raise KeyboardInterrupt')")
    done = subprocess.run(
        [*FEDFLAT, "algorithms", "--plugin", plugin], check=False, env=ENVIRONMENT, timeout=scaled(60)
    )
    assert done.returncode == 130


def test_ctrl_c_while_workers_start_prints_one_line(tmp_path):
    """The signal also reaches the workers, which are importing torch."""
    with endless_run(tmp_path, 2, "--quiet") as process:
        config = tmp_path / "run" / "config.yaml"  # is written after the fork server has begun to start the workers
        patience = time.monotonic() + scaled(60)
        while time.monotonic() < patience and process.poll() is None and not config.exists():
            time.sleep(0.01)
        time.sleep(0.2)
        os.killpg(process.pid, signal.SIGINT)
        told = process.communicate(timeout=scaled(60))[1]
        assert process.returncode == 130
        (line,) = told.splitlines()
        assert re.fullmatch(r"fedflat: interrupted.* continue from round \d+ with: fedflat resume run", line)


def test_closed_streams_are_replaced_and_a_deleted_working_directory_is_reported(tmp_path):
    """A file that took the number of a closed stream would receive what libraries print."""
    done = subprocess.run(
        f"mkdir gone && cd gone && rmdir ../gone && {sys.executable} -m fedflat --version",
        shell=True,
        check=False,
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
        cwd=tmp_path,
        timeout=scaled(60),
    )
    assert done.returncode == 2 and done.stderr.startswith("fedflat: the working directory was deleted")
    check = (
        "import sys; sys.argv = ['fedflat', '--version']\nfrom fedflat.cli import main\n"
        "try: main()\nfinally: print(open('file', 'w').fileno(), file=open('number', 'w'))"
    )
    done = subprocess.run(
        f'{sys.executable} -c "$CHECK" <&- >&-',
        shell=True,
        check=False,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT | {"CHECK": check},
        cwd=tmp_path,
        timeout=scaled(60),
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert int((tmp_path / "number").read_text()) > 2


@pytest.mark.parametrize("arguments", ["settings", "--version", "--help", "--show-completion bash"])
def test_a_full_output_device_is_reported(arguments):
    with Path("/dev/full").open("w") as full:
        result = subprocess.run(
            [*FEDFLAT, *arguments.split()],
            check=False,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env=ENVIRONMENT | {"PYTHONUNBUFFERED": ""},  # so that output is also flushed at exit
            timeout=scaled(60),
        )
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("fedflat: ") and line.endswith("no space left on device")


@pytest.mark.parametrize("arguments", [("settings", "--json"), ("settings",)])
def test_a_closed_pipe_is_not_an_error(arguments):
    process = subprocess.Popen([*FEDFLAT, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENVIRONMENT)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    process.wait(timeout=scaled(60))


def test_a_terminal_without_unicode():
    result = subprocess.run(
        [*FEDFLAT, "settings"],
        check=False,
        capture_output=True,
        env=ENVIRONMENT | {"PYTHONIOENCODING": "ascii"},
        timeout=scaled(120),
    )
    assert result.returncode == 0 and b"training.clip" in result.stdout and result.stderr == b""
