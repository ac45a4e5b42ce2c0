"""Child processes: messages, death, environment and clean-up."""

from __future__ import annotations

import os
import signal
import sys
import time
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from fedflat import processes
from fedflat.bench.machine import set_paused
from fedflat.operating_system import process_masks
from fedflat.processes import ChildDied, ChildProcess, close_children, wait_for_any

from .time_limits import scaled


@pytest.fixture(autouse=True)
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start children as forks of this process, because the import of torch in new processes takes seconds."""
    monkeypatch.setattr("fedflat.processes.START_METHOD", "fork")


def describe(pipe: Connection, *names: str) -> None:
    """Send what the child sees of itself, then repeat every message."""
    imported_main = hasattr(sys.modules["__main__"], "__file__")
    environment = [os.environ.get(name) for name in names]
    pipe.send((torch.get_num_threads(), environment, imported_main, sys.flags.safe_path, process_masks()))
    while True:
        try:
            pipe.send(pipe.recv())
        except EOFError:
            return


def sleep(pipe: Connection) -> None:
    pipe.send("asleep")
    os.write(pipe.fileno(), b"\0\0\0\x09half of")  # the length of a message and its beginning
    time.sleep(600)


def sleep_with_a_child(pipe: Connection, inherited: Connection) -> None:
    """Fall asleep with a child that sleeps, too; ``inherited`` is open until both have ended."""
    processes._starter = None  # unlike a fork, a child may start others
    ChildProcess(sleep).receive()
    sleep(pipe)


def sleep_with_a_paused_grandchild(pipe: Connection, inherited: Connection) -> None:
    """Fall asleep with a child whose own child is paused, as between the turns of a benchmark."""
    processes._starter = None
    child = ChildProcess(sleep_with_a_child, inherited, daemon=False)
    child.receive()
    set_paused(child.pid, True)
    sleep(pipe)


def leave(pipe: Connection) -> None:
    pipe.close()


def test_a_child_has_one_thread_its_own_environment_and_not_our_main_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """It imports nothing from the current folder, e.g. a statistics.py. A busy child is killed when it is closed."""
    monkeypatch.setattr("fedflat.processes.START_METHOD", "spawn")  # as on Windows and macOS
    monkeypatch.syspath_prepend(Path(__file__).parents[1])  # so that the child can import this module
    monkeypatch.setenv("MINE", "parent")
    masks = 0o027, set(sorted(process_masks()[1])[:1])  # a fork server was started with other masks than the parent's
    monkeypatch.setattr("fedflat.processes.process_masks", lambda: masks)
    child = ChildProcess(describe, "MINE", "OURS", environment={"MINE": "child"})
    assert child.receive() == (1, ["child", None], False, True, masks)
    assert os.environ["MINE"] == "parent"
    child.send({"any": "value"})
    assert child.receive() == {"any": "value"}
    monkeypatch.setattr("fedflat.processes.START_METHOD", "fork")
    busy = ChildProcess(sleep)
    assert busy.receive() == "asleep"
    close_children([busy, child], patience=0.1)
    assert not busy.is_alive and not child.is_alive


def test_a_child_ignores_interrupts_and_a_killed_one_is_reported_and_ends_its_own() -> None:
    ended, inherited = Pipe(duplex=False)
    child = ChildProcess(sleep_with_a_paused_grandchild, inherited, daemon=False)
    inherited.close()
    assert child.receive() == "asleep"
    os.kill(child.pid, signal.SIGINT)
    os.kill(child.pid, signal.SIGHUP)
    assert not ended.poll(0.2)
    assert child.is_alive
    os.kill(child.pid, signal.SIGKILL)
    assert ended.poll(scaled(20)), "a descendant still runs, or is paused"
    with pytest.raises(ChildDied, match="was killed, most likely because memory"):
        child.receive()
    child.send("nobody reads this")
    close_children([child])


def test_a_child_that_leaves_is_reported() -> None:
    child = ChildProcess(leave)
    assert wait_for_any([child]) == [child]
    with pytest.raises(ChildDied, match="ended"):
        child.receive()
    close_children([child])
