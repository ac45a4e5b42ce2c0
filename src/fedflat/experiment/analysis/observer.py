"""Flatness measurements during training. They read copies and views only, so training stays bit-identical."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property, partial

import numpy as np
import torch
from torch import Tensor

from fedflat.algorithms import Algorithm
from fedflat.algorithms.algorithm import States
from fedflat.algorithms.local_optimiser.base import LocalOptimiser
from fedflat.algorithms.lr_schedule import Schedule
from fedflat.algorithms.slot import unit
from fedflat.data import Partition
from fedflat.engines.cpu.engine import one_thread
from fedflat.engines.problem.problem import Problem
from fedflat.engines.problem.task import finite_or_none
from fedflat.engines.round.contract import Client, ModelState, Outcome
from fedflat.errors import UserError
from fedflat.experiment.analysis.cohort import Measurements, measure_cohort
from fedflat.experiment.analysis.model_measures import MAX_PRODUCTS, MODEL_MEASURES, RHO, TOLERANCE
from fedflat.experiment.analysis.replay import each_local_model
from fedflat.experiment.analysis.run_model import objective_on, with_statistics
from fedflat.experiment.analysis.scoring import Scorer, Scores, take_on_device
from fedflat.experiment.analysis.similarity import ServerReference
from fedflat.experiment.config import Config, FlatnessSettings
from fedflat.flatness import Objective
from fedflat.flatness.clients import disagreement
from fedflat.flatness.curvature.lanczos import Ends, lanczos
from fedflat.flatness.curvature.operator import Operator
from fedflat.flatness.theory import Constants, GradientSpread, heterogeneity
from fedflat.randomness import generator
from fedflat.setting_names import parse_measurements

MAX_BATCH = 500
"""Largest number of examples per batch; second derivatives need several times the memory of a training step."""
GAP_EXAMPLES = 10_000
"""Training examples for the generalisation gap; with fewer, sampling error dominates."""
EXAMPLES_PER_CLIENT = 10
"""Examples per client for per-example gradients."""
EIGENVECTORS = 10
"""Dimension of the eigenspaces whose overlap is measured."""


class FixedSample:
    """Measures models on a fixed sample of training examples and on the data of a fixed sample of clients.

    Args:
        problem: the federated problem.
        partition: its partition.
        settings: the sizes of both samples and their seed.
    """

    def __init__(self, problem: Problem, partition: Partition, settings: FlatnessSettings) -> None:
        self.problem, self.partition, self.settings = problem, partition, settings
        self.gap_examples = GAP_EXAMPLES

    @cached_property
    def clients(self) -> list[int]:
        """Numbers of the sampled clients, sorted; of lazily generated clients, only the first 1000 can be sampled."""
        everyone = np.arange(len(self.partition.summarised_clients))
        return [int(client) for client in self._draw(everyone, self.settings.clients, "observed clients")]

    @cached_property
    def positions(self) -> np.ndarray:
        """Positions of the sampled training examples, sorted, [examples]."""
        return self._draw_examples(self.settings.examples)

    def _draw_examples(self, count: int) -> np.ndarray:
        """Sorted positions of at most ``count`` training examples that clients hold."""
        return self._draw(self.partition.trained_on, count, "observed examples")

    def _draw(self, values: np.ndarray, count: int, purpose: str, client: int = 0) -> np.ndarray:
        """Sample at most ``count`` of the values without replacement, in their original order.

        Every purpose has its own random stream; if ``client`` is given, so does every client.
        """
        order = generator(self.settings.seed, purpose, client=client).permutation(len(values))
        return values[np.sort(order[:count])]

    def objective(self, model: ModelState, positions: np.ndarray) -> Objective:
        """Return the mean loss over training examples at ``positions``, as a function of the weights."""
        batch_size = min(self.problem.evaluation_batch, MAX_BATCH)
        return objective_on(self.problem, model, self.problem.data.train, positions, batch_size)

    def gap(self, model: ModelState, scores: Mapping[str, Scores] | None = None) -> Measurements:
        """Compute the generalisation gaps of a model.

        Args:
            model: the model.
            scores: its metrics by evaluation set (``test``, and ``unseen`` for held-out clients); default: computed.

        Returns:
            Losses; ``gap`` (test minus training loss); the gap of the primary metric (training minus test); and, if
            clients were held out, ``participation_gap`` (their loss minus the training loss).
        """
        scorer, metric = Scorer(self.problem, model), self.problem.task.metric
        train = scorer.scores(self.problem.data.train, self._draw_examples(self.gap_examples))
        if not scores:
            scores = {name: scorer.scores(examples) for name, examples in self.problem.evaluation_sets.items()}
        test = scores["test"]
        gaps = {"train_loss": train["loss"], "test_loss": test["loss"], "gap": test["loss"] - train["loss"]}
        if metric in train:  # a user-defined task may report only the loss
            gaps[f"{metric}_gap"] = train[metric] - test[metric]
        if "unseen" in self.problem.evaluation_sets:
            unseen_loss = scores["unseen"]["loss"]
            gaps |= {"unseen_loss": unseen_loss, "participation_gap": unseen_loss - train["loss"]}
        return {name: finite_or_none(value) for name, value in gaps.items()}

    def classes(self, model: ModelState) -> Measurements:
        """The primary metric per test class, and per sampled client on its own data."""
        scorer, metric = Scorer(self.problem, model), self.problem.task.metric
        data, names = self.problem.data, self.problem.data.classes
        by_class = scorer.scores_by_class(self.problem.evaluation_sets["test"])
        by_client = {client: scorer.scores(data.train, self.partition.clients[client]) for client in self.clients}
        return {
            "classes": {names[label]: finite_or_none(scores[metric]) for label, scores in by_class.items()},
            "clients": {str(client): finite_or_none(scores[metric]) for client, scores in by_client.items()},
        }

    def features(self, model: ModelState) -> dict[str, float | None]:
        """The mean norm of the model's outputs f(x) on each sampled client's data (Caldarola et al. 2022, Fig. 7)."""
        problem = self.problem
        buffers = {**problem.buffer_layout.views(model.buffers), **model.integer_buffers}
        means = {}
        for client in self.clients:
            norms = []
            for positions in torch.split(torch.from_numpy(self.partition.clients[client]), problem.evaluation_batch):
                inputs = take_on_device(problem, problem.data.train, positions).inputs
                output = problem.predict(model.weights, buffers, inputs).float()
                norms.append(output.reshape(len(output), -1).norm(dim=1))
            means[str(client)] = finite_or_none(torch.cat(norms).mean())
        return means

    def constants(self, model: ModelState) -> tuple[Constants, Measurements]:
        """Constants in the bounds of Liu et al. 2025 (FedSWA) at a model, and the disagreement of client gradients.

        The constants are L (largest gradient norm of one example), beta (smoothness: the largest Hessian eigenvalue),
        sigma (noise of one example's gradient within a client) and sigma_g (distance of clients' gradients from their
        mean).
        """
        model = self._with_statistics(model)
        gradients = torch.stack(
            [self.objective(model, self.partition.clients[client]).gradient() for client in self.clients]
        )
        noise = largest_norm = 0.0
        for client, gradient in zip(self.clients, gradients, strict=True):
            spread = self._gradient_spread(model, client, gradient)
            noise, largest_norm = max(noise, spread.noise), max(largest_norm, spread.largest_norm)
        beta = self._lambda_max(model, self.positions)
        spread_of_clients = disagreement(gradients)._asdict()
        measurements = {name: finite_or_none(value) for name, value in spread_of_clients.items()}
        smoothness = max(beta, 0.0)  # where the loss is concave, even the largest eigenvalue is negative
        return Constants(largest_norm, smoothness, noise, heterogeneity(gradients)), measurements

    def _gradient_spread(self, model: ModelState, client: int, gradient: Tensor) -> GradientSpread:
        """The spread of single examples' gradients around a client's ``gradient`` [parameters]."""
        spread = GradientSpread(gradient)
        positions = self.partition.clients[client]
        for position in self._draw(positions, EXAMPLES_PER_CLIENT, "observed gradients", client):
            spread.add(self.objective(model, np.array([position])).gradient())
        return spread

    def lambda_max(self, model: ModelState) -> float:
        """The largest Hessian eigenvalue on the sampled training examples; NaN if the loss is not finite."""
        return self._lambda_max(self._with_statistics(model), self.positions)

    def _with_statistics(self, model: ModelState) -> ModelState:
        return with_statistics(self.problem, model, self.positions)

    def _lambda_max(self, model: ModelState, positions: np.ndarray) -> float:
        """The largest Hessian eigenvalue on training examples at ``positions``; NaN if the loss is not finite."""
        hessian = Operator.of_hessian(self.objective(model, positions))
        try:
            # A loose tolerance suffices: the error of a Ritz value is quadratic in its residual.
            result = lanczos(hessian, Ends(1), tolerance=TOLERANCE, max_products=MAX_PRODUCTS, seed=self.settings.seed)
        except UserError:  # non-finite products; the run itself will report divergence
            return math.nan
        return float(result.values[0])

    def sharpness(self, model: ModelState) -> float:
        """SAM's first-order sharpness f(w + rho g / ||g||) - f(w) at rho = 0.05 (Foret et al. 2021).

        f is the mean loss on the sampled training examples, w the model's weights and g the gradient of f at w.
        """
        objective = self.objective(self._with_statistics(model), self.positions)
        loss, gradient = objective.loss_and_gradient()
        return float(objective.loss(model.weights + RHO * unit(gradient)) - loss)

    def measure(self, model: ModelState, name: str) -> Measurements:
        """Return the values of one of ``MODEL_MEASURES`` on the sampled training examples; none if it is undefined."""
        objective = self.objective(self._with_statistics(model), self.positions)
        try:
            values = MODEL_MEASURES[name](objective, self.settings.seed)
        except UserError:  # e.g. a loss that is not finite; a measurement must not stop the run
            return {}
        return {key: finite_or_none(value) for key, value in values.items() if value is not None}

    def local_curvature(self, models: Iterable[ModelState], clients: Sequence[Client]) -> Measurements:
        """Compute lambda_max and loss of each client's model on a sample of that client's data, by client number.

        lambda_max is the largest eigenvalue of the Hessian.

        Args:
            models: one model per client, after local training.
            clients: the clients, in the same order.
        """
        eigenvalues: Measurements = {}
        losses: Measurements = {}
        for model, client in zip(models, clients, strict=True):
            positions = self._local_positions(client)
            eigenvalues[str(client.number)] = finite_or_none(self._lambda_max(model, positions))
            losses[str(client.number)] = finite_or_none(self.objective(model, positions).loss())
        return {"lambda_max": eigenvalues, "loss": losses}

    def similarity(self, server: ModelState, models: Iterable[ModelState], clients: Sequence[Client]) -> Measurements:
        """Compare clients with the server model: overlap of top eigenspaces and CKA of features, by client number.

        Args:
            server: the server model before the round; the eigenspaces of both losses are those at this model.
            models: one model per client, after local training.
            clients: the clients, in the same order.
        """
        server = self._with_statistics(server)
        overlaps: Measurements = {}
        cka: Measurements = {}
        # Within a run, a warning for each client with arbitrary eigenvectors would be noise.
        with warnings.catch_warnings(), suppress(UserError):  # e.g. a loss that is not finite
            warnings.simplefilter("ignore")
            global_loss = self.objective(server, self.positions)
            options = {"tolerance": TOLERANCE, "max_products": MAX_PRODUCTS}
            reference = ServerReference(global_loss, EIGENVECTORS, self.settings.seed, **options)
            for model, client in zip(models, clients, strict=True):
                client_loss = self.objective(server, self._local_positions(client))
                overlaps[str(client.number)] = reference.overlap(client_loss)
                cka[str(client.number)] = reference.cka(self.objective(model, self.positions))
        return {"overlap_at_server": overlaps, "cka": cka}

    def _local_positions(self, client: Client) -> np.ndarray:
        """Sorted positions of a client's examples, or of a sample of them if there are many."""
        positions, most = client.indices, self.settings.examples
        if len(positions) <= most:
            return positions
        return np.sort(self._draw(positions, most, "observed local examples", client.number))


