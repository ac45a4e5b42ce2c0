"""What virtual time costs: seconds per round without a clock, with one, and with FedBuff doing the same work.

    python studies/clock_cost.py --dataset cifar10 --model cnn --rounds 1000

The targets are at most 1.02 for the clock and, on a GPU, at most 1.3 for FedBuff, as multiples of the time without.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import fedflat

CLOCK = "lognormal(sigma=0.6)+uplink(mbps=10)"
WARM_UP = 3
"""Rounds that are not timed, because engines allocate memory and capture steps in them."""


class RoundTimes(fedflat.Callback):
    """Collects the time at the end of every round."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def round_done(self, run: Any) -> None:
        """Wait for the device, and take the time."""
        run.loss  # noqa: B018  reading the loss waits for a GPU
        self.ends.append(time.perf_counter())

    @property
    def mean(self) -> float:
        """Mean seconds per round."""
        return (self.ends[-1] - self.ends[WARM_UP]) / (len(self.ends) - 1 - WARM_UP)


def seconds_per_round(arguments: argparse.Namespace, **settings: Any) -> float:
    """Mean seconds per round of a run."""
    times = RoundTimes()
    fedflat.run(
        arguments.algorithm,
        dataset=arguments.dataset,
        data_dir=arguments.data_dir,
        model=arguments.model,
        rounds=arguments.rounds,
        clients=100,
        clients_per_round=10,
        local_steps=arguments.local_steps,
        eval_every=arguments.rounds,
        workers=1,
        callbacks=times,
        progress=False,
        **settings,
    )
    return times.mean


def main(words: list[str] | None = None) -> None:
    """Measure and print the three times; each is the best of several repetitions, which alternate."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--algorithm", default="fedavg", help="algorithm")
    parser.add_argument("--dataset", default="digits", help="dataset")
    parser.add_argument("--data-dir", type=Path, default=None, help="directory of its files")
    parser.add_argument("--model", default="mlp", help="model")
    parser.add_argument("--rounds", type=int, default=100, help="rounds of each run")
    parser.add_argument("--local-steps", type=int, default=20, help="local steps per round")
    parser.add_argument("--repetitions", type=int, default=3, help="runs of each kind")
    arguments = parser.parse_args(words)
    kinds: dict[str, dict[str, Any]] = {
        "without a clock": {},
        "with a clock": {"clock": CLOCK},
        "fedbuff": {"clock": CLOCK, "policy": "fedbuff(buffer=10)"},
    }
    best = dict.fromkeys(kinds, float("inf"))
    for _ in range(arguments.repetitions):
        for kind, settings in kinds.items():
            best[kind] = min(best[kind], seconds_per_round(arguments, **settings))
    for kind, seconds in best.items():
        print(f"{kind:16} {1000 * seconds:8.2f} ms per round  {seconds / best['without a clock']:.3f}x")


if __name__ == "__main__":
    try:
        main()
    except fedflat.UserError as error:
        sys.exit(f"clock_cost: {error}")
