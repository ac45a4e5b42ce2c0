"""A fixed look at a problem: the same examples and clients for every model of a run, drawn by a seed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedflat.algorithms.slot import unit
from fedflat.data import Examples, Partition
from fedflat.engines.problem.problem import Problem, moved
from fedflat.engines.problem.task import PooledTask
from fedflat.engines.round.contract import Client, ModelState
from fedflat.engines.round.randomness import generator
from fedflat.errors import UserError
from fedflat.experiment.analysis.batchnorm import with_statistics
from fedflat.experiment.analysis.cohort import Figures, number
from fedflat.experiment.analysis.scoring import Scorer, Scores
from fedflat.experiment.config import FlatnessSettings
from fedflat.flatness import Objective
from fedflat.flatness.batches import TensorBatches
from fedflat.flatness.clients.drift import disagreement
from fedflat.flatness.curvature.lanczos import Ends, lanczos
from fedflat.flatness.curvature.operator import Operator
from fedflat.flatness.theory.noise import Constants, GradientSpread, heterogeneity

BATCH = 500
"""Examples in memory at a time: second derivatives need several times the memory of a step of training."""
RHO = 0.05
"""How far the ascent goes that shows sharpness."""
RESIDUAL, PRODUCTS = 1e-2, 100
"""Eigenvalues are taken until |H v - lambda v| is below so much of lambda, or after so many Hessian products."""
GAP_EXAMPLES = 10_000
"""Training examples whose loss is held against the test set's; fewer would say more about the sample than about the gap."""
SINGLE = 10
"""Examples of each client whose gradients are taken one by one."""