class Observer:
    """Measures a run every N rounds and after the last one.

    Args:
        config: the run's config, which says what to measure, and how often.
        problem: its problem.
        partition: its partition.
        algorithm: its algorithm.
    """

    def __init__(self, config: Config, problem: Problem, partition: Partition, algorithm: Algorithm) -> None:
        self.wanted = parse_measurements(config.flatness.what)
        self._seconds = 0.0
        assert config.flatness.every is not None
        self._every, self._training, self._algorithm = config.flatness.every, config.training, algorithm
        self._sample, self._problem = FixedSample(problem, partition, config.flatness), problem
        self._cohort: Measurements = {}

    def is_due(self, completed_rounds: int) -> bool:
        """Whether to measure after ``completed_rounds`` rounds."""
        return completed_rounds % self._every == 0 or completed_rounds == self._training.rounds

    def observe_cohort(self, clients: list[Client], outcome: Outcome, server: ModelState, states: States) -> None:
        """Measure a cohort right after local training, while the engine still holds each client's update.

        Args:
            clients: the cohort's clients, with their state before the round.
            outcome: the result of local training.
            server: the server model before the round.
            states: the server states that the cohort received.
        """
        self._cohort = {}
        with self._measuring():
            if "drift" in self.wanted:
                self._cohort = measure_cohort(self._algorithm, clients, outcome, states)
            for name, part, measure in (
                ("clients", "local", self._sample.local_curvature),
                ("similarity", "similarity", partial(self._sample.similarity, server)),
            ):
                if name in self.wanted:
                    self._cohort["clients"] = [client.number for client in clients]
                    self._cohort[part] = measure(
                        each_local_model(self._algorithm, self._problem, clients, outcome), clients
                    )

    def measurements(
        self, models: dict[str, ModelState], scores: Mapping[str, Mapping[str, Scores]], completed_rounds: int
    ) -> Measurements:
        """Return all requested measurements of the current models and of the last cohort.

        Args:
            models: models by name, including ``server``.
            scores: their metrics by model and evaluation set, e.g. ``test``.
            completed_rounds: number of rounds that the models have been trained for.
        """
        server, sample = models["server"], self._sample
        measurements: Measurements = {}
        with self._measuring():
            by_model = {name: self._measure_model(model, scores[name]) for name, model in models.items()}
            if any(by_model.values()):
                measurements["models"] = by_model
            if "lambda_max" in self.wanted:
                measurements["stability_threshold"] = self._stability_threshold(completed_rounds)
            if "classes" in self.wanted:
                measurements["accuracy"] = sample.classes(server)
            if "features" in self.wanted:
                measurements["features"] = sample.features(server)
            if "noise" in self.wanted:
                constants, gradients = sample.constants(server)
                measurements["constants"] = {name: finite_or_none(value) for name, value in constants.known().items()}
                measurements["gradients"] = gradients
        if self._cohort:
            measurements["cohort"] = self._cohort
            self._cohort = {}  # a cohort is reported once
        return measurements

    def take_seconds(self) -> float:
        """Return the seconds spent on measurements since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _stability_threshold(self, completed_rounds: int) -> float | None:
        """The largest curvature at which local gradient descent is stable (Cohen et al. 2021); None for Adam and Muon.

        It is 2/lr, or (2 + 2 momentum)/lr with heavy-ball momentum, for the learning rate at the start of the round
        that was completed last. On a quadratic with larger curvature, gradient descent diverges.
        """
        training = self._training
        if type(self._algorithm.local_optimiser) is not LocalOptimiser:
            return None
        schedule = Schedule(training.lr, training.lr_decay, training.rounds)
        round_index, step, steps = torch.tensor([max(completed_rounds - 1, 0), 0, 1], dtype=torch.float64)
        lr = float(self._algorithm.lr_schedule(schedule, round_index, step, steps))
        return (2 + 2 * training.momentum) / lr if lr > 0 else None

    def _measure_model(self, model: ModelState, scores: Mapping[str, Scores]) -> Measurements:
        """Return the requested measurements of one model, given its metrics on each evaluation set, e.g. ``test``."""
        measurements: Measurements = {}
        if "lambda_max" in self.wanted:
            measurements["lambda_max"] = finite_or_none(self._sample.lambda_max(model))
        if "sharpness" in self.wanted:
            measurements["sharpness"] = finite_or_none(self._sample.sharpness(model))
        for name in MODEL_MEASURES:
            if name in self.wanted:
                measurements |= self._sample.measure(model, name)
        if "gap" in self.wanted:
            measurements |= self._sample.gap(model, scores)
        return measurements

    @contextmanager
    def _measuring(self) -> Iterator[None]:
        """Time a measurement and run it on one thread; restore the model's mode and torch's generators afterwards."""
        begun, was_training = time.monotonic(), self._problem.model.training
        on_gpu = self._problem.device.type == "cuda"
        # The GPU's generator is used only if models are evaluated in training mode, so restore it only then.
        devices = [torch.cuda.current_device()] if on_gpu and self._problem.batch_statistics else []
        with one_thread(), torch.random.fork_rng(devices):
            yield
            if on_gpu:
                torch.cuda.synchronize()
        self._problem.model.train(was_training)
        self._seconds += time.monotonic() - begun
