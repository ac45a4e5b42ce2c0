"""The queue of the campaign: which cells of which tables to measure, in which order, with which protocol."""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from fnmatch import fnmatch
from functools import cache, cached_property
from typing import Any

from fedflat.algorithms import algorithm
from fedflat.errors import UserError
from fedflat.experiment.campaign.compare import folder_name
from fedflat.experiment.config import Config, config
from fedflat.papers import find_table, papers
from fedflat.papers.cells import Cell
from fedflat.papers.plan import Deviations

TEN = ("fedavg", "scaffold", "fedsam", "fedswa", "fedmoswa", "fedacg", "fedasam", "feddyn", "fedlesam", "mofedsam")
SEVEN = ("fedavg", "fedmoswa", "fedswa", "scaffold", "fedacg", "fedsam", "mofedsam")
WMSAM = ("fedavg", "fedwmsam-ours", "scaffold", "fedsam", "mofedsam", "fedsmoo", "fedlesam-s-d")
ABLATIONS = ("mom-sam", "sam-weighted", "mom-weighted")
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
            return config(values)

        changed = () if every is None else (f"evaluation.every={every}",)
        return Deviations(options.small, rounds, options.data_dir, change, changed)


QUEUE = (
    *(Stage("fedswa/table2", TEN, "cifar100-lenet-5-*", seed, 10) for seed in range(3)),
    *(Stage("fedswa/table2", TEN, "cifar10-lenet-5-*", seed, 10) for seed in range(3)),
    Stage("fedwmsam/table1", WMSAM, "cifar-100-beta-0.1"),
    Stage("fedwmsam/table1", WMSAM, "cifar-100-beta-0.6"),
    Stage("fedwmsam/table1", WMSAM, "cifar-10-beta-0.1"),
    Stage("fedwmsam/table5", ABLATIONS, "accuracy"),
    Stage("fedwmsam/table1", WMSAM, "cifar-10-beta-0.6"),
    Stage("fedswa/table3", SEVEN, "cifar100-dirichlet-0.1-*", every=10),
    Stage("eccv/table2", tuple(f"cifar10-{row}" for row in FLAT), "alpha-0-5cl"),
    Stage("eccv/table2", tuple(f"cifar100-{row}" for row in FLAT), "alpha-0-5cl"),
    Stage("wima/table2", FOUR, "cifar10-alpha-0-with*"),
    Stage("wima/table2", FOUR, "cifar100-alpha-0-with*"),
    Stage("fedswa/table4", ("fedswa", "fedmoswa"), "rho-*", every=10, rounds=300),
    Stage("fedswa/table6", ("*",), "accuracy", every=10, rounds=300),
)
"""Most informative first, per minute of GPU time: cheap runs before expensive ones, first seeds before further ones."""

SETTINGS = {
    "model": "model",
    "initial_weights": "init",
    "dataset": "data.dataset",
    "partition": "data.partition",
    "partition_seed": "data.partition_seed",
    "clients": "data.clients",
    "validation": "data.validation",
    "augmentation": "data.augmentation",
    "clients_per_round": "federation.clients_per_round",
    "sampling": "federation.sampling",
    "weighting": "federation.weighting",
    "aggregation": "federation.aggregation",
    "dropout": "federation.dropout",
    "partial": "federation.partial",
    "trained": "training.train",
    "rounds": "training.rounds",
    "local_epochs": "training.local_epochs",
    "local_steps": "training.local_steps",
    "batch_size": "training.batch_size",
    "lr": "training.lr",
    "lr_decay": "training.lr_decay",
    "weight_decay": "training.weight_decay",
    "momentum": "training.momentum",
    "clip": "training.clip",
    "clip_mode": "training.clip_mode",
    "batchnorm": "training.statistics",
    "eval_every": "evaluation.every",
    "eval_final": "evaluation.final",
    "precision": "engine.precision",
}
"""Setting by key of a stored protocol. The keys never change, even when settings are renamed."""

SETUP_SECONDS = 35.0
"""To import, load data and compile for the first time; three seconds when the compiler's cache is warm."""
SAMPLES_PER_SECOND = {
    "cnn": 580_000,
    "resnet18": 45_000,
    "resnet18(stem=torchvision)": 150_000,
    "resnet20": 150_000,
    "vgg11": 200_000,
}
"""Gradients of single examples on one H200 in bf16: a guess for experiments that no stored result tells the time of."""
LEAST_ROUND = 0.015
"""Seconds that the host needs to launch a round."""
DATASET_SIZE = {"cifar10": 50_000, "cifar100": 50_000}
TEST_SIZE = 10_000


