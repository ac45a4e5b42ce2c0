"""Empirical uniform stability (Hardt et al. 2016): how much a run depends on a single training example.

A twin of a run replaces one training example by a test example of the same class, which is excluded from scoring. The
partition and all random numbers stay the same, so any difference between the two comes from that example.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from fedflat.data import Dataset, Examples
from fedflat.data.batches import move_examples
from fedflat.engines.problem.problem import Problem
from fedflat.engines.problem.task import Task, finite_or_none
from fedflat.engines.round.client import draw_batches
from fedflat.engines.round.client_facts import full_gradient_positions, pilot_positions
from fedflat.engines.round.contract import ClientRound, ModelState
from fedflat.errors import UserError
from fedflat.experiment.analysis.cohort import Measurements
from fedflat.experiment.analysis.replay import Replay, check_client
from fedflat.experiment.config import Config
from fedflat.experiment.setup.problem import build_problem, load_data
from fedflat.randomness import generator


@dataclass(frozen=True)
class Swap:
    """The training example at ``position``, replaced by the test example at position ``by``."""

    client: int
    """Number of the client that holds the example."""
    position: int
    """Position in the training set."""
    by: int
    """Position of the replacement in the test set."""
    first_round: int | None
    """First round in which the example is used, counted from 1; None if it never is. Until then, the twin equals the
    original run."""

    def apply(self, data: Dataset) -> Dataset:
        """Copy a dataset and replace the example; the replacement belongs to the same client."""
        inputs, targets = data.train.inputs.clone(), data.train.targets.clone()
        inputs[self.position] = data.test.inputs[self.by]
        targets[self.position] = data.test.targets[self.by]
        return replace(data, train=replace(data.train, inputs=inputs, targets=targets))


class Twins:
    """A run and its twins, runs that differ from it in one training example, advanced together.

    Args:
        config: the experiment.
        twins: number of twins.
        client: the client whose example is replaced; default: drawn from the first cohort, separately for each twin.
        seed: seed that draws the replaced examples, their replacements and the scored examples.
        examples: number of test examples for scoring.
        data, model, task: user-supplied objects that replace the config's.
    """

    def __init__(
        self,
        config: Config,
        twins: int = 3,
        *,
        client: int | None = None,
        seed: int = 0,
        examples: int = 500,
        data: Dataset | None = None,
        model: nn.Module | None = None,
        task: Task | None = None,
    ) -> None:
        """Build the run and its twins at their start, without training."""
        if twins < 1:
            raise UserError(f"twins={twins} is invalid; expected at least 1")
        self.config = config
        self.data = load_data(config, data)
        problem, partition = build_problem(config, self.data, model, task)
        # On a CPU, train in this process: the engines of run and twins, used in turn, would share one worker pool.
        workers = 1 if problem.device.type == "cpu" else None
        self.original = Replay(config, problem, partition, workers=workers)
        if client is not None:
            check_client(client, len(partition.clients))
        self.swaps = [self._draw_swap(seed, number, client) for number in range(twins)]
        self.twins = []
        for swap in self.swaps:
            twin_problem, _ = build_problem(config, swap.apply(self.data), model, task)
            self.twins.append(Replay(config, twin_problem, partition, workers=workers))
        self._scored = self._scored_examples(examples, seed)

    def _draw_swap(self, seed: int, number: int, client: int | None) -> Swap:
        """Draw the example that twin ``number`` replaces, and a test example of the same class."""
        rng = generator(seed, "twins", number)
        if client is None:
            client = int(rng.choice(self.original.cohort))
        position = int(rng.choice(self.original.partition.clients[client]))
        target = self.data.train.targets[position]
        candidates = torch.arange(len(self.data.test))
        if target.ndim == 0 and not target.is_floating_point():  # the target is a class
            candidates = torch.nonzero(self.data.test.targets == target).flatten()
        if not len(candidates):
            raise UserError(f"the test set has no example of class {int(target)} as a replacement; use another --draw")
        replacement = int(candidates[int(rng.integers(len(candidates)))])
        return Swap(client, position, replacement, self._first_round(position))

    def _first_round(self, position: int) -> int | None:
        """Return the first round (counted from 1) in which any client uses an example; None if none ever does."""
        clients = self.original.partition.clients  # several may hold the example
        for index in range(self.config.init_rounds, self.config.training.rounds):  # init_rounds trained the first model
            for client in self.original.cohort_of(index):
                indices = clients[client]
                if position in indices and self._uses(ClientRound(index, client, indices), position):
                    return index + 1
        return None

    def _uses(self, client_round: ClientRound, position: int) -> bool:
        """Whether a client that holds an example draws it in a round."""
        problem, training = self.original.problem, self.original.training
        used, _ = draw_batches(problem, training, client_round)
        used += pilot_positions(training, client_round)
        if training.algorithm.drift.full_gradient != "none":
            used.append(full_gradient_positions(training, client_round))
        return any(position in batch for batch in used)

    def _scored_examples(self, examples: int, seed: int) -> Examples:
        """Return a random sample of the test set, without the replacements."""
        replacements = [swap.by for swap in self.swaps]
        candidates = np.setdiff1d(np.arange(len(self.data.test)), replacements)
        order = generator(seed, "twins scored").permutation(len(candidates))
        chosen = candidates[np.sort(order[:examples])]
        problem = self.original.problem
        return move_examples(self.data.test.take(torch.from_numpy(chosen)), problem.device, problem.dtype)

    def train(self, every: int = 1) -> Iterator[Measurements]:
        """Train the run and its twins for all rounds, in lockstep.

        Yields the ``differences`` between them after every ``every`` rounds and after the last one.
        """
        rounds = self.config.training.rounds
        for completed in range(self.config.init_rounds + 1, rounds + 1):
            self.original.advance()
            for twin in self.twins:
                twin.advance()
            if completed % every == 0 or completed == rounds:
                yield self.differences()

    def differences(self) -> Measurements:
        """Compare each twin with the original run in its current round.

        Returns:
            The ``round``; per twin the L2 ``distance`` of the weights and the mean and largest absolute difference of
            the loss on the scored examples; and the ``norm`` of the original's weights.
        """
        model, rounds = self.original.moment.model, self.original.moment.rounds
        losses = losses_of(self.original.problem, model, self._scored)
        if not model.weights.isfinite().all():
            raise UserError(f"the run diverged in round {rounds}; lower lr={self.config.training.lr:g}")
        differences = [(losses_of(twin.problem, twin.moment.model, self._scored) - losses).abs() for twin in self.twins]
        return {
            "round": rounds,
            "distance": [finite_or_none(torch.dist(twin.moment.model.weights, model.weights)) for twin in self.twins],
            "mean_loss_difference": [finite_or_none(difference.mean()) for difference in differences],
            "largest_loss_difference": [finite_or_none(difference.max()) for difference in differences],
            "norm": finite_or_none(model.weights.norm()),
        }


def losses_of(problem: Problem, model: ModelState, examples: Examples) -> Tensor:
    """Return the loss of a model on each example, [examples]."""
    buffers = {**problem.buffer_layout.views(model.buffers), **model.integer_buffers}
    losses = []
    for positions in problem.evaluation_batches(len(examples)):
        batch = examples.take(positions)
        output = problem.predict(model.weights, buffers, batch.inputs)
        # A task's loss is the mean over a batch, so each example is passed as a batch of one.
        losses += [problem.task.loss(output[i : i + 1], batch.targets[i : i + 1]) for i in range(len(batch))]
    return torch.stack(losses)
