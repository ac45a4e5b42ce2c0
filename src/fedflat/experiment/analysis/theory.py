"""Theorem 5.1 of Liu et al. 2025 applied to a run: constants, bounds, and which conditions the run meets."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from fedflat.algorithms import algorithm
from fedflat.algorithms.lr_schedule import Schedule
from fedflat.data import Partition
from fedflat.experiment.analysis.cohort import Figures
from fedflat.experiment.config import Config
from fedflat.flatness.theory.bounds import (
    ALGORITHMS,
    FederationSize,
    GeneralisationBound,
    RoundLearningRates,
    largest_lr,
    run_bound,
    theorem_bound,
)
from fedflat.flatness.theory.noise import Constants, largest_constants

TITLES = {"fedsam": "FedSAM", "fedswa": "FedSWA", "fedmoswa": "FedMoSWA"}


@dataclass(frozen=True)
class Theory:
    """Bounds of a run and their inputs."""

    constants: Constants
    setting: FederationSize
    trivial: float
    """Loss of random guessing; larger bounds are vacuous."""
    printed: dict[str, GeneralisationBound]
    """The theorem as stated, at its own learning rates."""
    tight: dict[str, GeneralisationBound]
    """With powers of c instead of 1 + c, which the proof allows."""
    own_rates: dict[str, GeneralisationBound]
    """With powers of c and the learning rates that each algorithm has in this run."""
    conditions: list[tuple[str, bool, str]]
    """(condition, whether it is met, the run's value)."""

    def document(self) -> Figures:
        """All values as JSON-compatible types."""

        def plain(bounds: dict[str, GeneralisationBound]) -> Figures:
            return {
                name: {
                    "log10": bound.log10,
                    "value": bound.value if math.isfinite(bound.value) else None,
                    "log10_factor": bound.factor,
                    "vacuous": bound.is_vacuous(self.trivial),
                }
                for name, bound in bounds.items()
            }

        return {
            "constants": self.constants.known(),
            "setting": vars(self.setting),
            "largest_rate": largest_lr(self.constants, self.setting),
            "trivial": self.trivial,
            "as_printed": plain(self.printed),
            "tightened": plain(self.tight),
            "at_own_rates": plain(self.own_rates),
            "conditions": [{"condition": text, "met": met, "here": here} for text, met, here in self.conditions],
        }


def theory(config: Config, partition: Partition, classes: int, seen: Sequence[Constants]) -> Theory:
    """Bounds of a run from the largest constants of its models."""
    constants = largest_constants(seen)
    setting = setting_of(config, partition)
    steps = round(setting.steps)
    return Theory(
        constants,
        setting,
        math.log(max(classes, 2)),
        {name: theorem_bound(name, constants, setting) for name in ALGORITHMS},
        {name: theorem_bound(name, constants, setting, tight=True) for name in ALGORITHMS},
        {name: run_bound(name, constants, setting, rates_of(config, steps, name), tight=True) for name in ALGORITHMS},
        conditions(config, constants, setting, rates_of(config, steps)),
    )


def setting_of(config: Config, partition: Partition) -> FederationSize:
    """m, n, K and T of a run; n and K are means over clients."""
    sizes = np.array([len(indices) for indices in partition.described_clients])
    training = config.training
    if training.local_steps is not None:
        steps = float(training.local_steps)
    else:
        steps = float((training.local_epochs * np.ceil(sizes / training.batch_size)).mean())
    return FederationSize(len(partition.clients), float(sizes.mean()), steps, training.rounds)


def rates_of(config: Config, steps: int, name: str = "") -> list[RoundLearningRates]:
    """Local learning rates of every round, for ``steps`` local steps; ``name`` selects another algorithm's schedule."""
    other = name and name != _base(config.algorithm)
    lr, training = algorithm(name if other else config.algorithm).lr_schedule, config.training
    schedule = Schedule(training.lr, training.lr_decay, training.rounds)
    number, many = torch.arange(steps, dtype=torch.float64), torch.tensor(float(steps), dtype=torch.float64)
    rates = []
    for round in range(training.rounds):
        values = lr(schedule, torch.tensor(float(round), dtype=torch.float64), number, many) + torch.zeros_like(number)
        rates.append(RoundLearningRates(float(values.sum()), float(values.max())))
    return rates


def conditions(
    config: Config, constants: Constants, setting: FederationSize, rates: Sequence[RoundLearningRates]
) -> list[tuple[str, bool, str]]:
    """The theorem's conditions, and whether a run meets them."""
    built, federation = algorithm(config.algorithm), config.federation
    name = _base(config.algorithm)
    allowed, used = largest_lr(constants, setting), max(rates_.highest for rates_ in rates)
    clients_per_round = min(federation.clients_per_round, setting.clients)
    full = clients_per_round == setting.clients and federation.sampling == "fixed" and not federation.dropout
    option = getattr(built.drift, "option", None)
    asked = [
        ("one of FedSAM, FedSWA, FedMoSWA", name in ALGORITHMS, config.algorithm),
        ("every client in every round", full, f"{clients_per_round} of {setting.clients} clients per round"),
        ("local learning rate at most 1/(beta K T)", used <= allowed, f"{used:.3g}; allowed: {allowed:.3g}"),
        ("server_lr = 1", built.server.server_lr == 1, f"{built.server.server_lr:g}"),
    ]
    if option is not None:
        asked.append(("option I of the control variates", option == "I", f"option {option}"))
    return asked


def _base(text: str) -> str:
    """The base name of an algorithm text."""
    return text.partition("+")[0].partition("(")[0]
