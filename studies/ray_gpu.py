"""Ray workers that hold a GPU, alone and two to one, against one process on the same GPU: the same models to rounding, and seconds a round.

python studies/ray_gpu.py OUT                                  random images, cnn, FedAvg and FedMoSWA, 30 rounds: about a minute
python studies/ray_gpu.py OUT --dataset FOLDER                    CIFAR-10 from a folder
python studies/ray_gpu.py OUT --device cpu --rounds 5 --model lenet5     what can be tried without a GPU

What rounding comes to is measured, too: by the engine itself with another number of clients side by side, which sums in another order.
Ends with an error where models of Ray differ from those by more than ten times that (on a CPU: by a bit), or where a Ray without a GPU
does not say so. Needs Ray (pip install "fedflat[ray]"). OUT/ray_gpu.json has the figures.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

import fedflat
from fedflat.bench.machine import hardware, versions
from fedflat.bench.setting import RandomImages
from fedflat.experiment.run import Run
from fedflat.experiment.store.atomic_files import create_folder, write_whole

ALGORITHMS = ("fedavg", "fedmoswa")
WARM_UP = 3
"""Rounds that do not count: lanes are captured in them."""
IMAGES = 20_000
OTHER_LANES = 3
ALLOWED = 10.0
"""Times the gap of rounding."""
LEAST = 1e-6
"""A gap that rounding may have in any case."""
WITHOUT = "import fedflat; fedflat.run('fedavg', rounds=1, engine='ray', device='cuda', workers=1)"
SENTENCE = "no node of the Ray cluster has a GPU"


class Clock(fedflat.Callback):
    """Notes when each round has ended, on the GPU too."""

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.training: list[float] = []

    def round_done(self, run: Run) -> None:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        self.ends.append(time.perf_counter())
        self.training.append(getattr(run.engine, "slowest", float("nan")))

    @property
    def seconds(self) -> float:
        """A round, without the first ones."""
        return median(
            after - before for before, after in zip(self.ends[WARM_UP - 1 :], self.ends[WARM_UP:], strict=False)
        )


class Study:
    """Trains the same experiment in several ways."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.rows: list[dict[str, Any]] = []
        own: dict[str, Any] = {"data": RandomImages(size=IMAGES).dataset()}
        self.data = {"data": "cifar10", "data__dir": options.data} if options.data else own
        self.first: dict[str, torch.Tensor] = {}
        self.allowed: dict[str, float] = {}

    @property
    def alone(self) -> str:
        """The engine that Ray's workers have, too."""
        return "lanes" if self.options.device == "cuda" else "loop"

    def train(self, what: str, algorithm: str, engine: str, **settings: Any) -> dict[str, Any]:
        """Train, and compare the server's model with that of the first way."""
        o, clock = self.options, Clock()
        begun = time.perf_counter()
        result = fedflat.run(
            algorithm,
            model=o.model,
            partition="iid",
            clients=100,
            clients_per_round=o.clients_per_round,
            rounds=o.rounds,
            eval_every=o.rounds,
            local_steps=o.steps,
            batch_size=50,
            lr=0.05,
            device=o.device,
            engine=engine,
            evaluation__examples=500,
            callbacks=[clock],
            **self.data,
            **settings,
        )
        weights = result.record.models["server"].weights.double().cpu()
        first = self.first.setdefault(algorithm, weights)
        row = {
            "algorithm": algorithm,
            "what": what,
            "seconds_per_round": clock.seconds,
            "seconds_in_workers": median(clock.training[WARM_UP:]),
            "gap": float((weights - first).norm() / first.norm()),
            "seconds_in_all": time.perf_counter() - begun,
        }
        self.rows.append(row)
        print(f"{algorithm}, {what}: {row['seconds_in_all']:.1f} s in all", flush=True)
        return row

    def train_alone(self) -> None:
        """Train in this process; what rounding comes to is what changes with another order of sums."""
        for algorithm in ALGORITHMS:
            self.train(self.alone, algorithm, self.alone, workers=1)
            self.allowed[algorithm] = 0.0
            if self.options.device == "cuda":
                other = self.train(f"lanes, {OTHER_LANES} side by side", algorithm, "lanes", engine__lanes=OTHER_LANES)
                self.allowed[algorithm] = max(LEAST, ALLOWED * other["gap"])

    def train_with_ray(self) -> list[str]:
        """Train on one worker and on two; returns what is wrong."""
        wrong = []
        for workers in (1, 2):
            place = "the GPU" if self.options.device == "cuda" else "cores"
            for algorithm in ALGORITHMS:
                row = self.train(
                    f"ray, {workers} worker{'s' * (workers > 1)} on {place}", algorithm, "ray", workers=workers
                )
                allowed = self.allowed[algorithm]
                if row["gap"] > allowed:
                    wrong.append(
                        f"{algorithm} with {workers} workers differs by {row['gap']:.1e}, and {allowed:.1e} are allowed"
                    )
        return wrong

    def table(self) -> str:
        """The figures, a line each."""
        lines = [f"{'algorithm':10} {'engine':30} {'s/round':>8} {'in workers':>11} {'times alone':>12} {'gap':>9}"]
        alone = {row["algorithm"]: row["seconds_per_round"] for row in self.rows if row["what"] == self.alone}
        for row in sorted(self.rows, key=lambda row: ALGORITHMS.index(row["algorithm"])):
            seconds = row["seconds_per_round"]
            times = f"{seconds / alone[row['algorithm']]:12.2f}"
            lines.append(
                f"{row['algorithm']:10} {row['what']:30} {seconds:8.4f} {row['seconds_in_workers']:11.4f} {times} {row['gap']:9.1e}"
            )
        return "\n".join(lines)


