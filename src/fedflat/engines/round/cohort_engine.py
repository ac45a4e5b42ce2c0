"""The round that engines on one machine share: fill the cohort's memory, train its rows, reduce them."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from fedflat.algorithms.algorithm import States
from fedflat.engines.problem.problem import Problem
from fedflat.engines.round.aggregation import by_samples, weighted_sum
from fedflat.engines.round.cohort_buffers import CohortBuffers
from fedflat.engines.round.contract import Client, ModelState, Outcome, Training
from fedflat.engines.round.reduction import ClientReport, reduce_rows


class CohortEngine(ABC):
    """An engine that trains a cohort in ``CohortBuffers``; subclasses say how its rows are trained.

    Attributes:
        problem: model, task and data.
        buffers: the memory of the cohort, reused from round to round; None before the first round.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.buffers: CohortBuffers | None = None

    def train(self, training: Training, round: int, model: ModelState, server: States, cohort: list[Client]) -> Outcome:
        """Train a cohort for one round and average what it sends, in cohort order."""
        buffers = self.allocate(training, len(cohort), model.weights)
        z = buffers.fill(training.algorithm, model, server, cohort)
        extra_cost = (0, 0)
        if training.algorithm.drift.full_gradient == "common":
            extra_cost = self.full_gradients(training, round, buffers, cohort)
            weights = by_samples([len(client.indices) for client in cohort])
            buffers.common_gradient.copy_(weighted_sum(buffers.gradient[: len(cohort)], weights))
        reports = self.train_rows(training, round, buffers, cohort, model.integers)
        return reduce_rows(training, round, model, z, buffers, cohort, reports, extra_cost=extra_cost)

    @abstractmethod
    def allocate(self, training: Training, rows: int, like: Tensor) -> CohortBuffers:
        """Memory for a cohort of ``rows`` clients, with the dtype and device of ``like``."""

    @abstractmethod
    def full_gradients(
        self, training: Training, round: int, buffers: CohortBuffers, cohort: list[Client]
    ) -> tuple[int, int]:
        """Write each client's full gradient at z into ``buffers.gradient``; returns backward passes and samples."""

    @abstractmethod
    def train_rows(
        self, training: Training, round: int, buffers: CohortBuffers, cohort: list[Client], integers: dict[str, Tensor]
    ) -> list[ClientReport]:
        """Train clients whose rows are filled, and write their results there."""
