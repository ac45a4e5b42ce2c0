"""A thousand rounds leave nothing behind, neither with the driver and its workers nor in the object store."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

import fedflat

from .federations import small

ROUNDS, EVERY = 1000, 50
ALLOWED = 8e6
"""Bytes; a broadcast of this model that stayed in each round would be six times as much by the end."""
pytestmark = pytest.mark.slow


class Looks(fedflat.Callback):
    """Takes note of memory every so many rounds."""

    def __init__(self, ray: Any) -> None:
        self.ray = ray
        self.driver: list[float] = []
        self.workers: list[float] = []
        self.store: list[float] = []

    def round_done(self, run: Any) -> None:
        if run.server.rounds % EVERY == 0:
            self.driver.append(own_bytes("self"))
            self.workers.append(sum(map(own_bytes, run.engine.crew.processes)))
            self.store.append(
                self.ray.cluster_resources()["object_store_memory"]
                - self.ray.available_resources()["object_store_memory"]
            )


def own_bytes(process: int | str) -> float:
    """Memory that is a process's own, without what it maps of the object store."""
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{process}/status").read_text().splitlines())
    return 1024.0 * int(lines["RssAnon"].split()[0])


def test_memory_is_flat_over_a_thousand_rounds(ray: Any, tmp_path: Path) -> None:
    looks = Looks(ray)
    settings = {
        "algorithm": "scaffold",
        "model": "mlp(hidden=200)",
        "clients_per_round": 2,
        "local_steps": 1,
        "rounds": ROUNDS,
        "eval_every": ROUNDS,
    }
    fedflat.run(base=small(**settings), engine="ray", workers=2, out=tmp_path / "run", callbacks=[looks])
    assert len(looks.driver) == ROUNDS // EVERY
    for name in ("driver", "workers", "store"):
        found = getattr(looks, name)
        print(f"{name}: {', '.join(f'{size / 1e6:.1f}' for size in found)} MB")
        first, last = found[2 : len(found) // 2], found[len(found) // 2 :]
        assert fmean(last) <= fmean(first) + ALLOWED, f"{name}: {found}"
    assert max(looks.store) < 40e6
