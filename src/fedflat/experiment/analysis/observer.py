"""Flatness measurements during training. They read copies and views only, so training stays bit-identical."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedflat.algorithms import Algorithm
from fedflat.algorithms.algorithm import States
from fedflat.algorithms.slot import unit
from fedflat.data import Examples, Partition
from fedflat.engines.cpu.engine import one_thread
from fedflat.engines.problem.problem import Problem, move_examples
from fedflat.engines.problem.task import PooledTask
from fedflat.engines.round.contract import Client, ModelState, Outcome
from fedflat.engines.round.plan import generator
from fedflat.errors import UserError
from fedflat.experiment.analysis.cohort import Figures, measure_cohort, number
from fedflat.experiment.analysis.replay import each_local_model
from fedflat.experiment.analysis.run_model import with_statistics
from fedflat.experiment.analysis.scoring import Scorer, Scores
from fedflat.experiment.config import FlatnessSettings
from fedflat.experiment.quantities import parse_measurements
from fedflat.flatness import Objective
from fedflat.flatness.batches import TensorBatches
from fedflat.flatness.clients.drift import disagreement
from fedflat.flatness.curvature.lanczos import Ends, lanczos
from fedflat.flatness.curvature.operator import Operator
from fedflat.flatness.theory.noise import Constants, GradientSpread, heterogeneity

BATCH = 500
"""Examples per batch; second derivatives need several times the memory of a training step."""
RHO = 0.05
"""Radius of the sharpness measurement."""
RESIDUAL, PRODUCTS = 1e-2, 100
"""Relative residual at which Lanczos stops, and its maximum number of Hessian-vector products."""
GAP_EXAMPLES = 10_000
"""Training examples for the generalisation gap; with fewer, sampling error dominates."""
SINGLE = 10
"""Examples per client for per-example gradients."""


class FixedSample:
    """Measures models on ``wanted.examples`` training examples and on the data of ``wanted.clients`` clients."""

    def __init__(self, problem: Problem, partition: Partition, wanted: FlatnessSettings) -> None:
        self.problem, self.partition, self.wanted = problem, partition, wanted
        self.gap_examples = GAP_EXAMPLES

    @cached_property
    def clients(self) -> list[int]:
        """Numbers of the sampled clients, sorted."""
        count = len(self.partition.described_clients)
        chosen = generator(self.wanted.seed, "observed clients").permutation(count)[: self.wanted.clients]
        return [int(client) for client in np.sort(chosen)]

    @cached_property
    def positions(self) -> np.ndarray:
        """Positions of the sampled training examples, sorted."""
        return self._drawn(self.wanted.examples)

    def _drawn(self, most: int) -> np.ndarray:
        every = np.unique(np.concatenate(self.partition.described_clients))
        order = generator(self.wanted.seed, "observed examples").permutation(len(every))
        return np.sort(every[order[:most]])

    def objective(self, model: ModelState, positions: np.ndarray) -> Objective:
        """The mean loss over training examples at ``positions``, as a function of the weights."""
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
        """Training examples at ``positions``."""
        train = self.problem.data.train
        return train.take(torch.from_numpy(positions).to(train.targets.device))

    def _prepared(self, raw: Tensor) -> Tensor:
        inputs = self.problem.normalised(raw)
        return inputs.to(self.problem.dtype) if inputs.is_floating_point() else inputs

    def gap(self, model: ModelState, scored: Mapping[str, Scores] | None = None) -> Figures:
        """Generalisation gaps: test minus training loss, training minus test metric, held-out clients minus training
        loss.

        ``scored`` holds the metrics on held-out sets, if already computed.
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
        """The primary metric per test class, and per sampled client on its own data."""
        scorer, metric = Scorer(self.problem, model), self.problem.task.metric
        names, by_class = self.problem.data.classes, scorer.by_class(self.problem.held_out["test"])
        each = {
            str(client): scorer.of(self.problem.data.train, self.partition.clients[client]) for client in self.clients
        }
        return {
            "classes": {names[label]: number(scores[metric]) for label, scores in by_class.items()},
            "clients": {client: number(scores[metric]) for client, scores in each.items()},
        }

    def features(self, model: ModelState) -> dict[str, float | None]:
        """The mean of ||f(x)|| over each client's data, with the classifier output f(x) (ECCV Fig. 7)."""
        buffers = {**self.problem.buffers.views(model.buffers), **model.integers}
        means = {}
        for client in self.clients:
            norms = [
                self.problem.predict(model.weights, buffers, batch).float().reshape(len(batch), -1).norm(dim=1)
                for batch in self._inputs(self.partition.clients[client])
            ]
            means[str(client)] = number(torch.cat(norms).mean())
        return means

    def _inputs(self, positions: np.ndarray) -> Iterator[Tensor]:
        for start in range(0, len(positions), self.problem.evaluation_batch):
            part = self.examples(positions[start : start + self.problem.evaluation_batch])
            yield move_examples(part, self.problem.device).inputs

    def constants(self, model: ModelState) -> tuple[Constants, Figures]:
        """Empirical L, beta, sigma and sigma_g of a model, and the disagreement of client gradients."""
        model = self._with_statistics(model)
        rows = torch.stack(
            [self.objective(model, self.partition.clients[client]).gradient() for client in self.clients]
        )
        noise = longest = 0.0
        for client, gradient in zip(self.clients, rows, strict=True):
            spread = self._spread(model, client, gradient)
            noise, longest = max(noise, spread.noise), max(longest, spread.largest_norm)
        beta = self._lambda_max(model, self.positions)
        figures = {name: number(value) for name, value in disagreement(rows)._asdict().items()}
        return Constants(longest, max(beta, 0.0), noise, heterogeneity(rows)), figures

    def _spread(self, model: ModelState, client: int, gradient: Tensor) -> GradientSpread:
        positions = self.partition.clients[client]
        drawn = generator(self.wanted.seed, "observed gradients", 0, client).permutation(len(positions))[:SINGLE]
        spread = GradientSpread(gradient)
        for place in np.sort(drawn):
            spread.add(self.objective(model, positions[place : place + 1]).gradient())
        return spread

    def lambda_max(self, model: ModelState) -> float:
        """The largest Hessian eigenvalue on the sampled training examples; NaN if the loss is not finite."""
        return self._lambda_max(self._with_statistics(model), self.positions)

    def _with_statistics(self, model: ModelState) -> ModelState:
        return with_statistics(self.problem, model, self.positions)

    def _lambda_max(self, model: ModelState, positions: np.ndarray) -> float:
        hessian = Operator.of_hessian(self.objective(model, positions))
        try:
            # The error of a Ritz value is quadratic in its residual.
            pairs = lanczos(hessian, Ends(1), tolerance=RESIDUAL, max_products=PRODUCTS, seed=self.wanted.seed)
            return float(pairs.values[0])
        except UserError:  # non-finite products; the run itself will report divergence
            return math.nan

    def sharpness(self, model: ModelState) -> float:
        """f(w + rho g / ||g||) - f(w), SAM's first-order sharpness at rho = 0.05 (Foret et al. 2021)."""
        objective = self.objective(self._with_statistics(model), self.positions)
        loss, gradient = objective.loss_and_gradient()
        return float(objective.loss(model.weights + RHO * unit(gradient)) - loss)

    def local_curvature(self, models: Iterable[ModelState], members: Sequence[Client]) -> Figures:
        """lambda_max and loss of each client's model on its own data (ECCV Figs. 4 and 16)."""
        values: dict[str, Any] = {"lambda_max": {}, "loss": {}}
        for model, client in zip(models, members, strict=True):
            positions = client.indices
            if len(positions) > self.wanted.examples:
                order = generator(self.wanted.seed, "observed local examples", 0, client.number).permutation(
                    len(positions)
                )
                positions = np.sort(positions[order[: self.wanted.examples]])
            values["lambda_max"][str(client.number)] = number(self._lambda_max(model, positions))
            values["loss"][str(client.number)] = number(self.objective(model, positions).loss())
        return values


