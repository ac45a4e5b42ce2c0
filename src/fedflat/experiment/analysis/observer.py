"""What a run logs about flatness while it trains: figures alone, from copies and views, so that training stays the same to the bit."""

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
from fedflat.experiment.analysis.fixed_sample import Look
from fedflat.experiment.analysis.replay import each_local_model
from fedflat.experiment.analysis.scoring import Scores
from fedflat.experiment.config import FlatnessSettings
from fedflat.experiment.quantities import wanted_names


class Observer:
    """Looks at a run every so many rounds, and after the last; says how long it took."""

    def __init__(
        self, wanted: FlatnessSettings, problem: Problem, partition: Partition, algorithm: Algorithm, last: int
    ) -> None:
        self.what = wanted_names(wanted.what)
        self.seconds = 0.0
        """How long the looks of the current round took."""
        self._every, self._last, self._algorithm = wanted.every, last, algorithm
        self._look, self._problem = Look(problem, partition, wanted), problem
        self._cohort: Figures = {}

    def due(self, rounds: int) -> bool:
        """Whether there is a look after so many rounds."""
        return self._every is not None and (rounds % self._every == 0 or rounds == self._last)

    def trained(self, members: list[Client], outcome: Outcome, states: States) -> None:
        """See a cohort that has just trained, while its rows are there; ``states`` are those that it received."""
        self.seconds, self._cohort = 0.0, {}
        with self._looking():
            if "drift" in self.what:
                self._cohort = cohort_figures(self._algorithm, members, outcome, states)
            if "clients" in self.what:
                self._cohort |= {"clients": [client.number for client in members]}
                self._cohort["local"] = self._look.local_curvature(
                    each_local_model(self._algorithm, members, outcome), members
                )

    def figures(self, models: dict[str, ModelState], scored: Mapping[str, Mapping[str, Scores]]) -> Figures:
        """Everything that was asked for, of the models there are now, just scored on held-out sets; of the cohort as it was seen last."""
        found: Figures = {}
        with self._looking():
            for name, model in models.items():
                of_model = self._of_model(model, scored[name])
                if of_model:
                    found.setdefault("models", {})[name] = of_model
            server, look = models["server"], self._look
            if "classes" in self.what:
                found["accuracy"] = look.classes(server)
            if "features" in self.what:
                found["features"] = look.features(server)
            if "noise" in self.what:
                constants, apart = look.constants(server)
                found["constants"] = {name: number(value) for name, value in constants.plain().items()}
                found["gradients"] = apart
        if self._cohort:
            found["cohort"] = self._cohort
            self._cohort = {}
        return found

    def _of_model(self, model: ModelState, scored: Mapping[str, Scores]) -> Figures:
        look, found = self._look, {}
        if "lambda_max" in self.what:
            found["lambda_max"] = number(look.lambda_max(model))
        if "sharpness" in self.what:
            found["sharpness"] = number(look.sharpness(model))
        if "gap" in self.what:
            found |= look.gap(model, scored)
        return found

    @contextmanager
    def _looking(self) -> Iterator[None]:
        """On one thread, so that figures do not depend on the machine; timed; with the model's mode and torch's generator as they were."""
        begun, training = time.monotonic(), self._problem.model.training
        # On a GPU nothing draws at random but what is evaluated in training mode.
        draws = self._problem.device.type == "cuda" and self._problem.batch_statistics
        with one_thread(), torch.random.fork_rng([torch.cuda.current_device()] if draws else []):
            yield
            if self._problem.device.type == "cuda":
                torch.cuda.synchronize()
        self._problem.model.train(training)
        self.seconds += time.monotonic() - begun
