"""How long runs take on the GPU on which the stored results were measured, estimated without data and without a GPU."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from statistics import median

from fedflat.algorithms import algorithm
from fedflat.data import DATASETS, dataset_source
from fedflat.data.partition import partition_spec
from fedflat.data.sources.domains import DomainFolders
from fedflat.data.sources.leaf import Leaf
from fedflat.experiment.campaign.estimate import PlannedRun
from fedflat.experiment.config import Config
from fedflat.papers.ledger import paper_config
from fedflat.papers.library import find_cell
from fedflat.papers.results import embedded_results
from fedflat.text import parse

HARDWARE = "NVIDIA H200"
BENCHMARKED = {
    "resnet18": 46_000 * 32**2,
    "vit-b16": 2_700 * 224**2,
    "resnet20": 116_000 * 32**2,
    "femnist-cnn": 220_000 * 28**2,
}
"""Per-example gradients x pixels per second in bf16, for models without stored results.

Measured in docs/benchmarks.md and, for ``vit-b16``, studies/results/vit_round.json.
"""
WIDER = {"lenet5": "cnn"}
"""By model without a measured speed: a measured model with the same, but wider layers, which takes at least as long."""
EVALUATION = 1 / 3
"""Time to evaluate an example, relative to its gradient."""
LEAF_TRAINING = {"femnist": 0.9, "shakespeare": 0.8}
"""Share of the examples that LEAF's script, called as in docs/data.md, puts into the training set."""
_SIZES = re.compile(r"([\d,]+) / ([\d,]+)")
_SHAPE = re.compile(r"\d+x(\d+)x(\d+)")
_NUMBER = re.compile(r"\d[\d,]*")


@dataclass(frozen=True)
class GpuTime:
    """Estimated time of several runs on one GPU, one after another.

    Attributes:
        seconds: time of the runs that can be estimated.
        runs: number of these runs.
        unknown: what is unknown of the other runs, e.g. ``speed of vgg11`` or ``size of cityscapes``.
        unknown_runs: number of the other runs.
        bounded: models of runs whose ``seconds`` are those of a wider model, e.g. ``lenet5 at most as long as cnn``.
    """

    seconds: float
    runs: int
    unknown: tuple[str, ...]
    unknown_runs: int = 0
    bounded: tuple[str, ...] = ()


@dataclass(frozen=True)
class DatasetFacts:
    """Published facts about a dataset, which are known without its files.

    Attributes:
        training: number of training examples.
        test: number of test examples.
        pixels: pixels of an image, as trained on; 1 for other examples.
        clients: number of natural clients; None without any.
    """

    training: int
    test: int
    pixels: int
    clients: int | None


def gpu_time(runs: Iterable[PlannedRun]) -> GpuTime:
    """Estimate how long the remaining rounds of runs take, from measured seconds per round of the same models."""
    seconds, count, unknown_runs = 0.0, 0, 0
    unknown: dict[str, None] = {}
    bounded: dict[str, None] = {}
    for run in runs:
        model = run.config.model
        estimate = _seconds_or_unknown(run.config, run.rounds_left)
        if isinstance(estimate, str):
            unknown_runs += 1
            unknown[estimate] = None
            continue
        seconds, count = seconds + estimate, count + 1
        if model in WIDER and model not in speeds():
            bounded[f"{model} at most as long as {WIDER[model]}"] = None
    return GpuTime(seconds, count, tuple(unknown), unknown_runs, tuple(bounded))


def gpu_seconds(config: Config, rounds: int) -> float | None:
    """Estimate how long a number of rounds takes; None if it cannot be estimated.

    Time is taken to grow in proportion to the number of pixels.
    """
    estimate = _seconds_or_unknown(config, rounds)
    return None if isinstance(estimate, str) else estimate


def _seconds_or_unknown(config: Config, rounds: int) -> float | str:
    """Estimate how long a number of rounds takes, or return what is unknown, e.g. ``speed of vgg11``."""
    speed, facts = _speed(config.model), dataset_facts(config.data.dataset)
    if speed is None:
        return f"speed of {config.model}"
    if facts is None:
        return f"size of {parse(config.data.dataset)[0].name}"
    gradients = _count_gradients(config, facts, rounds)
    return "number of clients" if gradients is None else gradients * facts.pixels / speed


