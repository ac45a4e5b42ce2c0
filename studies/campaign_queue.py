"""The queue of the campaign: which cells of which tables to measure, in which order, with which protocol."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from functools import cached_property

from fedflat.experiment.config import Config
from fedflat.papers import find_table
from fedflat.papers.cells import Cell
from fedflat.papers.cost import gpu_seconds
from fedflat.papers.plan import Deviations
from fedflat.papers.protocol import protocol_hash, protocol_of
from fedflat.papers.results import Kind, cells_measured_by, experiment_name

TEN = ("fedavg", "scaffold", "fedsam", "fedswa", "fedmoswa", "fedacg", "fedasam", "feddyn", "fedlesam", "mofedsam")
SEVEN = ("fedswa", "fedsam", "fedavg", "fedmoswa", "scaffold", "fedacg", "mofedsam")
WMSAM = ("fedavg", "fedwmsam-ours", "scaffold", "fedsam", "mofedsam", "fedsmoo", "fedlesam-s-d")
ABLATIONS = ("nothing", "mom-sam", "mom-weighted", "sam-weighted", "mom", "sam")
FLAT = ("fedavg-e-1", "fedsam", "fedasam", "fedavg-swa", "fedsam-swa", "fedasam-swa")
FOUR = ("fedavg", "scaffold", "feddyn", "fedprox")

VALIDATION = 0.1
"""Share of the training data on which learning rates are compared."""


@dataclass(frozen=True)
class Stage:
    """Cells of one table that are measured in the same way."""

    table: str
    rows: tuple[str, ...]
    columns: str
    """Pattern of the columns' names."""
    seed: int = 0
    every: int | None = None
    """Rounds between evaluations; None keeps the paper's."""
    rounds: int | None = None
    """Fewer rounds than the paper; None keeps the paper's."""
    precision: str = "bf16"
    lrs: tuple[float, ...] = ()
    """Learning rates to compare on held-out training data; the row is then run with the best of them."""

    def deviations(self, options: argparse.Namespace, lr: float | None = None) -> Deviations:
        """How the runs of this stage differ from the paper's; ``lr`` is given for a run of a learning-rate search."""
        rounds = options.rounds or self.rounds
        every = None if options.small else self.every
        engine = {
            "precision": options.precision or self.precision,
            "device": options.device,
            "compile": options.compile,
            "checkpoint_every": options.checkpoint_every,
        }

        def change(paper: Config) -> Config:
            evaluation = {} if every is None else {"every": every}
            training, data = ({}, {}) if lr is None else ({"lr": lr}, {"validation": VALIDATION})
            return paper.changed(engine=engine, evaluation=evaluation, training=training, data=data)

        return Deviations(options.small, rounds, options.data_dir, change)


QUEUE = (
    *(Stage("fedswa/table2", TEN, "cifar100-lenet-5-*", seed, 10) for seed in range(3)),
    *(Stage("fedswa/table2", TEN, "cifar10-lenet-5-*", seed, 10) for seed in range(3)),
    Stage("fedswa/table2", ("fedswa", "fedsam", "fedacg"), "cifar100-lenet-5-*", every=10, lrs=(0.01, 0.03, 0.1, 0.3)),
    Stage("eccv/table2", tuple(f"cifar100-{row}" for row in FLAT), "alpha-0-5cl"),
    Stage("fedwmsam/table5", ABLATIONS, "accuracy"),
    Stage("fedwmsam/table1", WMSAM, "cifar-10-beta-0.1"),
    Stage("fedswa/table3", SEVEN, "cifar100-dirichlet-0.1-*", every=10),
    Stage("wima/table2", FOUR, "cifar10-alpha-0-with*"),
    Stage("wima/table2", FOUR, "cifar100-alpha-0-with*"),
    *(Stage("eccv/table2", tuple(f"cifar10-{row}" for row in FLAT), "alpha-0-5cl", seed) for seed in range(3)),
    Stage("fedwmsam/table1", WMSAM, "cifar-100-beta-0.1"),
    Stage("fedwmsam/table1", WMSAM, "cifar-100-beta-0.6"),
    Stage("fedwmsam/table1", WMSAM, "cifar-10-beta-0.6"),
    Stage("fedswa/table4", ("fedswa", "fedmoswa"), "rho-*", every=10, rounds=300),
    Stage("fedswa/table6", ("*",), "accuracy", every=10, rounds=300),
    *(Stage("fedwmsam/table1", ("fedwmsam-ours", "mofedsam"), "cifar-100-beta-0.1", seed) for seed in (1, 2)),
    *(Stage("fedwmsam/table5", ("mom-sam-weighted", "nothing"), "accuracy", seed) for seed in (1, 2)),
    *(Stage("eccv/table2", ("cifar100-fedavg-e-1", "cifar100-fedasam-swa"), "alpha-0-5cl", seed) for seed in (1, 2)),
)
"""The most informative stages first, judged by hand: those that test headline claims, and cheap ones."""