def main() -> None:
    reader = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    reader.add_argument("out", type=Path, help="folder for the figures")
    reader.add_argument("--dataset", type=Path, help="folder with CIFAR-10; default: random images")
    reader.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    reader.add_argument("--model", default="cnn")
    reader.add_argument("--rounds", type=int, default=30)
    reader.add_argument("--local-steps", type=int, default=20)
    reader.add_argument("--clients-per-round", type=int, default=10)
    options = reader.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("torch sees no GPU here, and this compares Ray workers that hold one; try --device cpu")
    if options.rounds < WARM_UP + 2:
        sys.exit(f"--rounds {options.rounds} are too few: {WARM_UP} do not count, and two more are needed")
    begun = time.perf_counter()
    study = Study(options)
    study.train_alone()
    blind = subprocess.Popen(
        [sys.executable, "-c", WITHOUT],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        stderr=subprocess.PIPE,
        text=True,
    )
    wrong = study.train_with_ray()
    told = blind.communicate(timeout=120)[1].strip().splitlines()[-1]
    if SENTENCE not in told:
        wrong.append(f"a Ray without a GPU said: {told}")
    found = {
        "hardware": hardware(),
        "versions": versions(),
        "options": {k: str(v) for k, v in vars(options).items()},
        "rows": study.rows,
    }
    create_folder(options.out)
    write_whole(
        options.out / "ray_gpu.json", json.dumps({**found, "without_gpu": told, "wrong": wrong}, indent=2).encode()
    )
    gpus = hardware()["gpus"] or ["none"]
    print(f"\na Ray without a GPU says: {told}")
    print(f"GPUs: {', '.join(gpus)}; torch {torch.__version__}; {time.perf_counter() - begun:.0f} s in all")
    print(
        f"{options.model}, {options.clients_per_round} clients x {options.steps} steps x batch 50, {options.rounds} rounds"
    )
    print(study.table(), flush=True)
    sys.exit("; ".join(wrong) if wrong else 0)


if __name__ == "__main__":
    main()
