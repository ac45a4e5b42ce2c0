"""The number of CPU cores that this process may use."""

from __future__ import annotations

import math
import os
from pathlib import Path

GROUPS, MINE = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_limit: int | None = None


def use_cores(most: int) -> None:
    """Limit this process to ``most`` cores, if several processes share the machine."""
    global _limit  # noqa: PLW0603
    _limit = most


def available_cores() -> int:
    """Cores that this process may train on: its limit, or all usable ones."""
    return usable_cores() if _limit is None else _limit


def usable_cores() -> int:
    """Cores in this process's affinity mask, limited by its CPU quota (rounded up)."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.ceil(min(cores, granted(GROUPS, MINE))))


def granted(groups: Path, mine: Path) -> float:
    """The CPU quota of Linux control groups, as set by ``docker --cpus``, in cores; infinity without a limit.

    Args:
        groups: root of the cgroup file system.
        mine: the process's cgroup file. Limits of all parent groups apply. Version 2 writes ``cpu.max``,
            version 1 separate files for quota and period.
    """
    most = math.inf
    for line in _read(mine).splitlines():
        _, kinds, path = line.split(":", 2)
        if kinds and "cpu" not in kinds.split(","):
            continue
        group = groups / kinds
        for part in ("", *Path(path).parts[1:]):
            group /= part
            limit = (
                _read(group / "cpu.max") or f"{_read(group / 'cpu.cfs_quota_us')} {_read(group / 'cpu.cfs_period_us')}"
            )
            quota, _, period = limit.partition(" ")
            if quota.isdigit():  # neither "max" nor -1
                most = min(most, int(quota) / int(period))
    return most


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""
