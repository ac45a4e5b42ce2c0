"""Empirical uniform stability: a run and twins that differ in a single training example (Hardt et al. 2016).

Twins share all randomness, so any difference comes from that example. The replacement is a test example of the same
class that is excluded from scoring; the partition stays the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from fedflat.data import Dataset, Examples, load
from fedflat.engines.problem.problem import Problem, move_examples
from fedflat.engines.problem.task import Task
from fedflat.engines.round.contract import ModelState
from fedflat.engines.round.plan import generator
from fedflat.errors import UserError
from fedflat.experiment.analysis.cohort import Figures, number
from fedflat.experiment.analysis.replay import Replay, check_client
from fedflat.experiment.config import Config
from fedflat.experiment.setup.problem import build_problem


@dataclass(frozen=True)
class Swap:
    """A training example replaced by a test example."""

    client: int
    position: int
    """Position in the training set."""
    by: int
    """Position of the replacement in the test set."""
    first_round: int
    """First round in which the client participates; twins are identical before."""

    def applied(self, data: Dataset) -> Dataset:
        """The dataset with the example replaced; its client stays the same."""
        inputs, targets = data.train.inputs.clone(), data.train.targets.clone()
        inputs[self.position], targets[self.position] = data.test.inputs[self.by], data.test.targets[self.by]
        return replace(data, train=replace(data.train, inputs=inputs, targets=targets))


class Twins:
    """A run and its twins, advanced together."""

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
            raise UserError(f"twins={twins} is invalid; expected at least 1")
        self.config = config
        self.data = load(config.data.dataset, config.data.dir) if data is None else data
        problem, partition = build_problem(config, self.data, model, task)
        workers = 1 if problem.device.type == "cpu" else None  # alternating engines would share one worker pool
        self.original = Replay(config, problem, partition, workers=workers)
        if client is not None:
            check_client(client, len(partition.clients))
        self.swaps = [self._swap(seed, number, client) for number in range(twins)]
        others = [build_problem(config, swap.applied(self.data), model, task)[0] for swap in self.swaps]
        self.twins = [Replay(config, other, partition, workers=workers) for other in others]
        self._scored = self._scored_examples(examples, seed)

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
            raise UserError(f"the test set has no example of class {int(target)} as a replacement; use another --draw")
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

    def _scored_examples(self, examples: int, seed: int) -> Examples:
        """Test examples for scoring, without the replacements."""
        used = {swap.by for swap in self.swaps}
        left = np.array([place for place in range(len(self.data.test)) if place not in used])
        chosen = left[np.sort(generator(seed, "twins scored").permutation(len(left))[:examples])]
        return move_examples(self.data.test.take(torch.from_numpy(chosen)), self.original.problem.device)

    def go(self, every: int = 1) -> Iterator[Figures]:
        """Run all rounds; yields the differences after every ``every`` rounds and after the last."""
        rounds = self.config.training.rounds
        for done in range(self.config.init_rounds + 1, rounds + 1):
            self.original.advance()
            for twin in self.twins:
                twin.advance()
            if done % every == 0 or done == rounds:
                yield self.differences()

    def differences(self) -> Figures:
        """Current differences between the original and its twins, in weights and in losses on the scored examples."""
        model = self.original.moment.model
        losses = losses_of(self.original.problem, model, self._scored)
        if not bool(model.weights.isfinite().all()):
            raise UserError(
                f"the run diverged in round {self.original.moment.rounds}; lower lr={self.config.training.lr:g}"
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
    """The loss of a model on each example, [examples]."""
    buffers = {**problem.buffers.views(model.buffers), **model.integers}
    losses = []
    for part in problem.evaluation_batches(len(examples)):
        batch = examples.take(part)
        output = problem.predict(model.weights, buffers, batch.inputs)
        losses += [problem.task.loss(output[n : n + 1], batch.targets[n : n + 1]) for n in range(len(batch))]
    return torch.stack(losses)
