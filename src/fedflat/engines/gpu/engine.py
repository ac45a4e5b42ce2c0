"""The lanes engine: clients train side by side on one GPU, each in a lane that replays a captured local step.

A lane is a CUDA stream with tensors that stay at the same place in memory: the model, state and batches of one client
at a time. One local step, from gathering the batch to the update, is captured as a CUDA graph. The graph is replayed
for each of the client's steps, without waiting for the host in between. Lanes run concurrently, and their clients may
have different numbers of steps. On a CPU, which tests use, the same code runs without graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedflat.algorithms.algorithm import States
from fedflat.engines.gpu.lane import ClientBatches, DoesNotFit, Lane
from fedflat.engines.gpu.step import LocalStep, eager_step
from fedflat.engines.problem.problem import Problem
from fedflat.engines.problem.task import Totals
from fedflat.engines.round.client import ClientReport, write_full_gradient
from fedflat.engines.round.cohort import CohortEngine
from fedflat.engines.round.cohort_buffers import CohortBuffers
from fedflat.engines.round.contract import Client, ClientRound, Cost, ModelState, Outcome, Training
from fedflat.errors import UserError
from fedflat.flatness.precision import tf32_allowed
from fedflat.randomness import seed_torch

MOST_LANES = 16
"""Largest number of lanes: more streams do not help, because the GPU is fully used."""
LANE_MEMORY = 20 * 2**30
"""Bytes that all lanes together may keep; larger steps use the GPU fully with a few lanes."""
FEWEST_LANES = 2
"""Number of lanes kept even beyond ``LANE_MEMORY``, so that one computes while another waits for the host."""
BATCHES_AT_ONCE = 5
"""Number of evaluation batches that a GPU processes together if they fit; a single one would leave it partly idle."""


class LaneEngine(CohortEngine):
    """Trains the clients of a cohort concurrently on one device, or in turns if they do not fit together.

    Args:
        problem: model, task and data.
        lanes: largest number of clients to train at once; fewer do if they do not fit or would keep ``LANE_MEMORY``.
        step: builds the local step, eager (``eager_step``) or compiled (``compiled_step``).
    """

    def __init__(
        self, problem: Problem, lanes: int = MOST_LANES, step: Callable[[Problem, Training], LocalStep] = eager_step
    ) -> None:
        """Prepare to train at most ``lanes`` clients at once with the local step that ``step`` builds."""
        super().__init__(problem)
        self.max_lanes, self.step = lanes, step
        self.lanes: list[Lane] = []
        self.is_short_of_memory = False
        self._prepared: dict[tuple[int, int], ClientBatches] = {}  # drawn in advance, by round and client
        self._batches_at_once = BATCHES_AT_ONCE if problem.device.type == "cuda" else 1

    def train_groups(
        self, training: Training, round: int, model: ModelState, server: States, groups: list[list[Client]]
    ) -> list[Outcome]:
        """Queue the round of all groups on the lanes and average what each sends, without waiting for the device."""
        self.problem.set_training_mode()  # an evaluation may have come before
        return super().train_groups(training, round, model, server, groups)

    def allocate(self, training: Training, rows: int, like: Tensor) -> CohortBuffers:
        """Memory for a cohort of ``rows`` clients, and the lanes that work on it; ``like`` gives dtype and device.

        Both are kept until the cohort is larger or ``training`` is another object.
        """
        if self.cohort_buffers is None or self.cohort_buffers.rows < rows or self.lanes[0].training is not training:
            problem = self.problem
            if self.lanes and self.lanes[0].training is training:
                local_step = self.lanes[0].local_step  # may have been compiled
            else:
                local_step = self.step(problem, training)
            sizes = problem.layout.size, problem.buffer_layout.size
            self.cohort_buffers = CohortBuffers.new(training.algorithm, *sizes, rows, like)
            self.lanes = [
                Lane(problem, training, self.cohort_buffers, local_step) for _ in range(min(rows, self.max_lanes))
            ]
        return self.cohort_buffers

    def compute_full_gradients(
        self, training: Training, round: int, cohort_buffers: CohortBuffers, cohort: list[Client]
    ) -> Cost:
        """Write each client's full-batch gradient at z into its row of ``cohort_buffers.gradient``."""
        costs = [
            write_full_gradient(self.problem, training, cohort_buffers, row, client.in_round(round))
            for row, client in enumerate(cohort)
        ]
        return sum(costs, Cost())

    def train_rows(
        self,
        training: Training,
        round: int,
        cohort_buffers: CohortBuffers,
        cohort: list[Client],
        integer_buffers: dict[str, Tensor],
    ) -> list[ClientReport]:
        """Train the clients whose inputs are in ``cohort_buffers``, as many at once as fit on the GPU."""
        streams = [lane.stream for lane in self.lanes if lane.stream is not None]  # a lane has none on a CPU
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream())
        rows_and_clients = list(enumerate(cohort))
        reports: list[ClientReport] = []
        with tf32_allowed(self.problem.tf32):  # a captured step keeps the precision that it was captured with
            while len(reports) < len(cohort):
                remaining = rows_and_clients[len(reports) :]
                reports += self._train_concurrently(training, round, remaining, integer_buffers)
        for stream in streams:  # also those of lanes that were given up during the round
            torch.cuda.current_stream().wait_stream(stream)
        return reports

    def _train_concurrently(
        self, training: Training, round: int, clients: list[tuple[int, Client]], integer_buffers: dict[str, Tensor]
    ) -> list[ClientReport]:
        """Train the first clients of a list of pairs (row, client), one client per lane.

        The lanes queue their steps in turn, which lets their work overlap on the device.

        Returns:
            The reports of the clients that were trained: fewer than there were lanes if not all of them fit or were
            useful, and none if the memory of other lanes left no room for the first client.
        """
        lanes: list[Lane] = []
        for lane, (row, client) in zip(self.lanes, clients, strict=False):  # as many as there are lanes
            try:
                with lane.on_stream():
                    lane.load(round, row, client, self._batches(training, round, client), integer_buffers)
            except DoesNotFit as shortage:
                self._reduce_lanes(lane, training, shortage)
                break
            lanes.append(lane)
            if len(lanes) >= max(FEWEST_LANES, LANE_MEMORY // lane.memory):
                self.lanes = self.lanes[: len(lanes)]
                break
        first_client = clients[0][1]
        # Seed dropout only now, because capturing steps draws random numbers too. All lanes draw from one generator.
        seed_torch(training.seed, "dropout", round, first_client.number)
        for k in range(max((lane.step_count for lane in lanes), default=0)):
            for lane in lanes:
                with lane.on_stream():
                    lane.step(k)
        reports = []
        for lane in lanes:
            with lane.on_stream():
                reports.append(lane.unload())
        return reports

    def _reduce_lanes(self, lane: Lane, training: Training, shortage: DoesNotFit) -> None:
        """Give up ``lane``, which does not fit on the GPU, and all lanes after it; the first lane always stays.

        Args:
            lane: the lane that does not fit.
            training: how clients train, for the error message.
            shortage: bytes needed and free; raised as a ``UserError`` if there is only one lane.
        """
        fitting = self.lanes.index(lane)
        if len(self.lanes) == 1:
            free = f"{shortage.free / 2**30:.1f} GB"
            needed = "more" if shortage.needed is None else f"{shortage.needed / 2**30:.1f} GB"
            raise UserError(
                f"the GPU is too small for even one client: a step needs {needed}, and {free} are free; "
                f"lower training.batch_size (now {training.plan.batch_size}), use engine.precision=bf16, or choose a "
                "smaller model"
            )
        if lane.stream is not None:
            torch.cuda.synchronize()  # the lanes' last kernels must end before their memory is used again
        self.lanes = self.lanes[: max(1, fitting)]
        self.is_short_of_memory = True
        torch.cuda.empty_cache()

    def _batches(self, training: Training, round: int, client: Client) -> ClientBatches:
        """A client's batches, prepared by ``prepare`` or drawn now."""
        prepared = self._prepared.pop((round, client.number), None)
        return prepared or ClientBatches(self.problem, training, client.in_round(round))

    def prepare(self, training: Training, round: int, clients: list[tuple[int, np.ndarray]]) -> None:
        """Draw a later round's batches while the device is busy; ``clients`` lists (number, indices)."""
        self._prepared = {
            (round, number): ClientBatches(self.problem, training, ClientRound(round, number, indices))
            for number, indices in clients
        }

    def evaluate(
        self, models: dict[str, ModelState], examples: dict[str, Any]
    ) -> dict[str, dict[str, dict[str, float]]]:
        """Metrics of every model on every set of examples: model -> set -> metric -> value."""
        return {
            model: {name: self._metrics(state, examples_of_set) for name, examples_of_set in examples.items()}
            for model, state in models.items()
        }

    def _metrics(self, model: ModelState, examples: Any) -> dict[str, float]:
        """A model's metrics on a set of examples; falls back to single batches if several together do not fit."""
        try:
            return self._metrics_over_batches(model, examples)
        except torch.OutOfMemoryError:
            if self._batches_at_once == 1:
                raise
        # Outside the except block, where the exception would keep the memory of the failed pass.
        self._batches_at_once = 1
        torch.cuda.empty_cache()
        return self._metrics_over_batches(model, examples)

    def _metrics_over_batches(self, model: ModelState, examples: Any) -> dict[str, float]:
        """A model's metrics on a set of examples, with ``_batches_at_once`` evaluation batches per forward pass."""
        problem, totals = self.problem, Totals(self.problem.task)
        buffers = {**problem.buffer_layout.views(model.buffers), **model.integer_buffers}
        for positions in problem.evaluation_batches(len(examples), at_once=self._batches_at_once):
            totals.add(problem.metric_sums(model.weights, buffers, examples.take(positions)), len(positions))
        return totals.metrics()
