"""How many cores there are to use: those that this process may run on, and no more than its container is given time for."""

from __future__ import annotations

import math
import os
from pathlib import Path

GROUPS, MINE = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def usable_cores() -> int:
    """The cores this process may run on, as far as its share of their time reaches; a part of one counts as one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.ceil(min(cores, granted(GROUPS, MINE))))


def granted(groups: Path, mine: Path) -> float:
    """How many cores' time Linux's control groups, as of ``docker --cpus``, let this process have; infinity without a limit.

    A group is held to the limits of all above it. ``cpu.max`` is of their second version, a quota and a period of their first.
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
            if quota.isdigit():  # not "max", and not -1
                most = min(most, int(quota) / int(period))
    return most


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""
