"""What Theorem 5.1 of Liu et al. 2025 says of a run: its constants, its bounds, and which of its conditions the run meets."""

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
    as_run,
    largest_lr,
    theorem,
)
from fedflat.flatness.theory.noise import Constants, largest

TITLES = {"fedsam": "FedSAM", "fedswa": "FedSWA", "fedmoswa": "FedMoSWA"}


@dataclass(frozen=True)
class Theory:
    """The bounds of a run, with all that went into them."""

    constants: Constants
    setting: FederationSize
    trivial: float
    """A loss that any bound must stay below to say something: that of guessing among the classes."""
    printed: dict[str, GeneralisationBound]
    """The theorem as printed, at its own rates."""
    tight: dict[str, GeneralisationBound]
    """The same with powers of c instead of 1 + c, which the proof allows."""
    own_rates: dict[str, GeneralisationBound]
    """The proof before rates are put in, with powers of c and the rates that each algorithm has in this run."""
    conditions: list[tuple[str, bool, str]]
    """What the theorem asks for, whether the run does it, and what it does."""

    def document(self) -> Figures:
        """Everything as plain values."""

        def plain(bounds: dict[str, GeneralisationBound]) -> Figures:
            return {
                name: {
                    "log10": one.log10,
                    "value": one.value if math.isfinite(one.value) else None,
                    "log10_factor": one.factor,
                    "vacuous": one.vacuous(self.trivial),
                }
                for name, one in bounds.items()
            }

        return {
            "constants": self.constants.plain(),
            "setting": vars(self.setting),
            "largest_rate": largest_lr(self.constants, self.setting),
            "trivial": self.trivial,
            "as_printed": plain(self.printed),
            "tightened": plain(self.tight),
            "at_own_rates": plain(self.own_rates),
            "conditions": [{"condition": text, "met": met, "here": here} for text, met, here in self.conditions],
        }


def theory(config: Config, partition: Partition, classes: int, seen: Sequence[Constants]) -> Theory:
    """The bounds of a run from the constants that its models showed, the largest of each."""
    constants = largest(seen)
    setting = setting_of(config, partition)
    steps = round(setting.steps)
    return Theory(
        constants,
        setting,
        math.log(max(classes, 2)),
        {name: theorem(name, constants, setting) for name in ALGORITHMS},
        {name: theorem(name, constants, setting, tight=True) for name in ALGORITHMS},
        {name: as_run(name, constants, setting, rates_of(config, steps, name), tight=True) for name in ALGORITHMS},
        conditions(config, constants, setting, rates_of(config, steps)),
    )


def setting_of(config: Config, partition: Partition) -> FederationSize:
    """m, n, K and T of a run; n and K are means over clients, which the theorem takes to be alike."""
    sizes = np.array([len(indices) for indices in partition.described_clients])
    own = config.training
    steps = (
        float(own.local_steps)
        if own.local_steps is not None
        else float((own.local_epochs * np.ceil(sizes / own.batch_size)).mean())
    )
    return FederationSize(len(partition.clients), float(sizes.mean()), steps, own.rounds)


def rates_of(config: Config, steps: int, name: str = "") -> list[RoundLearningRates]:
    """The local rates of every round of a run, for a client with so many steps; or those another algorithm would have in its place."""
    other = name and name != _base(config.algorithm)
    lr, own = algorithm(name if other else config.algorithm).lr_schedule, config.training
    schedule = Schedule(own.lr, own.lr_decay, own.rounds)
    number, many = torch.arange(steps, dtype=torch.float64), torch.tensor(float(steps), dtype=torch.float64)
    found = []
    for one in range(own.rounds):
        values = lr(schedule, torch.tensor(float(one), dtype=torch.float64), number, many) + torch.zeros_like(number)
        found.append(RoundLearningRates(float(values.sum()), float(values.max())))
    return found


def conditions(
    config: Config, constants: Constants, setting: FederationSize, rates: Sequence[RoundLearningRates]
) -> list[tuple[str, bool, str]]:
    """What the theorem asks for, and what a run does."""
    built, federation = algorithm(config.algorithm), config.federation
    name = _base(config.algorithm)
    allowed, used = largest_lr(constants, setting), max(one.highest for one in rates)
    clients_per_round = min(federation.clients_per_round, setting.clients)
    full = clients_per_round == setting.clients and federation.sampling == "fixed" and not federation.dropout
    option = getattr(built.drift, "option", None)
    asked = [
        ("one of FedSAM, FedSWA, FedMoSWA", name in ALGORITHMS, config.algorithm),
        ("every client in every round", full, f"{clients_per_round} of {setting.clients} clients per round"),
        ("local rates of at most 1/(beta K T)", used <= allowed, f"{used:.3g}, where {allowed:.3g} is allowed"),
        ("server rate 1", built.server.server_lr == 1, f"{built.server.server_lr:g}"),
    ]
    if option is not None:
        asked.append(("option I of the control variates", option == "I", f"option {option}"))
    return asked


def _base(text: str) -> str:
    """The name that an algorithm's text begins with."""
    return text.partition("+")[0].partition("(")[0]