SETUP_SECONDS = 35.0
"""To import, load data and compile for the first time; three seconds when the compiler's cache is warm."""
LEAST_ROUND = 0.015
"""Seconds that the host needs to launch a round."""


@dataclass(frozen=True)
class CampaignJob:
    """One run: an experiment with one seed, and every published cell of the paper that it measures."""

    stage: Stage
    kind: Kind
    experiment_name: str
    cells: tuple[Cell, ...]
    experiment: Config
    """The config with seed 0."""
    selection: str = ""
    """How the learning rate was selected."""

    @property
    def result_name(self) -> str:
        """Name of the experiment in the result: with the learning rate if it is one of a search."""
        lr = f"-lr{self.experiment.training.lr:g}" if self.kind == "search" else ""
        return f"{self.experiment_name}{lr}"

    @property
    def name(self) -> str:
        """Path of the result below the results directory, without suffix."""
        folder = "" if self.kind == "paper" else f"{self.kind}/"
        return f"{folder}{self.result_name}-seed{self.stage.seed}"

    @property
    def tuned_name(self) -> str:
        """The name of the tuned run of the same experiment."""
        return f"tuned/{self.experiment_name}-seed{self.stage.seed}"

    @property
    def config(self) -> Config:
        """The config of the run."""
        return self.experiment.model_copy(update={"seed": self.stage.seed})

    @cached_property
    def protocol_hash(self) -> str:
        """Identifies the protocol by its values alone."""
        return protocol_hash(protocol_of(self.experiment))

    def seconds(self, jobs: int, device_seconds: float | None) -> float:
        """Estimated seconds on one H200 that ``jobs`` such runs share, without set-up.

        Args:
            jobs: number of concurrent runs.
            device_seconds: device time of another seed; None if no seed has finished.
        """
        rounds = self.experiment.training.rounds
        if device_seconds is None:
            device_seconds = gpu_seconds(self.experiment, rounds) or 0.0
        return max(jobs * device_seconds, rounds * LEAST_ROUND)

    def tuned(self) -> CampaignJob:
        """The run on all training data with the learning rate of this search run."""
        training, lrs = self.experiment.training, [f"{lr:g}" for lr in self.stage.lrs]
        grid = f"{', '.join(lrs[:-1])} and {lrs[-1]}"
        selection = (
            f"learning rate {training.lr:g}, selected from {grid} on {100 * VALIDATION:g} % of the training data "
            f"({training.rounds:,} rounds)"
        )
        experiment = self.experiment.changed(data={"validation": 0.0})
        return replace(self, kind="tuned", experiment=experiment, selection=selection)


def queue(options: argparse.Namespace, stages: Sequence[Stage] = QUEUE) -> Iterator[CampaignJob]:
    """The runs of the campaign in order, restricted to the names that ``--only`` matches.

    Tuned runs are left out, because their learning rates depend on results. A pattern that matches a tuned run also
    selects the runs of its search.
    """
    seen = set()
    for stage in stages:
        table = find_table(stage.table)
        cells = [cell for row in stage.rows for cell in table.choose([f"{row}/{stage.columns}"])]
        for paper_config in dict.fromkeys(each for cell in cells for each in cell.configs):
            measured = tuple(cells_measured_by(table, paper_config))
            for lr in stage.lrs or (None,):
                experiment = stage.deviations(options, lr).apply(paper_config)[0]
                kind: Kind = "paper" if lr is None else "search"
                job = CampaignJob(stage, kind, experiment_name(table, paper_config), measured, experiment)
                names = {job.name, job.tuned_name} if stage.lrs else {job.name}
                if job.name not in seen and any(is_chosen(name, options) for name in names):
                    seen.add(job.name)
                    yield job


def is_chosen(name: str, options: argparse.Namespace) -> bool:
    """Whether ``--only`` matches the name of a run."""
    return any(fnmatch(name, pattern) for pattern in options.only)
