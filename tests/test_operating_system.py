"""Calls that differ between operating systems, as each of them would make them."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from fedflat import operating_system
from fedflat.errors import UserError

PACKAGE = Path(operating_system.__file__).parent
LINUX_ONLY = {PACKAGE / "bench" / "machine.py", PACKAGE / "bench" / "drivers" / "blazefl.py"}
"""Files that return early on other systems, or drive a simulator in its own environment."""
CALLS = re.compile(
    r"os\.(fork|pread|pwrite|sched_\w+)\b|\b(fcntl|msvcrt)\b|import resource\b|pthread_sigmask|\"fork\"|SIGSTOP|SIGKILL"
)


def test_only_one_module_calls_the_operating_system() -> None:
    files = {path for path in PACKAGE.rglob("*.py") if CALLS.search(path.read_text("utf-8"))}
    assert files == {Path(operating_system.__file__), *LINUX_ONLY}


@pytest.mark.parametrize("system", ["linux", "win32"])
def test_files_are_read_and_written_at_an_offset(system: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", system)
    if system == "win32":
        monkeypatch.delattr(os, "pread")
        monkeypatch.delattr(os, "pwrite")
    descriptor = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT | operating_system.BINARY)
    operating_system.write_at(descriptor, b"abcdef", 2)
    operating_system.write_at(descriptor, b"XY", 4)
    assert operating_system.read_at(descriptor, 3, 3) == b"bXY"
    os.close(descriptor)


def test_peak_memory_is_in_kibibytes(monkeypatch: pytest.MonkeyPatch) -> None:
    here = operating_system.peak_memory()
    assert here is not None and 2**14 < here < 2**27  # 16 MiB to 128 GiB
    monkeypatch.setattr(sys, "platform", "darwin")
    as_on_macos = operating_system.peak_memory()
    assert as_on_macos is not None and as_on_macos < here / 1000
    monkeypatch.setattr(sys, "platform", "win32")
    assert operating_system.peak_memory() is None


@pytest.mark.parametrize("largest", [2**25, 2**31])
def test_malloc_keeps_freed_memory_in_old_versions_of_glibc_too(largest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Older ones, such as 2.30, refuse a large threshold of mmap, and would keep that of 128 KiB."""
    options: dict[int, int] = {}

    def mallopt(option: int, value: int) -> bool:
        is_accepted = option == -1 or value <= largest
        options.update({option: value} if is_accepted else {})
        return is_accepted

    monkeypatch.setattr("ctypes.CDLL", lambda _: SimpleNamespace(mallopt=mallopt))
    operating_system.keep_freed_memory()
    assert options == {-1: 2**28, -3: min(2**28, largest)}


def test_windows_says_what_needs_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    assert operating_system.fork_context("a test").get_start_method() == "fork"
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(UserError, match=r"a test forks processes, which Windows cannot do; run it on Linux"):
        operating_system.fork_context("a test")
    monkeypatch.delattr(signal, "pthread_sigmask")
    with operating_system.interrupts_blocked():
        pass


def test_cores_without_an_affinity_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert operating_system.cores_in_affinity_mask() == 6
