"""Compare Ray workers that hold a GPU with one process on the same GPU: models up to rounding, and time per round.

Examples:
    python studies/ray_gpu.py OUT                                           # random images, cnn, about a minute
    python studies/ray_gpu.py OUT --data-dir DATA                           # CIFAR-10
    python studies/ray_gpu.py OUT --device cpu --rounds 5 --model lenet5    # without a GPU

The effect of rounding is measured too: the same engine with another number of concurrent clients sums in another order.
The script fails if models trained by Ray differ by more than ten times that (on a CPU: at all), or if a Ray cluster
without a GPU does not report it. Requires Ray (pip install "fedflat[ray]"). OUT/ray_gpu.json holds the numbers.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch

import fedflat
from fedflat.bench.machine import hardware, versions
from fedflat.bench.setting import RandomImages
from fedflat.experiment.run import Run
from fedflat.experiment.store.files import create_folder, write_atomically

ALGORITHMS = ("fedavg", "fedmoswa")
WARM_UP = 3
"""Rounds that are not timed: lanes are captured in them."""
IMAGES = 20_000
OTHER_LANES = 3
ALLOWED = 10.0
"""Largest allowed difference of models, in multiples of the difference that rounding makes."""
LEAST = 1e-6
"""A relative difference that is always allowed."""
RUN_WITHOUT_GPU = "import fedflat; fedflat.run('fedavg', rounds=1, engine='ray', device='cuda', workers=1)"
EXPECTED_WORDS = ("Ray", "GPU")
"""In the error that a Ray cluster without a GPU must raise."""


class WorkerClock(fedflat.Callback):
    """Records when each round ended, including work queued on the GPU, and how long the slowest worker trained."""

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.training: list[float] = []

    def round_done(self, run: Run) -> None:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        self.ends.append(time.perf_counter())
        self.training.append(getattr(run.engine, "slowest", float("nan")))

    @property
    def seconds_per_round(self) -> float:
        """Median after the warm-up."""
        return median(after - before for before, after in pairwise(self.ends[WARM_UP - 1 :]))


class EngineComparison:
    """Trains the same experiment on several engines."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.rows: list[dict[str, Any]] = []
        random_images: dict[str, Any] = {"data": RandomImages(size=IMAGES).dataset()}
        cifar10 = {"dataset": "cifar10", "data_dir": options.data_dir}
        self.data = cifar10 if options.data_dir else random_images
        self.reference: dict[str, torch.Tensor] = {}
        self.allowed: dict[str, float] = {}

    @property
    def single_process(self) -> str:
        """The engine that each Ray worker uses."""
        return "lanes" if self.options.device == "cuda" else "loop"

    def train(self, label: str, algorithm: str, engine: str, **settings: Any) -> dict[str, Any]:
        """Train, and compare the global model with that of the first engine."""
        options, clock = self.options, WorkerClock()
        start = time.perf_counter()
        result = fedflat.run(
            algorithm,
            model=options.model,
            partition="iid",
            clients=100,
            clients_per_round=options.clients_per_round,
            rounds=options.rounds,
            eval_every=options.rounds,
            local_steps=options.local_steps,
            batch_size=50,
            lr=0.05,
            device=options.device,
            engine=engine,
            evaluation__examples=500,
            engine__precision="float32",
            callbacks=[clock],
            **self.data,
            **settings,
        )
        weights = result.record.models["server"].weights.double().cpu()
        reference = self.reference.setdefault(algorithm, weights)
        row = {
            "algorithm": algorithm,
            "engine": label,
            "seconds_per_round": clock.seconds_per_round,
            "seconds_in_workers": median(clock.training[WARM_UP:]),
            "difference": float((weights - reference).norm() / reference.norm()),
            "total_seconds": time.perf_counter() - start,
        }
        self.rows.append(row)
        print(f"{algorithm}, {label}: {row['total_seconds']:.1f} s in total", flush=True)
        return row

    def train_in_this_process(self) -> None:
        """Train the reference, and measure the effect of rounding."""
        for algorithm in ALGORITHMS:
            self.train(self.single_process, algorithm, self.single_process, workers=1)
            self.allowed[algorithm] = 0.0
            if self.options.device == "cuda":
                row = self.train(f"lanes, {OTHER_LANES} at a time", algorithm, "lanes", engine__lanes=OTHER_LANES)
                self.allowed[algorithm] = max(LEAST, ALLOWED * row["difference"])

    def train_with_ray(self) -> list[str]:
        """Train on one worker and on two; returns what went wrong."""
        errors = []
        device = "the GPU" if self.options.device == "cuda" else "cores"
        for workers, label in ((1, f"ray, 1 worker on {device}"), (2, f"ray, 2 workers on {device}")):
            for algorithm in ALGORITHMS:
                difference = self.train(label, algorithm, "ray", workers=workers)["difference"]
                allowed = self.allowed[algorithm]
                if difference > allowed:
                    errors.append(f"{algorithm} on {label} differs by {difference:.1e}; allowed: {allowed:.1e}")
        return errors

    def table(self) -> str:
        """The numbers as text, one line per run."""
        lines = [f"{'algorithm':10} {'engine':30} {'s/round':>8} {'in workers':>11} {'relative':>9} {'difference':>10}"]
        single = {
            row["algorithm"]: row["seconds_per_round"] for row in self.rows if row["engine"] == self.single_process
        }
        for row in sorted(self.rows, key=lambda row: ALGORITHMS.index(row["algorithm"])):
            seconds = row["seconds_per_round"]
            times = f"{seconds:8.4f} {row['seconds_in_workers']:11.4f} {seconds / single[row['algorithm']]:9.2f}"
            lines.append(f"{row['algorithm']:10} {row['engine']:30} {times} {row['difference']:10.1e}")
        return "\n".join(lines)


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="directory of the numbers")
    parser.add_argument("--data-dir", type=Path, help="directory of CIFAR-10 (default: random images)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--model", default="cnn")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--local-steps", type=int, default=20)
    parser.add_argument("--clients-per-round", type=int, default=10)
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("torch finds no GPU; use --device cpu")
    if options.rounds < WARM_UP + 2:
        sys.exit(f"--rounds {options.rounds} is too small; expected at least {WARM_UP + 2}, {WARM_UP} of them warm-up")
    return options