@dataclass(frozen=True)
class CampaignJob:
    """One run: an experiment with one seed, and every published cell of the paper that it measures."""

    stage: Stage
    table: str
    row: str
    column: str
    cells: tuple[Cell, ...]
    experiment: Config
    """The config with seed 0."""

    @property
    def name(self) -> str:
        """Path of the result below the results directory, without suffix."""
        return f"{self.table}/{self.column}/{self.row}-seed{self.stage.seed}"

    @property
    def config(self) -> Config:
        """The config of the run."""
        return self.experiment.model_copy(update={"seed": self.stage.seed})

    @cached_property
    def protocol(self) -> dict[str, Any]:
        """Everything except the seed that determines the result."""
        return protocol_of(self.experiment)

    @cached_property
    def protocol_hash(self) -> str:
        """Identifies the protocol by its values alone."""
        return protocol_hash(self.protocol)

    @property
    def estimated_seconds(self) -> float:
        """Seconds to train and evaluate alone on one H200, without set-up."""
        c = self.experiment
        built = algorithm(c.algorithm)
        speed = SAMPLES_PER_SECOND.get(c.model, 100_000)
        share = DATASET_SIZE.get(c.data.dataset, 2_000) / (c.data.clients or 100)
        steps = c.training.local_steps
        samples = steps * c.training.batch_size if steps else c.training.local_epochs * share
        seconds = c.federation.clients_per_round * samples * built.backward_passes / speed
        evaluations = (c.training.rounds / c.evaluation.every + c.evaluation.final) * (1 + len(built.averages))
        return c.training.rounds * max(seconds, LEAST_ROUND) + evaluations * 2 * TEST_SIZE / speed


def protocol_of(experiment: Config) -> dict[str, Any]:
    """The settings that determine a result under stable keys, with every parameter of the algorithm."""
    values = experiment.model_dump(mode="json")

    def setting(name: str) -> Any:
        inside: Any = values
        for part in name.split("."):
            inside = inside[part]
        return inside

    built = algorithm(experiment.algorithm)
    slots = {name: getattr(built, name) for name in ("drift", "perturbation", "lr_schedule", "server")}
    slots |= {f"average{number}": average for number, average in enumerate(built.averages)}
    parameters = {
        name: {field.name: getattr(slot, field.name) for field in fields(slot)} for name, slot in slots.items()
    }
    settings = {key: setting(name) for key, name in SETTINGS.items()}
    return {"algorithm": experiment.algorithm, "parameters": parameters, **settings}


def protocol_hash(protocol: dict[str, Any]) -> str:
    """A hash of a protocol's values. Parameters of the algorithm enter by position, so their names do not matter."""
    values = {key: value for key, value in protocol.items() if key not in ("algorithm", "parameters")}
    values["method"] = protocol["algorithm"].partition("(")[0]
    values["parameters"] = [list(slot.values()) for slot in protocol["parameters"].values()]
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def queue(options: argparse.Namespace, stages: Sequence[Stage] = QUEUE) -> Iterator[CampaignJob]:
    """The runs of the campaign in order, restricted to the names that ``--only`` matches."""
    seen = set()
    for stage in stages:
        table = find_table(stage.table)
        deviations = stage.deviations(options)
        for row in stage.rows:
            cells = table.choose([f"{row}/{stage.columns}"])
            for paper_config in dict.fromkeys(key for cell in cells for key in map(_key, cell.configs)):
                own = [cell for cell in cells if paper_config in map(_key, cell.configs)]
                shared = [cell for cell in _by_config(table.paper.name)[paper_config] if cell not in own]
                experiment = deviations.apply(config(json.loads(paper_config)))[0]
                place = _place(own, experiment)
                job = CampaignJob(stage, table.full_name, *place, tuple(own + shared), experiment)
                if job.name not in seen and any(fnmatch(job.name, pattern) for pattern in options.only):
                    seen.add(job.name)
                    yield job


def _key(experiment: Config) -> str:
    return experiment.model_dump_json()


@cache
def _by_config(paper: str) -> dict[str, list[Cell]]:
    """The cells of a paper that print a number, by the config of their runs."""
    index: dict[str, list[Cell]] = {}
    for table in papers()[paper].tables.values():
        for cell in table.cells.values():
            for experiment in cell.configs:
                cells = index.setdefault(_key(experiment), [])
                if cell.published is not None:
                    cells.append(cell)
    return index


def _place(cells: Sequence[Cell], experiment: Config) -> tuple[str, str]:
    """The row and the common part of the columns of the cells that a run measures."""
    rows = {cell.name.split("/")[0] for cell in cells}
    if len(rows) > 1:
        raise UserError(f"the rows {', '.join(sorted(rows))} share one run; name one of them in the stage")
    columns = [cell.name.split("/")[1].split("-") for cell in cells]
    common = []
    for words in zip(*columns, strict=False):
        if len(set(words)) > 1:
            break
        common.append(words[0])
    row = rows.pop()
    is_alternative = len(cells[0].configs) > 1
    return (f"{row}.{folder_name(experiment.algorithm)}" if is_alternative else row), "-".join(common)
