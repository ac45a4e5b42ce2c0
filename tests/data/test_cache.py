"""The cache of arrays: complete or absent, never stale, and never the cause of a failure."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from fedflat.data import MappedTensor, open_mapped
from fedflat.data.files import cache
from fedflat.data.files.cache import cache_entry, fingerprint, fits_in_memory, select_rows
from fedflat.errors import UserError


def hello(side: Path) -> None:
    (side / "a.txt").write_text("hello")


def left_in(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "decoded").iterdir())


def test_an_entry_is_written_once(tmp_path: Path) -> None:
    first = cache_entry(tmp_path, "mine", fingerprint(["x"]), hello)
    assert (first / "a.txt").read_text() == "hello" and left_in(tmp_path) == [first.name]
    assert cache_entry(tmp_path, "mine", fingerprint(["x"]), lambda side: pytest.fail("it is there")) == first
    assert cache_entry(tmp_path, "mine", fingerprint(["y"]), hello) != first


def test_a_failure_leaves_nothing_behind(tmp_path: Path) -> None:
    def fail(side: Path) -> None:
        hello(side)
        raise UserError("a picture is broken")

    with pytest.raises(UserError, match="a picture is broken"):
        cache_entry(tmp_path, "mine", "f" * 64, fail)
    assert left_in(tmp_path) == []

    def interrupt(side: Path) -> None:
        hello(side)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cache_entry(tmp_path, "mine", "f" * 64, interrupt)
    assert left_in(tmp_path) == []


def test_a_full_disk_raises_a_clear_error(tmp_path: Path) -> None:
    def full(side: Path) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(UserError, match=r"mine-ffff\w* \(No space left on device\).*FEDFLAT_DATA"):
        cache_entry(tmp_path, "mine", "f" * 64, full)
    with pytest.raises(FileNotFoundError, match=r"absent\.json"):  # not a problem of the disk
        cache_entry(tmp_path, "mine", "f" * 64, lambda side: (tmp_path / "absent.json").read_text())
    assert left_in(tmp_path) == []


def test_the_first_of_two_processes_fills_the_cache_entry(tmp_path: Path) -> None:
    def while_another_finishes(side: Path) -> None:
        hello(side)
        (side.parent / "mine-ffffffffffffffff").mkdir()
        (side.parent / "mine-ffffffffffffffff" / "a.txt").write_text("theirs")

    kept = cache_entry(tmp_path, "mine", "f" * 64, while_another_finishes)
    assert (kept / "a.txt").read_text() == "theirs" and left_in(tmp_path) == [kept.name]


def test_folders_of_killed_processes_are_removed_and_those_of_running_ones_kept(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    names = {
        number: f".writing-{host}-{number}-00"
        for host, number in ((socket.gethostname(), gone.pid), (socket.gethostname(), os.getppid()))
    }
    elsewhere = [f".writing-{socket.gethostname()}{suffix}-{gone.pid}-00" for suffix in ("x", f"-{gone.pid}", "-gpu")]
    for name in (*names.values(), *elsewhere):
        (tmp_path / "decoded" / name).mkdir(parents=True)
        (tmp_path / "decoded" / name / "half.npy").touch()
    cache_entry(tmp_path, "mine", "f" * 64, hello)
    assert left_in(tmp_path) == sorted([names[os.getppid()], *elsewhere, "mine-ffffffffffffffff"])


def test_entries_of_a_read_only_folder_go_to_the_user_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(os, "access", lambda path, mode: not str(path).endswith("read-only"))
    (tmp_path / "read-only").mkdir()
    kept = cache_entry(tmp_path / "read-only", "mine", "f" * 64, hello)
    assert kept.is_relative_to(tmp_path / "cache") and not (tmp_path / "read-only" / "decoded").exists()


@pytest.fixture
def mapped(tmp_path: Path) -> MappedTensor:
    np.save(tmp_path / "rows.npy", np.arange(30).reshape(10, 3))
    return open_mapped(tmp_path / "rows.npy")


@pytest.mark.parametrize("rows", [[3, 4, 5], [0, 2, 9], [7], [5, 1]])
@pytest.mark.parametrize("fits", [True, False])
def test_rows_are_mapped_or_in_memory(
    mapped: MappedTensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: list[int], fits: bool
) -> None:
    monkeypatch.setattr(cache, "fits_in_memory", lambda size: fits)
    monkeypatch.setattr(cache, "BLOCK_ROWS", 2)
    consecutive = rows == list(range(rows[0], rows[0] + len(rows)))
    taken = select_rows(mapped, np.array(rows), tmp_path, "some")
    assert torch.equal(taken, mapped[rows]) and isinstance(taken, MappedTensor) == (consecutive or not fits)
    assert select_rows(torch.arange(10), np.array(rows), tmp_path, "some").tolist() == rows


def test_arrays_up_to_a_quarter_of_memory_fit() -> None:
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert fits_in_memory(1000) and not fits_in_memory(memory // 2)
