"""Theorem 5.1 of Liu et al. 2025 applied to a run: constants, bounds, and which conditions the run meets."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from fedflat.algorithms import algorithm
from fedflat.algorithms.cards import CARDS
from fedflat.algorithms.lr_schedule import Schedule
from fedflat.data import Dataset, Partition
from fedflat.experiment.analysis.cohort import Measurements
from fedflat.experiment.config import Config
from fedflat.flatness.theory import (
    ALGORITHMS,
    Constants,
    FederationSize,
    GeneralisationBound,
    RoundLearningRates,
    largest_constants,
    largest_lr,
    run_bound,
    theorem_bound,
)

TITLES = {name: CARDS[name].name for name in ALGORITHMS}
LR_CONDITION = "local learning rate at most 1/(beta K T)"


@dataclass(frozen=True)
class Theory:
    """Generalisation bounds of a run by algorithm (Theorem 5.1 of Liu et al. 2025, FedSWA), and their inputs."""

    constants: Constants
    """The largest constants among the measured models."""
    setting: FederationSize
    """Numbers of clients, examples per client, local steps and rounds."""
    trivial: float
    """Loss of random guessing, or of predicting the mean in a regression; larger bounds are vacuous."""
    printed: dict[str, GeneralisationBound]
    """The theorem as stated, at its own learning rates."""
    tight: dict[str, GeneralisationBound]
    """Our improvement of the theorem, with powers of c instead of 1 + c, which its proof allows."""
    own_rates: dict[str, GeneralisationBound]
    """The tight bound at the learning rates that each algorithm has in this run."""
    conditions: list[tuple[str, bool, str]]
    """(condition, whether it is met, the run's value)."""

    def is_void(self, own_rates: bool) -> bool:
        """Whether the run violates a condition, so that no bound applies to it.

        The bound at the run's learning rates (``own_rates``) does not depend on the condition on learning rates.
        """
        return any(not met for text, met, _ in self.conditions if not (own_rates and text == LR_CONDITION))

    def document(self) -> Measurements:
        """The bounds and their inputs as JSON-compatible values; bounds above the ``trivial`` loss are vacuous."""

        def as_values(bounds: dict[str, GeneralisationBound], own_rates: bool = False) -> Measurements:
            """Bounds by algorithm as JSON-compatible values; they are void if the run violates their conditions."""
            return {
                name: {
                    "log10": bound.log10,
                    "value": bound.value if math.isfinite(bound.value) else None,  # too large for a float
                    "log10_factor": bound.factor,
                    "vacuous": bound.is_vacuous(self.trivial),
                    "void": self.is_void(own_rates),
                }
                for name, bound in bounds.items()
            }

        return {
            "constants": self.constants.known(),
            "setting": vars(self.setting),
            "largest_rate": largest_lr(self.constants, self.setting),
            "trivial": self.trivial,
            "as_printed": as_values(self.printed),
            "tightened": as_values(self.tight),
            "at_own_rates": as_values(self.own_rates, own_rates=True),
            "conditions": [{"condition": text, "met": met, "here": value} for text, met, value in self.conditions],
        }


def theory(config: Config, partition: Partition, trivial: float, measured: Sequence[Constants]) -> Theory:
    """Compute the theorem's generalisation bounds for a run, from the largest constants of its models.

    Args:
        config: the run's config.
        partition: its partition.
        trivial: loss of a model that ignores its inputs (``trivial_loss``).
        measured: the constants of each measured model.

    Returns:
        For each algorithm of the theorem, the bound as ``printed``, the ``tight`` one that its proof allows, and the
        tight one at the algorithm's learning rates in this run (``own_rates``).
    """
    constants = largest_constants(measured)
    size = federation_size(config, partition)
    steps = round(size.steps)
    rates = {name: round_learning_rates(config, steps, name) for name in ALGORITHMS}
    return Theory(
        constants,
        setting=size,
        trivial=trivial,
        printed={name: theorem_bound(name, constants, size) for name in ALGORITHMS},
        tight={name: theorem_bound(name, constants, size, tight=True) for name in ALGORITHMS},
        own_rates={name: run_bound(name, constants, size, rates[name], tight=True) for name in ALGORITHMS},
        conditions=conditions(config, constants, size, round_learning_rates(config, steps)),
    )


def trivial_loss(data: Dataset) -> float:
    """Return the loss of a model that ignores its inputs.

    For classes and labels, this is the cross-entropy of a uniform guess; for numbers, it is the variance of the
    training targets, i.e. the loss of predicting their mean.
    """
    if data.target_type == "numbers":
        return float(data.train.targets.double().var(0, correction=0).mean())
    return math.log(max(data.num_classes, 2)) if data.target_type == "classes" else math.log(2)


def federation_size(config: Config, partition: Partition) -> FederationSize:
    """Return a run's clients, examples per client, local steps per round and rounds (m, n, K, T in the theorem).

    Examples and local steps are means over clients.
    """
    sizes = np.array([len(indices) for indices in partition.summarised_clients])
    training = config.training
    if training.local_steps is not None:
        steps = float(training.local_steps)
    else:
        steps = float((training.local_epochs * np.ceil(sizes / training.batch_size)).mean())
    return FederationSize(len(partition.clients), float(sizes.mean()), steps, training.rounds)


def round_learning_rates(config: Config, steps: int, name: str = "") -> list[RoundLearningRates]:
    """Return the sum and the maximum of the local learning rates in every round of a run.

    Args:
        config: the run's config.
        steps: number of local steps per round.
        name: use the schedule of this algorithm; default: the run's.
    """
    training = config.training
    is_own = not name or name == _base_name(config.algorithm)
    lr_schedule = algorithm(config.algorithm if is_own else name).lr_schedule
    schedule = Schedule(training.lr, training.lr_decay, training.rounds)
    step_indices = torch.arange(steps, dtype=torch.float64)
    step_count = torch.tensor(float(steps), dtype=torch.float64)
    rates = []
    for index in range(training.rounds):
        round_index = torch.tensor(float(index), dtype=torch.float64)
        # A schedule that is constant within a round returns a scalar.
        lrs = lr_schedule(schedule, round_index, step_indices, step_count).expand(steps).contiguous()
        rates.append(RoundLearningRates(float(lrs.sum()), float(lrs.max())))
    return rates


def conditions(
    config: Config, constants: Constants, size: FederationSize, rates: Sequence[RoundLearningRates]
) -> list[tuple[str, bool, str]]:
    """Check the theorem's conditions.

    Args:
        config: the run's config.
        constants: measured constants of the loss.
        size: clients, examples, local steps K and rounds T of the run.
        rates: the run's learning rates in every round.

    Returns:
        Tuples of (condition, whether the run meets it, the run's value).
    """
    run_algorithm, federation = algorithm(config.algorithm), config.federation
    largest_allowed, largest_used = largest_lr(constants, size), max(rate.highest for rate in rates)
    per_round = min(federation.clients_per_round, size.clients)
    is_full = per_round == size.clients and federation.sampling == "fixed" and not federation.dropout
    server_lr = run_algorithm.server.server_lr
    rows = [
        ("one of FedSAM, FedSWA, FedMoSWA", _base_name(config.algorithm) in ALGORITHMS, config.algorithm),
        ("every client in every round", is_full, f"{per_round} of {size.clients} clients per round"),
        (
            LR_CONDITION,
            largest_used <= largest_allowed,
            # beta is that of the mean loss, at most the theorem's.
            f"{largest_used:.3g}; allowed: {largest_allowed:.3g} or less",
        ),
        ("server_lr = 1", server_lr == 1, f"{server_lr:g}"),
    ]
    option = getattr(run_algorithm.drift, "option", None)  # how SCAFFOLD-like drifts update control variates
    if option is not None:
        rows.append(("option I of the control variates", option == "I", f"option {option}"))
    return rows


def _base_name(text: str) -> str:
    """Return the base name of an algorithm text: ``fedavg`` for ``fedavg(...)+sam(...)``."""
    return text.partition("+")[0].partition("(")[0]
