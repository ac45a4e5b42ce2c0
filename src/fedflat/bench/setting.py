"""What is measured: a model, data, and the work of a round, the same for every contender."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from fedflat.data import Dataset, Examples, load
from fedflat.engines.round.plan import Plan, Sampler
from fedflat.experiment.config import Config, config
from fedflat.text import make, param, parse_one

LONG = 1000
"""Rounds of the run whose steady state is measured: long enough that compiling pays."""
RANDOM = "random"
TESTED = 500
"""Test examples that are kept: evaluation is not what is measured."""


@dataclass(frozen=True)
class RandomImages:
    """Images of CIFAR-10's shape and number with random pixels and labels, which take no download."""

    size: int = param(50_000, "number of training images", low=1)
    side: int = param(32, "height and width in pixels", low=1)
    channels: int = param(3, "colour channels", low=1)
    classes: int = param(10, "number of classes", low=1)

    def dataset(self) -> Dataset:
        """The images, always the same."""
        rng = np.random.default_rng(0)
        parts = []
        for count in (self.size, TESTED):
            pixels = rng.integers(0, 256, (count, self.channels, self.side, self.side), dtype=np.uint8)
            parts.append(Examples(torch.from_numpy(pixels), torch.from_numpy(rng.integers(0, self.classes, count))))
        names = tuple(str(label) for label in range(self.classes))
        return Dataset(RANDOM, parts[0], parts[1], names, (0.5,) * self.channels, (0.29,) * self.channels)


@dataclass(frozen=True)
class Setting:
    """The federation of which rounds are measured."""

    model: str = "cnn"
    data: str = RANDOM
    folder: Path | None = None
    partition: str = "iid"
    clients_per_round: int = 10
    local_steps: int = 50
    batch_size: int = 50
    lr: float = 0.01
    augmentation: str = "none"
    device: str = "auto"
    compile: str = "auto"
    workers: int | None = None

    def config(
        self, algorithm: str = "fedavg", precision: str = "float32", engine: str = "auto", clients: int = 100
    ) -> Config:
        """The experiment that fedflat would run."""
        return config(
            {
                "algorithm": algorithm,
                "model": self.model,
                "data": {
                    "dataset": self.data,
                    "dir": self.folder,
                    "partition": self.partition,
                    "clients": clients,
                    "augmentation": self.augmentation,
                },
                "federation": {"clients_per_round": self.clients_per_round},
                "training": {
                    "rounds": LONG,
                    "local_steps": self.local_steps,
                    "batch_size": self.batch_size,
                    "lr": self.lr,
                },
                "evaluation": {"every": LONG},
                "engine": {
                    "name": engine,
                    "precision": precision,
                    "compile": self.compile,
                    "device": self.device,
                    "workers": self.workers,
                },
            }
        )

    def dataset(self) -> Dataset:
        """The data, with a small test set."""
        if parse_one(self.data).name == RANDOM:
            return make(RandomImages, parse_one(self.data), "data").dataset()
        data = load(self.data, self.folder)
        return replace(data, test=data.test.take(torch.arange(min(TESTED, len(data.test)))))

    @property
    def on_gpu(self) -> bool:
        """Whether rounds run on a GPU."""
        return self.device != "cpu" and torch.cuda.is_available()

    def compiled(self, engine: str) -> bool:
        """Whether an engine compiles its steps."""
        lanes = engine == "lanes" or (engine == "auto" and self.on_gpu)
        return self.compile == "on" or (self.compile == "auto" and self.on_gpu and lanes)


def plan_of(config: Config) -> Plan:
    """The batches of every client."""
    return Plan(config.training.batch_size, config.training.local_epochs, config.training.local_steps)


def sampler_of(config: Config, clients: int) -> Sampler:
    """The cohorts."""
    return Sampler(clients, min(config.federation.clients_per_round, clients))
