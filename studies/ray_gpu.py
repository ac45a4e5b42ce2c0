"""Ray workers that each hold a GPU, against the lane engine on one GPU of this machine: the same models to rounding, and seconds a round.

    python studies/ray_gpu.py                     # on every GPU there is
    python studies/ray_gpu.py --workers 1

Needs a GPU and Ray (pip install "fedflat[ray]"); no data set. Ends with an error where a model differs by more than rounding.
"""

from __future__ import annotations

import argparse
import sys
import time
from statistics import median

import torch

import fedflat
from fedflat.experiment.run import Run

ALGORITHMS = ("fedavg", "scaffold", "mime", "fedsam", "fedmoswa+ema")
FEW, MANY = 10, 70
"""Clients a round: so few that their rows come back from the workers, and for each worker so many that they are summed where they are."""
ROUNDS = 5
ALLOWED = 1e-3
"""The norm of the difference of two models, over that of one; the order of sums on a GPU is not fixed."""


class Clock(fedflat.Callback):
    """Seconds of every round after the first, in which lanes are captured."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._last = 0.0

    def round_done(self, run: Run) -> None:
        torch.cuda.synchronize()
        now = time.perf_counter()
        if self._last:
            self.seconds.append(now - self._last)
        self._last = now


def weights(engine: str, algorithm: str, cohort: int, workers: int) -> tuple[torch.Tensor, float]:
    """The server's model after some rounds, and the seconds of one."""
    clock = Clock()
    result = fedflat.run(
        algorithm,
        model="mlp(hidden=200)",
        clients=100 * workers,
        per_round=cohort,
        split="iid",
        rounds=ROUNDS,
        every=ROUNDS,
        steps=10,
        batch=10,
        device="cuda",
        engine=engine,
        workers=workers if engine == "ray" else None,
        callbacks=[clock],
    )
    return result.record.models["server"].weights.double().cpu(), median(clock.seconds)


def main() -> None:
    reader = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    reader.add_argument("--workers", type=int, help="GPUs to use; default: all")
    workers = reader.parse_args().workers or torch.cuda.device_count()
    if not torch.cuda.is_available():
        sys.exit("torch sees no GPU here, and this compares Ray workers that hold one")
    worst = 0.0
    print(f"{torch.cuda.device_count()} GPUs, the first {torch.cuda.get_device_name()}; torch {torch.__version__}")
    for algorithm in ALGORITHMS:
        for cohort in (FEW, MANY * workers):
            lanes, alone = weights("lanes", algorithm, cohort, workers)
            ray, spread = weights("ray", algorithm, cohort, workers)
            gap = float((lanes - ray).norm() / lanes.norm())
            worst = max(worst, gap)
            print(f"{algorithm:14} {cohort:3} clients: gap {gap:.1e}, lanes {alone:.4f} s a round, ray {spread:.4f} s", flush=True)
    sys.exit(f"models differ by {worst:.1e}, which is more than rounding" if worst > ALLOWED else 0)


if __name__ == "__main__":
    main()