def _speed(model: str) -> float | None:
    """Return the measured speed of a model, or of a wider one; None if neither is known."""
    return speeds().get(model) or speeds().get(WIDER.get(model, ""))


@cache
def speeds() -> dict[str, float]:
    """Return how many per-example gradients x pixels per second each model computes on ``HARDWARE``.

    The speed of a model is the median over its stored results; a model without results has a benchmarked speed.
    """
    measured: dict[str, list[float]] = {}
    for result in embedded_results():
        key = next(iter(result.cells))  # any cell that the run measures; all share its model and dataset
        config = paper_config(find_cell(result.paper, key), result)
        is_comparable = result.environment["hardware"] == HARDWARE and result.cost.seconds_per_round is not None
        facts = dataset_facts(config.data.dataset) if config else None
        has_paper_settings = result.kind == "paper"  # not tuned, and not measured with the authors' code
        if has_paper_settings and is_comparable and config and facts:
            # Evaluations take time as well; the run may have had fewer of them than the paper's.
            measured_config = config.changed(evaluation={"every": result.protocol["eval_every"]})
            rounds = int(result.protocol["rounds"])
            gradients = (_count_gradients(measured_config, facts, rounds) or 0) / rounds
            # Runs that shared the GPU each took longer; this is the share of one of them.
            seconds = float(result.cost.seconds_per_round or 0) / result.cost.runs_at_once
            measured.setdefault(config.model, []).append(gradients * facts.pixels / seconds)
    return BENCHMARKED | {model: median(values) for model, values in measured.items()}


@cache
def dataset_facts(dataset: str) -> DatasetFacts | None:
    """Return the published facts about a dataset; None if its numbers of examples or pixels are not known.

    >>> dataset_facts("cifar10")
    DatasetFacts(training=50000, test=10000, pixels=1024, clients=None)
    >>> dataset_facts("office_home(test_domain=Art)")
    DatasetFacts(training=13161, test=2427, pixels=4096, clients=3)
    """
    if parse(dataset)[0].name not in DATASETS:
        return None
    source = dataset_source(dataset)
    card, clients = source.card, _numbers(source.card.clients)
    training, test, natural = 0, 0, clients[0] if clients else None
    if isinstance(source, Leaf):
        total = _numbers(card.examples)[0]
        training = round(LEAF_TRAINING[source.name] * total)
        test = total - training
    elif isinstance(source, DomainFolders) and source.sizes and source.options.test_domain:
        test_domain = source.find_test_domain(list(source.sizes))
        test = source.sizes.get(test_domain or "", 0)
        training, natural = sum(source.sizes.values()) - test, len(source.sizes) - 1
    elif _SIZES.fullmatch(card.examples):
        training, test = _numbers(card.examples)
    shape = _SHAPE.match(card.shape)
    height, width = (int(shape[1]), int(shape[2])) if shape else (1, 1)
    size = getattr(source.options, "size", height)  # the option scales both sides
    return DatasetFacts(training, test, round(width * size**2 / height), natural) if training and size else None


def _numbers(text: str) -> list[int]:
    """Return the numbers in a text.

    >>> _numbers("writers, up to 3,550"), _numbers("-")
    ([3550], [])
    """
    return [int(number.replace(",", "")) for number in _NUMBER.findall(text)]


def _count_gradients(config: Config, facts: DatasetFacts, rounds: int) -> float | None:
    """Return how many per-example gradients a number of rounds computes; an evaluated example counts as a third of one.

    None if the number of clients is unknown.

    Args:
        config: the run.
        facts: facts about its dataset.
        rounds: number of rounds.
    """
    training, evaluation, built = config.training, config.evaluation, algorithm(config.algorithm)
    clients = config.data.clients or getattr(partition_spec(config.data.partition).partitioner, "clients", None)
    clients = clients or facts.clients  # those of a natural partition
    if clients is None:
        return None
    per_client = training.local_epochs * facts.training / clients  # examples of a client in one round
    if training.local_steps:
        per_client = training.local_steps * training.batch_size
    gradients = rounds * min(clients, config.federation.clients_per_round) * per_client * built.backward_passes
    evaluations = (rounds / evaluation.every + min(evaluation.final, rounds)) * (1 + len(built.averages))
    return gradients + EVALUATION * evaluations * min(facts.test, evaluation.examples or facts.test)