class Look:
    """What is seen of a model: on ``wanted.examples`` training examples, and on the data of ``wanted.clients`` clients."""

    def __init__(self, problem: Problem, partition: Partition, wanted: FlatnessSettings) -> None:
        self.problem, self.partition, self.wanted = problem, partition, wanted
        self.gap_examples = GAP_EXAMPLES

    # --- what is looked at -------------------------------------------------------------------------------------------------------

    @cached_property
    def clients(self) -> list[int]:
        """The clients whose data are looked at: all, or as many as wanted, drawn by the seed."""
        count = len(self.partition.described_clients)
        chosen = generator(self.wanted.seed, "observed clients").permutation(count)[: self.wanted.clients]
        return [int(client) for client in np.sort(chosen)]

    @cached_property
    def positions(self) -> np.ndarray:
        """The training examples that are looked at: all that training clients have, or as many as wanted, drawn by the seed."""
        return self._drawn(self.wanted.examples)

    def _drawn(self, most: int) -> np.ndarray:
        every = np.unique(np.concatenate(self.partition.described_clients))
        order = generator(self.wanted.seed, "observed examples").permutation(len(every))
        return np.sort(every[order[:most]])

    def objective(self, model: ModelState, positions: np.ndarray) -> Objective:
        """The mean loss of a model over some training examples, as a function of its weights."""
        problem, train = self.problem, self.problem.data.train
        chosen = torch.from_numpy(np.ascontiguousarray(positions, dtype=np.int64))
        return Objective(
            problem.model,
            problem.task.loss,
            TensorBatches(train.inputs, train.targets, min(problem.evaluation_batch, BATCH), chosen),
            prepare=self._prepared,
            sums=None if isinstance(problem.task, PooledTask) else problem.task.sums,
            buffers={**problem.buffers.views(model.buffers), **model.integers},
            weights=model.weights,
        )

    def examples(self, positions: np.ndarray) -> Examples:
        """Training examples at some positions."""
        train = self.problem.data.train
        return train.take(torch.from_numpy(positions).to(train.targets.device))

    def _prepared(self, raw: Tensor) -> Tensor:
        inputs = self.problem.normalised(raw)
        return inputs.to(self.problem.dtype) if inputs.is_floating_point() else inputs

    # --- what is seen ------------------------------------------------------------------------------------------------------------

    def gap(self, model: ModelState, scored: Mapping[str, Scores] | None = None) -> Figures:
        """Test less training loss, and training less test metric; where clients never train, unseen less training loss too.

        ``scored`` are the scores on held-out sets, where the model has been evaluated on them already.
        """
        scorer, metric = Scorer(self.problem, model), self.problem.task.metric
        train = scorer.of(self.problem.data.train, self._drawn(self.gap_examples))
        held_out = {
            name: scored[name] if scored else scorer.of(examples) for name, examples in self.problem.held_out.items()
        }
        test = held_out["test"]
        figures: Figures = {"train_loss": train["loss"], "test_loss": test["loss"], "gap": test["loss"] - train["loss"]}
        if metric in train:
            figures[f"{metric}_gap"] = train[metric] - test[metric]
        if "unseen" in held_out:
            unseen = held_out["unseen"]["loss"]
            figures |= {"unseen_loss": unseen, "participation_gap": unseen - train["loss"]}
        return {name: number(value) for name, value in figures.items()}

    def classes(self, model: ModelState) -> Figures:
        """The task's metric on each class of the test set, and on the data of each client that is looked at."""
        scorer, metric = Scorer(self.problem, model), self.problem.task.metric
        names, found = self.problem.data.classes, scorer.by_class(self.problem.held_out["test"])
        each = {
            str(client): scorer.of(self.problem.data.train, self.partition.clients[client]) for client in self.clients
        }
        return {
            "classes": {names[label]: number(scores[metric]) for label, scores in found.items()},
            "clients": {client: number(scores[metric]) for client, scores in each.items()},
        }

    def features(self, model: ModelState) -> dict[str, float | None]:
        """The mean of ||f(x)|| over each client's data, f(x) being what the classifier puts out (ECCV Fig. 7)."""
        buffers = {**self.problem.buffers.views(model.buffers), **model.integers}
        found = {}
        for client in self.clients:
            norms = [
                self.problem.predicted(model.weights, buffers, batch).float().reshape(len(batch), -1).norm(dim=1)
                for batch in self._inputs(self.partition.clients[client])
            ]
            found[str(client)] = number(torch.cat(norms).mean())
        return found

    def _inputs(self, positions: np.ndarray) -> Iterator[Tensor]:
        for start in range(0, len(positions), self.problem.evaluation_batch):
            part = self.examples(positions[start : start + self.problem.evaluation_batch])
            yield moved(part, self.problem.device).inputs

    def constants(self, model: ModelState) -> tuple[Constants, Figures]:
        """L, beta, sigma and sigma_g as this model shows them, and how far the clients' gradients disagree."""
        model = self._still(model)
        rows = torch.stack(
            [self.objective(model, self.partition.clients[client]).gradient() for client in self.clients]
        )
        noise = longest = 0.0
        for client, gradient in zip(self.clients, rows, strict=True):
            spread = self._spread(model, client, gradient)
            noise, longest = max(noise, spread.noise), max(longest, spread.longest)
        beta = self._lambda_max(model, self.positions)
        apart = disagreement(rows)
        figures = {name: number(value) for name, value in apart._asdict().items()}
        return Constants(longest, max(beta, 0.0), noise, heterogeneity(rows)), figures

    def _spread(self, model: ModelState, client: int, gradient: Tensor) -> GradientSpread:
        positions = self.partition.clients[client]
        drawn = generator(self.wanted.seed, "observed gradients", 0, client).permutation(len(positions))[:SINGLE]
        spread = GradientSpread(gradient)
        for one in np.sort(drawn):
            spread.add(self.objective(model, positions[one : one + 1]).gradient())
        return spread

    def lambda_max(self, model: ModelState) -> float:
        """The largest eigenvalue of the Hessian of a model's loss over the training examples; not a number where that is not finite."""
        return self._lambda_max(self._still(model), self.positions)

    def _still(self, model: ModelState) -> ModelState:
        return with_statistics(self.problem, model, self.positions)

    def _lambda_max(self, model: ModelState, positions: np.ndarray) -> float:
        hessian = Operator.of_hessian(self.objective(model, positions))
        try:
            # The error of an eigenvalue is of the order of its residual squared.
            return float(lanczos(hessian, Ends(1), tolerance=RESIDUAL, most=PRODUCTS, seed=self.wanted.seed).values[0])
        except UserError:  # products that are not finite: a run that diverges says so itself, a little later
            return math.nan

    def sharpness(self, model: ModelState) -> float:
        """f(w + rho g / ||g||) - f(w): how far the training loss rises by a step of SAM's ascent (Foret et al. 2021), rho = 0.05."""
        objective = self.objective(self._still(model), self.positions)
        loss, gradient = objective.loss_and_gradient()
        return float(objective.loss(model.weights + RHO * unit(gradient)) - loss)

    def local_curvature(self, models: Iterable[ModelState], members: Sequence[Client]) -> Figures:
        """lambda_max of each client's own model on its own data (ECCV Figs. 4 and 16), and the loss there."""
        found: dict[str, Any] = {"lambda_max": {}, "loss": {}}
        for model, client in zip(models, members, strict=True):
            positions = client.indices
            if len(positions) > self.wanted.examples:
                order = generator(self.wanted.seed, "observed local examples", 0, client.number).permutation(
                    len(positions)
                )
                positions = np.sort(positions[order[: self.wanted.examples]])
            found["lambda_max"][str(client.number)] = number(self._lambda_max(model, positions))
            found["loss"][str(client.number)] = number(self.objective(model, positions).loss())
        return found
