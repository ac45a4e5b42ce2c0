"""The warm SuperExec: a task is worked on by a fork that is called as Flower's own command would be."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from flwr.supercore.constant import TaskType
from flwr.supercore.superexec.executor.types import ExecutionSpec, LaunchResult

from fedflat.deploy.flower import forks, warm
from fedflat.errors import UserError

from .processes import free_port


class Told:
    """Stands where Flower's command is, and writes down how it was called."""

    @staticmethod
    def command() -> None:
        Path(os.environ["TOLD"]).write_text(json.dumps([os.getpid(), *sys.argv]))


def test_a_task_goes_to_a_fork(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOLD", str(tmp_path / "told.json"))
    monkeypatch.setattr(forks, "_found", lambda entry: Told.command)
    spec = ExecutionSpec(TaskType.CLIENT_APP, "127.0.0.1:8100", "secret", True, None, False, 77, True, 1)
    others = set(multiprocessing.active_children())
    assert forks.Forks().launch(spec) == LaunchResult.accepted()
    for fork in set(multiprocessing.active_children()) - others:
        fork.join(timeout=60)
    process, command, *arguments = json.loads((tmp_path / "told.json").read_text())
    assert process != os.getpid() and command == "flwr-clientapp"
    assert arguments[1:] == ["127.0.0.1:8100", "--token", "secret", "--insecure", "--parent-pid", "77"]


def test_who_waits_for_a_node_ends_with_the_process_that_began_it() -> None:
    """Killed before the SuperNode was there, it would serve that one for ever."""
    asked = time.monotonic()
    assert not forks._opened(f"127.0.0.1:{free_port()}", parent=os.getpid())  # which is not the parent of this one
    assert time.monotonic() - asked < 5


def test_flower_still_has_what_it_calls() -> None:
    assert all(callable(forks._found(entry)) for entry in forks.ENTRIES.values())


@pytest.mark.parametrize("addresses", [[], ["8100"], ["127.0.0.1:81000"]])
def test_without_addresses_it_says_what_was_expected(addresses: list[str]) -> None:
    with pytest.raises(UserError, match="expected the addresses of Runtime APIs"):
        warm.main(addresses)
