"""The preloaded SuperExec: a fork handles a task, called like Flower's command."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from flwr.supercore.constant import TaskType
from flwr.supercore.superexec.executor.types import ExecutionSpec, LaunchResult

from fedflat.deploy.flower import forks, warm
from fedflat.errors import UserError

from ..time_limits import scaled
from .processes import free_port

SPEC = ExecutionSpec(TaskType.CLIENT_APP, "127.0.0.1:8100", "secret", True, None, False, 77, True, 1)


class Recorder:
    """Stands in for Flower's command and records how it was called."""

    @staticmethod
    def command() -> None:
        Path(os.environ["RECORD"]).write_text(json.dumps([os.getpid(), *sys.argv]))


def test_a_fork_handles_a_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RECORD", str(tmp_path / "call.json"))
    monkeypatch.setattr(forks, "_load", lambda entry_point: Recorder.command)
    others = set(multiprocessing.active_children())
    assert forks.ForkExecutor().launch(SPEC) == LaunchResult.accepted()
    for fork in set(multiprocessing.active_children()) - others:
        fork.join(timeout=scaled(60))
    process, command, *arguments = json.loads((tmp_path / "call.json").read_text())
    assert process != os.getpid() and command == "flwr-clientapp"
    assert arguments[1:] == ["127.0.0.1:8100", "--token", "secret", "--insecure", "--parent-pid", "77"]


def serve_a_node_that_is_not_up(started: Connection) -> None:
    """Do what a warm process does: serve a node, and handle a task."""
    context = forks.fork_context("this test")
    context.Process(target=forks._serve_address, args=(f"127.0.0.1:{free_port()}", None, os.getpid())).start()
    forks.ForkExecutor().launch(SPEC)
    started.send("started")
    time.sleep(600)


def test_all_processes_end_with_a_killed_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forks, "_load", lambda entry_point: lambda: time.sleep(600))
    ended, inherited = multiprocessing.Pipe(duplex=False)
    parent = forks.fork_context("this test").Process(target=serve_a_node_that_is_not_up, args=(inherited,))
    parent.start()
    inherited.close()
    assert ended.recv() == "started"
    assert not ended.poll(0.3), "a process has ended although its parent lives"
    parent.kill()
    parent.join()
    assert ended.poll(scaled(20)), "a process outlives its parent"


def test_flower_has_the_entry_points() -> None:
    assert all(callable(forks._load(entry)) for entry in forks.ENTRY_POINTS.values())


@pytest.mark.parametrize("addresses", [[], ["8100"], ["127.0.0.1:81000"]])
def test_addresses_are_required(addresses: list[str]) -> None:
    with pytest.raises(UserError, match=r"Runtime APIs?, for example 127\.0\.0\.1:8100"):
        warm.main(addresses)
