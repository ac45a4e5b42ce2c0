"""The setting of a benchmark: a model, a dataset and the work of a round, the same for every contender."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from fedflat.data import Dataset, Examples, load
from fedflat.engines.round.plan import Plan
from fedflat.experiment.config import Config, parse_config
from fedflat.text import make, param, parse_one

ROUNDS = 1000
"""Rounds in the config of the measured run, enough for compilation to pay off; the benchmark stops earlier."""
RANDOM = "random"
TEST_EXAMPLES = 500
"""Test examples that a run evaluates; evaluation is not measured."""


@dataclass(frozen=True)
class RandomImages:
    """Random images, by default with the shape and size of CIFAR-10; needs no download.

    The label determines the mean brightness of an image, so that training lowers the loss.
    """

    size: int = param(50_000, "number of training images", low=1)
    side: int = param(32, "height and width in pixels", low=1)
    channels: int = param(3, "colour channels", low=1)
    classes: int = param(10, "number of classes", low=1)

    def dataset(self) -> Dataset:
        """Return the dataset: training and test set of random pixels and labels, identical on every call."""
        rng = np.random.default_rng(0)
        splits = []
        for count in (self.size, TEST_EXAMPLES):
            noise = rng.integers(0, 128, (count, self.channels, self.side, self.side), dtype=np.uint8)
            labels = rng.integers(0, self.classes, count)
            brightness = (128 * labels // self.classes).astype(np.uint8)
            pixels = noise + brightness[:, None, None, None]
            splits.append(Examples(torch.from_numpy(pixels), torch.from_numpy(labels)))
        names = tuple(str(label) for label in range(self.classes))
        mean, std = (0.5,) * self.channels, (0.2,) * self.channels  # of pixels in [0, 1]
        return Dataset(RANDOM, splits[0], splits[1], names, mean, std)


@dataclass(frozen=True)
class BenchmarkSetting:
    """The federation whose rounds are timed, for fedflat and for the programs it is compared with.

    The fields are settings of a config.
    """

    model: str = "cnn"
    dataset: str = RANDOM
    data_dir: Path | None = None
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
        """Return the config of a run of fedflat with this setting.

        The programs that fedflat is compared with build the same data, cohorts and batches from this config. A run
        would evaluate only after its last round, but the benchmark stops earlier, so that no evaluation is timed.

        Args:
            algorithm: the algorithm, e.g. ``fedavg`` or ``fedprox(mu=0.1)``.
            precision: ``engine.precision``.
            engine: ``engine.name``.
            clients: number of clients in the federation.
        """
        return parse_config(
            {
                "algorithm": algorithm,
                "model": self.model,
                "data": {
                    "dataset": self.dataset,
                    "dir": self.data_dir,
                    "partition": self.partition,
                    "clients": clients,
                    "augmentation": self.augmentation,
                },
                "federation": {"clients_per_round": self.clients_per_round},
                "training": {
                    "rounds": ROUNDS,
                    "local_steps": self.local_steps,
                    "batch_size": self.batch_size,
                    "lr": self.lr,
                },
                "evaluation": {"every": ROUNDS, "examples": TEST_EXAMPLES},  # i.e. after the last round
                "engine": {
                    "name": engine,
                    "precision": precision,
                    "compile": self.compile,
                    "device": self.device,
                    "workers": self.workers,
                },
            }
        )

    def load_data(self) -> Dataset:
        """Return the dataset; generates ``random(...)``."""
        return self.random_data() or load(self.dataset, self.data_dir)

    def random_data(self) -> Dataset | None:
        """Generate the dataset ``random(...)``; returns None for other datasets, which a run loads by itself."""
        is_random = self.dataset.partition("(")[0].strip().lower() == RANDOM
        return make(RandomImages, parse_one(self.dataset), "data").dataset() if is_random else None

    @property
    def on_gpu(self) -> bool:
        """Whether rounds run on a GPU."""
        return self.device != "cpu" and torch.cuda.is_available()

    def compiled(self, engine: str) -> bool:
        """Whether an engine compiles whole steps, which only lanes on a GPU do."""
        return self.on_gpu and engine in ("lanes", "auto") and self.compile != "off"


def plan_of(config: Config) -> Plan:
    """Return the plan that draws the batches of every client, as a run of ``config`` does."""
    return Plan(config.training.batch_size, config.training.local_epochs, config.training.local_steps)
