"""Cost of virtual time: rounds without a clock, with one, and FedBuff updates with the same work.

Examples:
    OMP_NUM_THREADS=1 python studies/clock_cost.py                  # digits, mlp, 60 rounds; about a minute
    python studies/clock_cost.py --device cuda                      # random images, cnn, bf16, 1,000 rounds
    python studies/clock_cost.py --device cuda --data-dir DATA      # the same on CIFAR-10

Three runs alternate in blocks of rounds in one process, so that other load affects all of them alike. The targets are
at most 2 % of a round for the clock and, on a GPU, at most 1.3 times the synchronous time for FedBuff. Times on a CPU
are CPU times of the process.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Generator
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import torch

from fedflat import UserError
from fedflat.bench.machine import hardware, versions
from fedflat.bench.setting import BenchmarkSetting
from fedflat.experiment.config import parse_config
from fedflat.experiment.run import Run

CLOCK = "lognormal(sigma=0.6)+uplink(mbps=10)"
POLICY = "fedbuff(buffer=10)"
BLOCKS = 20
WARM_UP = {"cpu": 2, "cuda": 20}
"""Rounds that are not timed: lanes are compiled and captured in them, and FedBuff starts additional clients."""


class TimedRun:
    """A run whose rounds are timed in blocks.

    Attributes:
        run: the run.
        block_seconds: duration of each block of rounds.
    """

    def __init__(
        self, setting: BenchmarkSetting, data: Any, rounds: int, algorithm: str, precision: str, **federation: str
    ) -> None:
        """Build a run with the given number of timed rounds; ``federation`` may set its clock and policy."""
        values = setting.config(algorithm, precision).model_dump()
        values["federation"] |= federation
        # One more round, which is not executed, because the last round ends with an evaluation.
        values["training"]["rounds"] = values["evaluation"]["every"] = WARM_UP[setting.device] + rounds + 1
        self.run = Run(parse_config(values), data=data)
        self.block_seconds: list[float] = []
        self._steps: Generator[int, None, None] = self.run.train_rounds()

    def advance(self, rounds: int) -> float:
        """Train some rounds and wait for a GPU; returns the duration in seconds, on a CPU that of this process."""
        gpu = self.run.problem.device.type == "cuda"
        # Without a GPU, all work is done in this process, whose CPU time does not include waiting for other processes.
        now = time.perf_counter if gpu else time.process_time
        start = now()
        for _ in islice(self._steps, rounds):
            pass
        if gpu:
            torch.cuda.synchronize()
        return now() - start

    def scheduling_seconds(self, rounds: int = 500) -> float:
        """Mean time to determine the clients of a round and, with a clock, their times."""
        first = self.run.rounds + 1
        start = time.process_time()
        for round in range(first, first + rounds):
            self.run.timeline.upcoming(round)
        return (time.process_time() - start) / rounds

    def close(self) -> None:
        """End the run early."""
        self._steps.close()


def parse_arguments(words: list[str] | None) -> argparse.Namespace:
    """Parse the command line; defaults depend on the device."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--algorithm", default="fedavg")
    parser.add_argument("--data-dir", type=Path, help="directory of CIFAR-10 (default: digits, on a GPU random images)")
    parser.add_argument("--model", help="default: mlp, on a GPU cnn")
    parser.add_argument("--rounds", type=int, help=f"a multiple of {BLOCKS} (default: 60, on a GPU 1,000)")
    parser.add_argument("--local-steps", type=int, help="local steps per round (default: 20, on a GPU 50)")
    parser.add_argument("--precision", help="default: float32, on a GPU bf16")
    options = parser.parse_args(words)
    gpu = options.device == "cuda"
    if gpu and not torch.cuda.is_available():
        parser.error("torch finds no GPU; use --device cpu")
    defaults = {"model": "cnn", "rounds": 1000, "local_steps": 50, "precision": "bf16"}
    if not gpu:
        defaults = {"model": "mlp", "rounds": 60, "local_steps": 20, "precision": "float32"}
    for name, value in defaults.items():
        setattr(options, name, getattr(options, name) or value)
    if options.rounds < BLOCKS or options.rounds % BLOCKS:
        parser.error(f"--rounds {options.rounds} is not a multiple of {BLOCKS}; use {BLOCKS}, {2 * BLOCKS}, ...")
    return options


def main(words: list[str] | None = None) -> None:
    """Measure and print the times."""
    options = parse_arguments(words)
    gpu, start = options.device == "cuda", time.perf_counter()
    setting = BenchmarkSetting(
        model=options.model,
        dataset="cifar10" if options.data_dir else "random" if gpu else "digits",
        data_dir=options.data_dir,
        local_steps=options.local_steps,
        batch_size=50 if gpu else 10,
        device=options.device,
        workers=1,
    )
    federations = {"synchronous": {}, "with a clock": {"clock": CLOCK}, "fedbuff": {"clock": CLOCK, "policy": POLICY}}
    data = setting.load_data()
    runs = {
        kind: TimedRun(setting, data, options.rounds, options.algorithm, options.precision, **federation)
        for kind, federation in federations.items()
    }
    for timed in runs.values():
        timed.advance(WARM_UP[options.device])
    passes = {kind: -timed.run.server.cost.backward_passes for kind, timed in runs.items()}
    for block in range(BLOCKS):
        order = list(runs.values())
        for timed in order if block % 2 else order[::-1]:
            timed.block_seconds.append(timed.advance(options.rounds // BLOCKS))
    machine, packages = hardware(), versions()
    print(
        f"{machine['gpus'] or machine['processor']}, {machine['cores']} cores, {torch.get_num_threads()} torch threads"
    )
    print(f"Python {packages['python']}, torch {packages['torch']}")
    print(f"{setting.dataset}, {setting.model}, {options.algorithm}, {options.precision}, ", end="")
    print(f"10 of 100 clients, {setting.local_steps} steps with batch size {setting.batch_size}\n")
    baseline = runs["synchronous"]
    print("median and range: time of a block relative to the synchronous run")
    print(f"{f'{options.rounds} rounds':14} {'seconds':>8} {'ms/round':>9} {'median':>9} {'range':>14} {'passes':>9}")
    for kind, timed in runs.items():
        total = sum(timed.block_seconds)
        ratios = [own / other for own, other in zip(timed.block_seconds, baseline.block_seconds, strict=True)]
        passes[kind] += timed.run.server.cost.backward_passes
        spread = f"{min(ratios):.3f} to {max(ratios):.3f}"
        numbers = f"{total:8.2f} {1000 * total / options.rounds:9.2f} {median(ratios):9.3f} {spread:>14}"
        print(f"{kind:14} {numbers} {passes[kind]:9}")
    own = runs["with a clock"].scheduling_seconds() - baseline.scheduling_seconds()
    per_round = sum(baseline.block_seconds) / options.rounds
    total_ratio = sum(runs["fedbuff"].block_seconds) / sum(baseline.block_seconds)
    print(f"\nclock: {1e6 * own:.0f} us per round, {100 * own / per_round:.2f} % of a round (target: at most 2 %)")
    print(f"fedbuff: {total_ratio:.3f} times the total synchronous time (target on a GPU: at most 1.3)")
    for timed in runs.values():
        timed.close()
    print(f"{time.perf_counter() - start:.0f} s in all, with {WARM_UP[options.device]} rounds of warm-up per run")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"clock_cost: {error}")
