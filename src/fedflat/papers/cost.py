"""How long runs take on the GPU on which the stored results were measured, estimated without data and without a GPU."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from statistics import median

from fedflat.algorithms import algorithm
from fedflat.data import DATASETS
from fedflat.experiment.campaign.estimate import PlannedRun
from fedflat.experiment.config import Config
from fedflat.papers.ledger import paper_config
from fedflat.papers.library import find_cell
from fedflat.papers.results import embedded_results
from fedflat.text import parse

HARDWARE = "NVIDIA H200"
BENCHMARKED = {"resnet18": 46_000, "vit-b16": 2_700, "resnet20": 116_000, "femnist-cnn": 220_000}
"""Per-example gradients per second in bf16, from docs/benchmarks.md, for models without stored results."""
EVALUATION = 1 / 3
"""Time to evaluate an example, relative to its gradient."""
_SIZES = re.compile(r"([\d,]+) / ([\d,]+)")


@dataclass(frozen=True)
class GpuTime:
    """Estimated time of several runs on one GPU, one after another.

    Attributes:
        seconds: time of the runs that can be estimated.
        runs: number of these runs.
        unknown: what is missing for the other runs, e.g. ``speed of vgg11`` or ``size of femnist``.
    """

    seconds: float
    runs: int
    unknown: tuple[str, ...]


def gpu_time(runs: Iterable[PlannedRun]) -> GpuTime:
    """Estimate how long the remaining rounds of runs take, from measured seconds per round of the same models."""
    seconds, count = 0.0, 0
    unknown: dict[str, None] = {}
    for run in runs:
        run_seconds = gpu_seconds(run.config, run.rounds_left)
        if run_seconds is not None:
            seconds, count = seconds + run_seconds, count + 1
        elif run.config.model not in speeds():
            unknown[f"speed of {run.config.model}"] = None
        else:
            unknown[f"size of {parse(run.config.data.dataset)[0].name}"] = None
    return GpuTime(seconds, count, tuple(unknown))


def gpu_seconds(config: Config, rounds: int) -> float | None:
    """Estimate how long a number of rounds takes; None if the speed of the model or the size of the data is unknown."""
    speed, sizes = speeds().get(config.model), dataset_sizes(config.data.dataset)
    return None if speed is None or sizes is None else _count_gradients(config, sizes, rounds) / speed


@cache
def speeds() -> dict[str, float]:
    """Return how many per-example gradients per second each model computes on ``HARDWARE``.

    The speed of a model is the median over its stored results; a model without results has a benchmarked speed.
    """
    measured: dict[str, list[float]] = {}
    for result in embedded_results():
        key = next(iter(result.cells))  # any cell that the run measures; all share its model and dataset
        config = paper_config(find_cell(result.paper, key), result)
        is_comparable = result.environment["hardware"] == HARDWARE and result.cost.seconds_per_round is not None
        sizes = dataset_sizes(config.data.dataset) if config else None
        has_paper_settings = result.kind == "paper"  # not tuned, and not measured with the authors' code
        if has_paper_settings and is_comparable and config and sizes:
            # Evaluations take time as well; the run may have had fewer of them than the paper's.
            measured_config = config.changed(evaluation={"every": result.protocol["eval_every"]})
            rounds = int(result.protocol["rounds"])
            gradients = _count_gradients(measured_config, sizes, rounds) / rounds
            # Runs that shared the GPU each took longer; this is the share of one of them.
            seconds = float(result.cost.seconds_per_round or 0) / result.cost.runs_at_once
            measured.setdefault(config.model, []).append(gradients / seconds)
    return BENCHMARKED | {model: median(values) for model, values in measured.items()}


def dataset_sizes(dataset: str) -> tuple[int, int] | None:
    """Return the numbers of training and test examples; None if they are not known without the data.

    >>> dataset_sizes("cifar10"), dataset_sizes("femnist")
    ((50000, 10000), None)
    """
    source = DATASETS.get(parse(dataset)[0].name)
    match = _SIZES.fullmatch(source.card.examples) if source else None
    return (int(match[1].replace(",", "")), int(match[2].replace(",", ""))) if match else None


def _count_gradients(config: Config, sizes: tuple[int, int], rounds: int) -> float:
    """Return how many per-example gradients a number of rounds computes; an evaluated example counts as a third of one.

    Args:
        config: the run.
        sizes: numbers of training and test examples.
        rounds: number of rounds.
    """
    training, evaluation, built = config.training, config.evaluation, algorithm(config.algorithm)
    per_client = training.local_epochs * sizes[0] / (config.data.clients or 1)  # examples of a client in one round
    if training.local_steps:
        per_client = training.local_steps * training.batch_size
    gradients = rounds * config.federation.clients_per_round * per_client * built.backward_passes
    evaluations = (rounds / evaluation.every + min(evaluation.final, rounds)) * (1 + len(built.averages))
    return gradients + EVALUATION * evaluations * min(sizes[1], evaluation.examples or sizes[1])
