"""The number of usable cores: affinity mask and CPU quota."""

from __future__ import annotations

import math
import os

import pytest

from fedflat import processes
from fedflat.processes import available_cores

SECOND, FIRST = "0::/pod/mine\n", "3:memory:/x\n2:cpu,cpuacct:/pod/mine\n0::/\n"


@pytest.mark.parametrize(
    ("mine", "limits", "quota"),
    [
        (SECOND, {"pod/mine/cpu.max": "150000 100000"}, 1.5),
        (SECOND, {"pod/mine/cpu.max": "max 100000", "pod/cpu.max": "400000 100000"}, 4),
        ("0::/\n", {"cpu.max": "50000 100000"}, 0.5),
        (
            FIRST,
            {"cpu,cpuacct/pod/mine/cpu.cfs_quota_us": "-1", "cpu,cpuacct/pod/mine/cpu.cfs_period_us": "100000"},
            math.inf,
        ),
        (FIRST, {"cpu,cpuacct/cpu.cfs_quota_us": "300000", "cpu,cpuacct/cpu.cfs_period_us": "100000"}, 3),
        (FIRST, {"memory/x/cpu.max": "1 1"}, math.inf),
        ("", {}, math.inf),
    ],
)
def test_control_groups_limit_the_cores(tmp_path, monkeypatch, mine, limits, quota):
    (tmp_path / "mine").write_text(mine)
    for name, limit in limits.items():
        file = tmp_path / "groups" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(limit + "\n")
    monkeypatch.setattr(processes, "CGROUP_ROOT", tmp_path / "groups")
    monkeypatch.setattr(processes, "OWN_CGROUPS", tmp_path / "mine")
    assert processes.cpu_quota() == quota
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setattr(processes, "_core_limit", None)
    assert available_cores() == math.ceil(min(8, quota)), "the number of workers"
