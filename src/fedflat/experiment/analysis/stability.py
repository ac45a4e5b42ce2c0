"""Empirical uniform stability: twins of a run that differ from it in a single training example, side by side (Hardt et al. 2016).

Twins share everything that is random, so that whatever sets them apart comes from that example. The example that replaces another is drawn
from the test set, of the same class, and is not scored on; the partition is that of the original.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from fedflat.data import Dataset, Examples, load
from fedflat.engines.problem.problem import Problem, moved
from fedflat.engines.problem.task import Task
from fedflat.engines.round.contract import ModelState
from fedflat.engines.round.randomness import generator
from fedflat.errors import UserError
from fedflat.experiment.analysis.cohort import Figures, number
from fedflat.experiment.analysis.replay import Replay, check_client
from fedflat.experiment.config import Config
from fedflat.experiment.setup.problem import federation


@dataclass(frozen=True)
class Swap:
    """One training example replaced by one of the test set."""

    client: int
    position: int
    """Where in the training set."""
    by: int
    """Which example of the test set."""
    first_round: int
    """The first round in which its client takes part: before it, twins are the same."""

    def applied(self, data: Dataset) -> Dataset:
        """The data with the example replaced; who it belongs to stays."""
        inputs, targets = data.train.inputs.clone(), data.train.targets.clone()
        inputs[self.position], targets[self.position] = data.test.inputs[self.by], data.test.targets[self.by]
        return replace(data, train=replace(data.train, inputs=inputs, targets=targets))


class Twins:
    """A run and its twins, taken from round to round together."""

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
        if twins < 1:
            raise UserError(f"{twins} twins are not possible; expected at least 1")
        self.config = config
        self.data = load(config.data.dataset, config.data.dir) if data is None else data
        problem, partition = federation(config, self.data, model, task)
        workers = 1 if problem.device.type == "cpu" else None  # engines that take turns would share one pool of workers
        self.original = Replay(config, problem, partition, workers=workers)
        if client is not None:
            check_client(client, len(partition.clients))
        self.swaps = [self._swap(seed, number, client) for number in range(twins)]
        others = [federation(config, swap.applied(self.data), model, task)[0] for swap in self.swaps]
        self.twins = [Replay(config, other, partition, workers=workers) for other in others]
        self._scored = self._kept_apart(examples, seed)

    def _swap(self, seed: int, number: int, client: int | None) -> Swap:
        rng = generator(seed, "twins", number)
        partition = self.original.partition
        cohort = self.original.cohort
        chosen = int(rng.choice(cohort)) if client is None else client
        position = int(rng.choice(partition.clients[chosen]))
        target = self.data.train.targets[position]
        same = torch.arange(len(self.data.test))
        if target.ndim == 0:
            same = torch.nonzero(self.data.test.targets == target).flatten()
        if not len(same):
            raise UserError(
                f"the test set has no example of class {int(target)} to replace one of the training set by; use another --seed"
            )
        return Swap(chosen, position, int(same[int(rng.integers(len(same)))]), self._first_round(chosen))

    def _first_round(self, client: int) -> int:
        rounds = self.config.training.rounds
        return next(
            (
                number + 1
                for number in range(self.config.init_rounds, rounds)
                if client in self.original.cohort_of(number)
            ),
            rounds + 1,
        )

    def _kept_apart(self, examples: int, seed: int) -> Examples:
        """The test examples to score on, without those that took another's place."""
        used = {swap.by for swap in self.swaps}
        left = np.array([place for place in range(len(self.data.test)) if place not in used])
        chosen = left[np.sort(generator(seed, "twins scored").permutation(len(left))[:examples])]
        return moved(self.data.test.take(torch.from_numpy(chosen)), self.original.problem.device)

    def go(self, every: int = 1) -> Iterator[Figures]:
        """Take all rounds; what sets the twins apart after every so many, and after the last."""
        rounds = self.config.training.rounds
        for done in range(self.config.init_rounds + 1, rounds + 1):
            self.original.advance()
            for twin in self.twins:
                twin.advance()
            if done % every == 0 or done == rounds:
                yield self.apart()

    def apart(self) -> Figures:
        """How far the twins are from the original now: in weights, and in losses over the examples that are scored."""
        model = self.original.moment.model
        losses = losses_of(self.original.problem, model, self._scored)
        if not bool(model.weights.isfinite().all()):
            raise UserError(
                f"the run diverged in round {self.original.moment.rounds}; lower the rate ({self.config.training.lr:g})"
            )
        distances, mean, most = [], [], []
        for twin in self.twins:
            other = twin.moment.model
            difference = (losses_of(twin.problem, other, self._scored) - losses).abs()
            distances.append(number(torch.dist(other.weights, model.weights)))
            mean.append(number(difference.mean()))
            most.append(number(difference.max()))
        return {
            "round": self.original.moment.rounds,
            "distance": distances,
            "mean_loss_difference": mean,
            "largest_loss_difference": most,
            "norm": number(model.weights.norm()),
        }


def losses_of(problem: Problem, model: ModelState, examples: Examples) -> Tensor:
    """The loss of a model on each example alone."""
    buffers = {**problem.buffers.views(model.buffers), **model.integers}
    found = []
    for part in problem.evaluation_batches(len(examples)):
        batch = examples.take(part)
        output = problem.predicted(model.weights, buffers, batch.inputs)
        found += [problem.task.loss(output[one : one + 1], batch.targets[one : one + 1]) for one in range(len(batch))]
    return torch.stack(found)
