"""The machine that is measured on: hardware, versions, and how much memory processes take."""

from __future__ import annotations

import os
import platform
import signal
import sys
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from fedflat.engines.cpu.worker_pool import available_cores

PACKAGES = ("fedflat", "torch", "numpy", "flwr", "ray", "pfl")
PROC = Path("/proc")


def hardware() -> dict[str, Any]:
    """Processor, cores, memory and GPUs."""
    return {
        "processor": _processor(),
        "cores": available_cores(),
        "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else None,
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        if torch.cuda.is_available()
        else [],
        "system": platform.platform(),
    }


def versions() -> dict[str, str]:
    """Python and the packages that matter, where they are installed."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    found["torch"] = torch.__version__
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    return found


def host_memory(root: int) -> int | None:
    """The most memory a process and all below it have had: each one's own, and what they share once; None where it cannot be known."""
    if not sys.platform.startswith("linux"):
        return None
    own, shared = 0, 0
    for pid in family(root):
        pages = _status(pid)
        if "VmHWM" in pages:
            own += pages["VmHWM"] - pages.get("RssFile", 0) - pages.get("RssShmem", 0)
            shared = max(shared, pages.get("RssShmem", 0))
    return own + shared or None


class Load:
    """How busy other processes keep the machine, from its making on."""

    def __init__(self) -> None:
        self._before = self._ticks()

    def share_of_others(self) -> float:
        """The share of all cores that processes other than this one and its children have taken; 0 where it cannot be known."""
        before, now = self._before, self._ticks()
        if before is None or now is None or now[0] <= before[0]:
            return 0.0
        whole, busy, own = (after - earlier for after, earlier in zip(now, before, strict=True))
        return max(0.0, (busy - own) / whole)

    def _ticks(self) -> tuple[int, int, int] | None:
        """Clock ticks of all cores, those that were not idle, and those of this process and its children."""
        if not sys.platform.startswith("linux"):
            return None
        ticks = [int(word) for word in (PROC / "stat").read_text().split("\n", 1)[0].split()[1:9]]
        idle = ticks[3] + ticks[4]
        return sum(ticks), sum(ticks) - idle, sum(_used(PROC / str(pid)) for pid in family(os.getpid()))


def rest(root: int, resting: bool) -> None:
    """Let a process and all below it lie still, or go on; where that is not possible they simply go on."""
    if not sys.platform.startswith("linux"):
        return
    for pid in family(root):
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGSTOP if resting else signal.SIGCONT)


def family(root: int) -> list[int]:
    """A process and all that descend from it."""
    parents = {int(path.name): _parent(path) for path in PROC.iterdir() if path.name.isdigit()}
    found = [root]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found


def _parent(process: Path) -> int:
    return int((_stat(process) or ["", "0"])[1])


def _used(process: Path) -> int:
    """The clock ticks that a process and what it has waited for have used."""
    return sum(int(word) for word in _stat(process)[11:15])


def _stat(process: Path) -> list[str]:
    """What the system says of a process, after its name."""
    try:
        return (process / "stat").read_text().rpartition(")")[2].split()
    except OSError:  # it has ended meanwhile
        return []


def _status(pid: int) -> dict[str, int]:
    """What the system says of a process's memory, in bytes."""
    try:
        lines = (PROC / str(pid) / "status").read_text().splitlines()
    except OSError:
        return {}
    return {
        name: int(value.split()[0]) * 1024
        for name, _, value in (line.partition(":") for line in lines)
        if value.endswith("kB")
    }


def _processor() -> str:
    information = PROC / "cpuinfo"
    lines = information.read_text().splitlines() if information.exists() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine()  # of ARM the system knows no names
