"""Would a local step in two compiled parts start faster than one compiled as a whole, and train as fast?

Examples:
    python studies/shared_compile.py                               # on a GPU: random images, cnn, bf16; a few minutes
    OMP_NUM_THREADS=1 python studies/shared_compile.py --small      # the same on a CPU, to try the script

Today the whole local step of an algorithm is compiled as one graph, so every algorithm compiles the model's forward and
backward pass again. The alternative compiles the pass on its own. Every algorithm then uses the same pass, and only
its update is compiled again. Each variant starts with an empty cache and runs in a process of its own: first FedAvg,
then FedSAM and SCAFFOLD, then all again in a second process, which finds the cache of the first. The table lists the
seconds of the first round, which include compiling and capturing, and the median seconds of later rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import islice
from statistics import median
from typing import Any

import torch
import torch._functorch.config as functorch_config
from torch import Tensor

import fedflat.experiment.setup.engine as setup
from fedflat.algorithms.algorithm import LocalState
from fedflat.bench.machine import hardware, versions
from fedflat.bench.setting import BenchmarkSetting
from fedflat.data.batches import Batch
from fedflat.engines.gpu.layers import with_gpu_layers
from fedflat.engines.gpu.step import LocalStep, StepResult, changing_tensors, compiled_step
from fedflat.engines.problem.problem import Problem
from fedflat.engines.round.contract import Training
from fedflat.experiment.config import config
from fedflat.experiment.run import Run

ALGORITHMS = ("fedavg", "fedsam", "scaffold")
Pass = Callable[[Tensor, Tensor, list[Tensor], Tensor, Tensor], list[Tensor]]
PASSES: list[Pass] = []
"""Compiled passes, which the operator ``run_pass`` finds by their position."""


@torch.library.custom_op("fedflat_study::run_pass", mutates_args=())
def run_pass(
    number: int, point: Tensor, statistics: Tensor, counters: list[Tensor], inputs: Tensor, targets: Tensor
) -> list[Tensor]:
    """Run a compiled pass as one operator, which is opaque to the compiler of the rest of the step."""
    return PASSES[number](point, statistics, counters, inputs, targets)


@run_pass.register_fake
def _(
    number: int, point: Tensor, statistics: Tensor, counters: list[Tensor], inputs: Tensor, targets: Tensor
) -> list[Tensor]:
    copies = [torch.empty_like(counter) for counter in counters]
    return [torch.empty_like(point), point.new_empty(()), torch.empty_like(statistics), *copies]


def two_part_step(problem: Problem, training: Training) -> LocalStep:
    """A local step whose pass and whose update are compiled separately; without mixup and teachers."""
    problem.set_training_mode()
    model = with_gpu_layers(problem.model)
    names = sorted(name for name, buffer in problem.model.named_buffers() if not buffer.is_floating_point())

    def one_pass(
        point: Tensor, statistics: Tensor, counters: list[Tensor], inputs: Tensor, targets: Tensor
    ) -> list[Tensor]:
        buffers = dict(zip(names, counters, strict=True))
        result = problem.functional_pass(point, statistics, buffers, Batch(inputs, targets), model)
        updated = [result.integer_buffers.get(name, buffers[name]).clone() for name in names]
        return [result.gradient, result.loss, result.statistics, *updated]

    functorch_config.check_custom_op_aliasing = False  # its check would compile the pass within a dispatch mode
    torch.compiler.reset()
    number = len(PASSES)
    PASSES.append(torch.compile(one_pass, dynamic=False, fullgraph=True))

    def step(
        local: LocalState,
        positions: Tensor,
        draws: dict[str, Tensor],
        statistics: Tensor,
        integer_buffers: dict[str, Tensor],
    ) -> StepResult:
        batch = problem.batch(positions, draws)
        counters = [integer_buffers[name] for name in names]
        results: list[list[Tensor]] = []

        def gradient(point: Tensor, teacher: None = None) -> Tensor:
            results.append(run_pass(number, point, statistics, counters, batch.inputs, batch.targets))
            return results[-1][0]

        new_local = training.algorithm.step(local, gradient, training.schedule, training.descent)
        _, loss, new_statistics, *new_counters = results[0]
        updated = dict(zip(names, new_counters, strict=True))
        return StepResult(changing_tensors(new_local), new_statistics, updated, loss, len(results))

    compiled_update: LocalStep = torch.compile(step, dynamic=False, fullgraph=True)
    is_compiled = False

    def two_parts(*arguments: Any) -> StepResult:
        """Compile the pass first, because torch cannot compile it while it executes the update for the first time."""
        nonlocal is_compiled
        if not is_compiled:
            local, positions, draws, statistics, integer_buffers = arguments
            batch = problem.batch(positions, draws)
            counters = [integer_buffers[name] for name in names]
            PASSES[number](local.drift.y, statistics, counters, batch.inputs, batch.targets)
            is_compiled = True
        return compiled_update(*arguments)

    return two_parts


STEPS: dict[str, Callable[[Problem, Training], LocalStep]] = {"whole step": compiled_step, "two parts": two_part_step}


def measure(variant: str, small: bool, rounds: int) -> dict[str, Any]:
    """Seconds of the first round and of later ones, and the last loss, of each algorithm."""
    setup.compiled_step = STEPS[variant]  # type: ignore[assignment]
    device = "cpu" if small else "cuda"
    setting = BenchmarkSetting(model="lenet5" if small else "cnn", device=device, local_steps=3 if small else 50)
    data = setting.load_data()
    table: dict[str, Any] = {}
    for algorithm in ALGORITHMS:
        values = setting.config(algorithm, "float32" if small else "bf16").model_dump()
        values["engine"] |= {"name": "lanes", "compile": "on"}
        values["training"]["rounds"] = values["evaluation"]["every"] = rounds + 2
        run = Run(config(values), data=data)
        steps, seconds = run.steps(), []
        for _ in range(rounds + 1):
            start = time.perf_counter()
            for _ in islice(steps, 1):
                pass
            if not small:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
        norm = float(run.models()["server"].weights.double().norm())
        table[algorithm] = {"first": seconds[0], "later": median(seconds[1:]), "norm": norm}
        steps.close()
    return table


def main() -> None:
    """Run every variant twice in processes of its own, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="lenet5 in float32 on a CPU")
    parser.add_argument("--rounds", type=int, default=None, help="timed rounds (default: 100, with --small 2)")
    parser.add_argument("--variant", choices=tuple(STEPS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    rounds = options.rounds or (2 if options.small else 100)
    if options.variant:
        print(json.dumps(measure(options.variant, options.small, rounds)))
        return
    print(hardware(), versions())
    print("| variant | process | algorithm | first round, s | later rounds, s | norm of the weights |")
    print("|---|---|---|---|---|---|")
    for variant in STEPS:
        with tempfile.TemporaryDirectory() as cache:
            for process in ("first", "second"):
                command = [sys.executable, __file__, *sys.argv[1:], "--variant", variant]
                environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache}
                output = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
                for algorithm, row in json.loads(output.splitlines()[-1]).items():
                    cells = f"{row['first']:.2f} | {row['later']:.4f} | {row['norm']:.6f}"
                    print(f"| {variant} | {process} | {algorithm} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
