"""Memory of driver, workers and object store stays flat over hundreds of rounds."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

import fedflat

from .federations import small

ROUNDS, EVERY = 150, 5
ALLOWED = 28e6
"""Bytes of growth; memory varies by 16 MB, and leaking one broadcast per round would be 45 MB."""
pytestmark = pytest.mark.slow


class MemoryLog(fedflat.Callback):
    """Records memory every ``EVERY`` rounds."""

    def __init__(self, ray: Any) -> None:
        self.ray = ray
        self.driver: list[float] = []
        self.workers: list[float] = []
        self.store: list[float] = []

    def round_done(self, run: Any) -> None:
        if run.server.rounds % EVERY == 0:
            self.driver.append(own_bytes("self"))
            self.workers.append(sum(map(own_bytes, run.engine.pool.process_ids)))
            self.store.append(
                self.ray.cluster_resources()["object_store_memory"]
                - self.ray.available_resources()["object_store_memory"]
            )


def own_bytes(process: int | str) -> float:
    """Private memory of a process, without the object store."""
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{process}/status").read_text().splitlines())
    return 1024.0 * int(lines["RssAnon"].split()[0])


def test_memory_is_flat_over_hundreds_of_rounds(ray: Any, tmp_path: Path) -> None:
    log = MemoryLog(ray)
    settings = {
        "algorithm": "scaffold",
        "model": "mlp(hidden=3000)",
        "clients_per_round": 2,
        "local_steps": 1,
        "rounds": ROUNDS,
        "eval_every": ROUNDS,
    }
    fedflat.run(base=small(**settings), engine="ray", workers=2, out=tmp_path / "run", callbacks=[log])
    assert len(log.driver) == ROUNDS // EVERY
    for name in ("driver", "workers", "store"):
        sizes = getattr(log, name)
        print(f"{name}: {', '.join(f'{size / 1e6:.1f}' for size in sizes)} MB")
        third = len(sizes) // 3  # in the first third, allocators still grow
        first, last = sizes[third:-third], sizes[-third:]
        assert fmean(last) <= fmean(first) + ALLOWED, f"{name}: {sizes}"
    assert max(log.store) < 40e6
