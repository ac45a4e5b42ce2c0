"""The machine: hardware, versions, memory of processes, and load by other processes."""

from __future__ import annotations

import os
import platform
import signal
import sys
from contextlib import suppress
from importlib import metadata
from typing import Any

import torch

from fedflat.operating_system import PROC, descendants, process_stat, with_descendants
from fedflat.processes import available_cores

PACKAGES = ("fedflat", "torch", "numpy", "ray")


def hardware() -> dict[str, Any]:
    """Return the processor, cores, memory in bytes, GPUs and operating system."""
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
    return {
        "processor": _processor(),
        "cores": available_cores(),
        "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else None,
        "gpus": [torch.cuda.get_device_name(i) for i in gpus],
        "system": platform.platform(),
    }


def versions() -> dict[str, str]:
    """Return the versions of Python, CUDA and those of ``PACKAGES`` that are installed."""
    numbers = {"python": platform.python_version()}
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            numbers[name] = metadata.version(name)
    numbers["torch"] = torch.__version__
    if torch.version.cuda:
        numbers["cuda"] = torch.version.cuda
    return numbers


def host_memory(root: int) -> int | None:
    """Return the peak memory in bytes of a process and its descendants, shared memory counted once; None if unknown."""
    if not sys.platform.startswith("linux"):
        return None
    private, shared = 0, 0
    for pid in with_descendants(root):
        status = _memory_status(pid)
        if "VmHWM" in status:  # peak resident memory, including mapped files and shared memory
            private += status["VmHWM"] - status.get("RssFile", 0) - status.get("RssShmem", 0)
            shared = max(shared, status.get("RssShmem", 0))
    return private + shared or None


def cpu_seconds(root: int) -> float | None:
    """Return the CPU time, user and system, of a process and its descendants so far; None if unknown."""
    if not sys.platform.startswith("linux"):
        return None
    return sum(_used_ticks(pid) for pid in with_descendants(root)) / os.sysconf("SC_CLK_TCK")


class Load:
    """Measures the load on the machine by other processes, from the construction of this object on."""

    def __init__(self) -> None:
        self._before = self._ticks()

    def share_of_others(self) -> float:
        """Return the share of all cores used by processes other than this one and its descendants; 0 if unknown."""
        before, now = self._before, self._ticks()
        if before is None or now is None or now[0] <= before[0]:
            return 0.0
        # Differences of the three counts that ``_ticks`` returns.
        total, busy, used_here = (after - earlier for after, earlier in zip(now, before, strict=True))
        return max(0.0, (busy - used_here) / total)

    def _ticks(self) -> tuple[int, int, int] | None:
        """Return clock ticks of all cores: in total, not idle, and used by this process and its descendants."""
        if not sys.platform.startswith("linux"):
            return None
        first_line = (PROC / "stat").read_text().splitlines()[0]  # cpu user nice system idle iowait irq softirq steal
        ticks = [int(word) for word in first_line.split()[1:9]]
        idle = ticks[3] + ticks[4]
        used_here = sum(_used_ticks(pid) for pid in with_descendants(os.getpid()))
        return sum(ticks), sum(ticks) - idle, used_here


def set_paused(root: int, paused: bool) -> None:
    """Suspend or continue the descendants of a process; does nothing except on Linux.

    The process itself keeps running, so that it can kill its descendants if this process is killed.
    """
    for pid in descendants(root):
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGSTOP if paused else signal.SIGCONT)


def kill_group(leader: int) -> None:
    """Kill the processes in the group that a process leads, or led before it ended; does nothing on Windows."""
    if sys.platform != "win32":
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(leader, signal.SIGKILL)


def _used_ticks(pid: int) -> int:
    """Clock ticks used by a process and by children that it has waited for (utime, stime, cutime and cstime)."""
    return sum(int(word) for word in process_stat(pid)[11:15])


def _memory_status(pid: int) -> dict[str, int]:
    """The entries of ``/proc/PID/status`` about memory, in bytes; empty if the process has exited."""
    try:
        lines = (PROC / str(pid) / "status").read_text().splitlines()
    except OSError:
        return {}
    sizes = {}
    for line in lines:
        name, _, value = line.partition(":")
        if value.endswith("kB"):
            sizes[name] = int(value.split()[0]) * 1024
    return sizes


def _processor() -> str:
    """Return the name of the processor, or its architecture if the name is unknown."""
    cpuinfo = PROC / "cpuinfo"
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()  # ARM has no model name