def main() -> None:
    """Run the comparison; exits with an error if something differs."""
    options = parse_arguments()
    start = time.perf_counter()
    comparison = EngineComparison(options)
    comparison.train_in_this_process()
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", RUN_WITHOUT_GPU]
    without_gpu = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    errors = comparison.train_with_ray()
    message = without_gpu.communicate(timeout=120)[1].strip().splitlines()[-1]
    if not all(word in message for word in EXPECTED_WORDS):
        errors.append(f"a Ray cluster without a GPU reported: {message}")
    document = {
        "hardware": hardware(),
        "versions": versions(),
        "options": {name: str(value) for name, value in vars(options).items()},
        "rows": comparison.rows,
        "without_gpu": message,
        "errors": errors,
    }
    create_folder(options.out)
    write_atomically(options.out / "ray_gpu.json", json.dumps(document, indent=2))
    gpus = ", ".join(hardware()["gpus"] or ["none"])
    setting = f"{options.clients_per_round} clients x {options.local_steps} steps x batch size 50"
    print(f"\nA Ray cluster without a GPU reports: {message}")
    print(f"GPUs: {gpus}; torch {torch.__version__}; {time.perf_counter() - start:.0f} s in total")
    print(f"{options.model}, {setting}, {options.rounds} rounds")
    print(comparison.table(), flush=True)
    sys.exit("; ".join(errors) if errors else 0)


if __name__ == "__main__":
    main()
