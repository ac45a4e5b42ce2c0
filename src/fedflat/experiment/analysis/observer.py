"""Flatness measurements during training. They read copies and views only, so training stays bit-identical."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from fedflat.algorithms import Algorithm
from fedflat.algorithms.algorithm import States
from fedflat.data import Partition
from fedflat.engines.cpu.engine import one_thread
from fedflat.engines.problem.problem import Problem
from fedflat.engines.round.contract import Client, ModelState, Outcome
from fedflat.experiment.analysis.cohort import Figures, cohort_figures, number
from fedflat.experiment.analysis.fixed_sample import FixedSample
from fedflat.experiment.analysis.replay import each_local_model
from fedflat.experiment.analysis.scoring import Scores
from fedflat.experiment.config import FlatnessSettings
from fedflat.experiment.quantities import wanted_names


class Observer:
    """Measures a run every N rounds and after the last one."""

    def __init__(
        self, wanted: FlatnessSettings, problem: Problem, partition: Partition, algorithm: Algorithm, last: int
    ) -> None:
        self.what = wanted_names(wanted.what)
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
                self._cohort = cohort_figures(self._algorithm, members, outcome, states)
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
                figures["constants"] = {name: number(value) for name, value in constants.plain().items()}
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
