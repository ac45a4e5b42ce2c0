"""The queue of the campaign: which cells of which tables to measure, in which order, with which protocol."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cached_property

from fedflat.experiment.config import Config, parse_config
from fedflat.papers import find_table
from fedflat.papers.cells import Cell
from fedflat.papers.cost import gpu_seconds
from fedflat.papers.plan import Deviations
from fedflat.papers.protocol import protocol_hash, protocol_of
from fedflat.papers.results import cells_measured_by, experiment_name

TEN = ("fedavg", "scaffold", "fedsam", "fedswa", "fedmoswa", "fedacg", "fedasam", "feddyn", "fedlesam", "mofedsam")
SEVEN = ("fedswa", "fedsam", "fedavg", "fedmoswa", "scaffold", "fedacg", "mofedsam")
WMSAM = ("fedavg", "fedwmsam-ours", "scaffold", "fedsam", "mofedsam", "fedsmoo", "fedlesam-s-d")
ABLATIONS = ("nothing", "mom-sam", "mom-weighted", "sam-weighted", "mom", "sam")
FLAT = ("fedavg-e-1", "fedsam", "fedasam", "fedavg-swa", "fedsam-swa", "fedasam-swa")
FOUR = ("fedavg", "scaffold", "feddyn", "fedprox")


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

    def deviations(self, options: argparse.Namespace) -> Deviations:
        """How the runs of this stage differ from the paper's."""
        rounds = options.rounds or self.rounds
        every = None if options.small else self.every

        def change(paper: Config) -> Config:
            values = paper.model_dump(mode="json")
            if every is not None:
                values["evaluation"]["every"] = every
            values["engine"] |= {
                "precision": options.precision or self.precision,
                "device": options.device,
                "compile": options.compile,
                "checkpoint_every": options.checkpoint_every,
            }
            return parse_config(values)

        return Deviations(options.small, rounds, options.data_dir, change)


QUEUE = (
    *(Stage("fedswa/table2", TEN, "cifar100-lenet-5-*", seed, 10) for seed in range(3)),
    *(Stage("fedswa/table2", TEN, "cifar10-lenet-5-*", seed, 10) for seed in range(3)),
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
    name: str
    """Path of the result below the results directory, without suffix."""
    cells: tuple[Cell, ...]
    experiment: Config
    """The config with seed 0."""

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


def queue(options: argparse.Namespace, stages: Sequence[Stage] = QUEUE) -> Iterator[CampaignJob]:
    """The runs of the campaign in order, restricted to the names that ``--only`` matches."""
    seen = set()
    for stage in stages:
        table, deviations = find_table(stage.table), stage.deviations(options)
        cells = [cell for row in stage.rows for cell in table.choose([f"{row}/{stage.columns}"])]
        for paper_config in dict.fromkeys(each for cell in cells for each in cell.configs):
            name = f"{experiment_name(table, paper_config)}-seed{stage.seed}"
            if name not in seen and any(fnmatch(name, pattern) for pattern in options.only):
                seen.add(name)
                measured = tuple(cells_measured_by(table, paper_config))
                yield CampaignJob(stage, name, measured, deviations.apply(paper_config)[0])