class Observer:
    """Measures a run every N rounds and after the last one."""

    def __init__(
        self, wanted: FlatnessSettings, problem: Problem, partition: Partition, algorithm: Algorithm, last: int
    ) -> None:
        self.what = parse_measurements(wanted.what)
        self.seconds = 0.0
        """Seconds spent on measurements in the current round."""
        self._every, self._last, self._algorithm = wanted.every, last, algorithm
        self._sample, self._problem = FixedSample(problem, partition, wanted), problem
        self._cohort: Figures = {}

    def due(self, rounds: int) -> bool:
        """Whether to measure after ``rounds``."""
        return self._every is not None and (rounds % self._every == 0 or rounds == self._last)

    def trained(self, members: list[Client], outcome: Outcome, states: States) -> None:
        """Measure a cohort after local training, while its rows exist; ``states`` are the server states it received."""
        self.seconds, self._cohort = 0.0, {}
        with self._measuring():
            if "drift" in self.what:
                self._cohort = measure_cohort(self._algorithm, members, outcome, states)
            if "clients" in self.what:
                self._cohort |= {"clients": [client.number for client in members]}
                self._cohort["local"] = self._sample.local_curvature(
                    each_local_model(self._algorithm, members, outcome), members
                )

    def figures(self, models: dict[str, ModelState], scored: Mapping[str, Mapping[str, Scores]]) -> Figures:
        """All requested measurements of the current models and of the last cohort; ``scored`` holds held-out
        metrics.
        """
        figures: Figures = {}
        with self._measuring():
            for name, model in models.items():
                of_model = self._of_model(model, scored[name])
                if of_model:
                    figures.setdefault("models", {})[name] = of_model
            server, sample = models["server"], self._sample
            if "classes" in self.what:
                figures["accuracy"] = sample.classes(server)
            if "features" in self.what:
                figures["features"] = sample.features(server)
            if "noise" in self.what:
                constants, gradients = sample.constants(server)
                figures["constants"] = {name: number(value) for name, value in constants.known().items()}
                figures["gradients"] = gradients
        if self._cohort:
            figures["cohort"] = self._cohort
            self._cohort = {}
        return figures

    def _of_model(self, model: ModelState, scored: Mapping[str, Scores]) -> Figures:
        sample, figures = self._sample, {}
        if "lambda_max" in self.what:
            figures["lambda_max"] = number(sample.lambda_max(model))
        if "sharpness" in self.what:
            figures["sharpness"] = number(sample.sharpness(model))
        if "gap" in self.what:
            figures |= sample.gap(model, scored)
        return figures

    @contextmanager
    def _measuring(self) -> Iterator[None]:
        """Timed, on one thread for reproducibility, restoring the model's mode and torch's generators."""
        begun, training = time.monotonic(), self._problem.model.training
        # On a GPU only evaluation in training mode draws random numbers.
        draws = self._problem.device.type == "cuda" and self._problem.batch_statistics
        with one_thread(), torch.random.fork_rng([torch.cuda.current_device()] if draws else []):
            yield
            if self._problem.device.type == "cuda":
                torch.cuda.synchronize()
        self._problem.model.train(training)
        self.seconds += time.monotonic() - begun
