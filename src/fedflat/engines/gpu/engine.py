"""The GPU engine: clients side by side in lanes, each a stream that replays a captured local step.

A lane holds one client at a time in tensors that never move: its iterate, its state, its batches. One local step, from gathering the
batch to the update, is captured once as a CUDA graph and then replayed K times without the host in between; lanes run at the same
time, and their clients may have different numbers of steps. On a CPU the same code runs without graphs, which tests use.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedflat.algorithms.algorithm import States
from fedflat.engines.gpu.lane import DoesNotFit, Lane, Work
from fedflat.engines.gpu.step import Advance, in_place
from fedflat.engines.problem.problem import Problem
from fedflat.engines.problem.totals import Totals
from fedflat.engines.round.aggregation import by_samples, weighted_sum
from fedflat.engines.round.client import common_gradient
from fedflat.engines.round.cohort_buffers import Table
from fedflat.engines.round.contract import Client, ModelState, Outcome, Training
from fedflat.engines.round.randomness import seed_torch
from fedflat.engines.round.reduction import Report, reduce_rows
from fedflat.errors import UserError

MOST_LANES = 16
"""More streams than this bring nothing: the GPU is full."""
BATCHES_AT_ONCE = 5
"""So many batches of an evaluation go through a GPU together where they fit: smaller ones leave it idle."""


class LaneEngine:
    """Trains the clients of a cohort at the same time on one device, or in turns where they do not fit together."""

    def __init__(
        self, problem: Problem, lanes: int = MOST_LANES, step: Callable[[Problem, Training], Advance] = in_place
    ) -> None:
        self.problem, self.most, self.step = problem, lanes, step
        self.table: Table | None = None
        self.lanes: list[Lane] = []
        self._prepared: dict[tuple[int, int], Work] = {}
        self._batches_at_once = BATCHES_AT_ONCE if problem.device.type == "cuda" else 1

    def train(self, training: Training, round: int, model: ModelState, server: States, cohort: list[Client]) -> Outcome:
        """Queue a cohort's round on the lanes and reduce what it sends; nothing waits for the device."""
        self.problem.training_mode()  # an evaluation may have come between
        table = self.room(training, len(cohort), model.weights)
        z = table.fill(training.algorithm, model, server, cohort)
        extra = (0, 0)
        if training.algorithm.drift.whole_gradient == "common":
            extra = self.take_gradients(training, round, table, cohort)
            table.common_gradient.copy_(
                weighted_sum(table.gradient[: len(cohort)], by_samples([len(c.indices) for c in cohort]))
            )
        reports = self.train_rows(training, round, table, cohort, model.integers)
        outcome = reduce_rows(training, round, model, z, table, cohort, reports)
        outcome.cost.backward_passes += extra[0]
        outcome.cost.samples += extra[1]
        return outcome

    def train_rows(
        self, training: Training, round: int, table: Table, cohort: list[Client], integers: dict[str, Tensor]
    ) -> list[Report]:
        """Train clients whose rows of the table are filled, and leave there what they keep and send."""
        self._join(to_lanes=True)
        reports: list[Report] = []
        while len(reports) < len(cohort):
            reports += self._side_by_side(training, round, list(enumerate(cohort))[len(reports) :], integers)
        self._join(to_lanes=False)
        return reports

    def _side_by_side(
        self, training: Training, round: int, clients: list[tuple[int, Client]], integers: dict[str, Tensor]
    ) -> list[Report]:
        """Train the first of some clients, as many as there are lanes; none where lanes were in the way of the first."""
        lanes: list[Lane] = []
        for lane, (row, client) in zip(list(self.lanes), clients, strict=False):
            try:
                with lane.on_stream():
                    lane.load(round, row, client, self._work(training, round, client), integers)
            except DoesNotFit as shortage:
                self._use_fewer(lane, training, shortage)
                break
            lanes.append(lane)
        seed_torch(training.seed, "dropout", round, clients[0][1].number)  # after captures, which draw too
        for k in range(max((lane.steps_to_go for lane in lanes), default=0)):
            for lane in lanes:
                with lane.on_stream():
                    lane.step(k)
        reports = []
        for lane in lanes:
            with lane.on_stream():
                reports.append(lane.unload())
        return reports

    def _use_fewer(self, lane: Lane, training: Training, shortage: DoesNotFit) -> None:
        """Go on with the lanes before one that does not fit, whose client trains in a later turn; or with it alone, if it is the first."""
        fitting = self.lanes.index(lane)
        if len(self.lanes) == 1:
            free = f"{shortage.free / 2**30:.1f} GB"
            needed = (
                f"more than the {free} that"
                if shortage.needed is None
                else f"{shortage.needed / 2**30:.1f} GB more and {free}"
            )
            raise UserError(
                f"the GPU is too small for one client at a time: a step needs {needed} are free; "
                f"lower training.batch_size (now {training.plan.batch}), use engine.precision=bf16, or choose a smaller model"
            )
        self.lanes = self.lanes[: max(1, fitting)]
        torch.cuda.empty_cache()

    def _work(self, training: Training, round: int, client: Client) -> Work:
        prepared = self._prepared.pop((round, client.number), None)
        return prepared or Work(self.problem, training, round, client.number, client.indices)

    def prepare(self, training: Training, round: int, cohort: list[tuple[int, np.ndarray]]) -> None:
        """Draw a coming round's batches while the device is busy with this one."""
        self._prepared = {
            (round, number): Work(self.problem, training, round, number, indices) for number, indices in cohort
        }

    def evaluate(
        self, models: dict[str, ModelState], examples: dict[str, Any]
    ) -> dict[str, dict[str, dict[str, float]]]:
        """Every metric of every model on every set of examples."""
        return {
            name: {part: self._figures(model, some) for part, some in examples.items()}
            for name, model in models.items()
        }

    def _figures(self, model: ModelState, examples: Any) -> dict[str, float]:
        try:
            return self._means(model, examples)
        except torch.OutOfMemoryError:
            if self._batches_at_once == 1:
                raise
        self._batches_at_once = 1
        torch.cuda.empty_cache()
        return self._means(model, examples)

    def _means(self, model: ModelState, examples: Any) -> dict[str, float]:
        problem, totals = self.problem, Totals(self.problem.task)
        buffers = {**problem.buffers.views(model.buffers), **model.integers}
        for positions in problem.evaluation_batches(len(examples), at_once=self._batches_at_once):
            totals.add(problem.sum_tensors(model.weights, buffers, examples.take(positions)), len(positions))
        return totals.figures()

    def room(self, training: Training, rows: int, like: Tensor) -> Table:
        """The table for cohorts of up to so many clients, and the lanes that work on it."""
        if self.table is None or self.table.rows < rows or self.lanes[0].training is not training:
            problem = self.problem
            known = self.lanes and self.lanes[0].training is training
            advance = self.lanes[0].advance if known else self.step(problem, training)  # which may have been compiled
            self.table = Table.new(training.algorithm, problem.layout.size, problem.buffers.size, rows, like, False)
            self.lanes = [Lane(problem, training, self.table, advance) for _ in range(min(rows, self.most))]
        return self.table

    def take_gradients(self, training: Training, round: int, table: Table, cohort: list[Client]) -> tuple[int, int]:
        """Each client's whole gradient at z into its row; returns the passes and samples that took."""
        passes = samples = 0
        for row, client in enumerate(cohort):
            gradient, some, seen = common_gradient(
                self.problem, training, table, round, client.number, client.indices, row
            )
            table.gradient[row].copy_(gradient)
            passes, samples = passes + some, samples + seen
        return passes, samples

    def _join(self, to_lanes: bool) -> None:
        """Make the lanes wait for what was queued before them, or the main stream for the lanes."""
        for lane in self.lanes:
            if lane.stream is not None:
                main = torch.cuda.current_stream()
                lane.stream.wait_stream(main) if to_lanes else main.wait_stream(lane.stream)
