"""Local fine-tuning: a client trains a model on part of its data and is evaluated on the rest."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedflat.algorithms import algorithm
from fedflat.algorithms.descent import Descent
from fedflat.algorithms.lr_schedule import Schedule
from fedflat.engines.cpu.engine import LoopEngine
from fedflat.engines.problem.problem import Problem
from fedflat.engines.round.aggregation import Aggregation
from fedflat.engines.round.contract import Client, ModelState, Training
from fedflat.engines.round.plan import Plan
from fedflat.engines.round.server_step import server_step
from fedflat.errors import UserError
from fedflat.experiment.config import Config
from fedflat.randomness import generator


@dataclass(frozen=True)
class FineTuning:
    """Settings of local fine-tuning."""

    clients: int = 20
    """Number of clients, drawn by the run's seed among those with at least two examples."""
    epochs: int = 1
    """Number of passes over a client's training examples."""
    share: float = 0.8
    """Fraction of a client's examples for training; the rest is for evaluation, at least one example each."""
    lr: float | None = None
    """Learning rate; default: the run's, before decay."""
    batch_size: int | None = None
    """Batch size; default: the run's."""

    def __post_init__(self) -> None:
        for name in ("clients", "epochs", "batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"fine-tuning {name}={value} is invalid; expected at least 1")
        if not 0 < self.share < 1:
            raise UserError(f"fine-tuning share={self.share:g} is invalid; expected a number between 0 and 1")
        if self.lr is not None and not self.lr > 0:
            raise UserError(f"fine-tuning lr={self.lr:g} is invalid; expected a number above 0")

    def choose_clients(self, sizes: list[int], seed: int) -> list[int]:
        """Draw the clients that fine-tune; returns their sorted numbers.

        Args:
            sizes: number of examples of every client.
            seed: seed of the draw.
        """
        eligible = np.flatnonzero(np.array(sizes) >= 2)  # one example to train on and one to evaluate on
        chosen = generator(seed, "fine-tuned clients").permutation(len(eligible))[: self.clients]
        return [int(number) for number in np.sort(eligible[chosen])]

    def divide(self, indices: np.ndarray, seed: int, client: int) -> tuple[np.ndarray, np.ndarray]:
        """Divide the examples of client number ``client`` at random into those to train on and those to evaluate on."""
        count = min(max(round(self.share * len(indices)), 1), len(indices) - 1)  # neither part is empty
        order = generator(seed, "fine-tuned examples", client=client).permutation(len(indices))
        return np.sort(indices[order[:count]]), np.sort(indices[order[count:]])


class FineTuner:
    """Fine-tunes a model by one FedAvg round with a single client; settings not in ``FineTuning`` are the run's."""

    def __init__(self, problem: Problem, config: Config, settings: FineTuning) -> None:
        training = config.training
        self.lr = training.lr if settings.lr is None else settings.lr
        self.batch_size = training.batch_size if settings.batch_size is None else settings.batch_size
        self._algorithm = algorithm("fedavg")
        self._engine = LoopEngine(problem, workers=1)
        self._training = Training(
            self._algorithm,
            Descent(training.weight_decay, training.momentum, training.clip, training.clip_mode),
            Schedule(self.lr),
            Plan(self.batch_size, settings.epochs),
            config.seed,
            clients=1,
            aggregation=Aggregation(),
        )

    def fine_tune(self, model: ModelState, number: int, indices: np.ndarray) -> ModelState:
        """Train a model as client ``number``, on the examples at ``indices``; returns the new model."""
        server = self._algorithm.new_server(model.weights)
        client = Client(number, indices, self._algorithm.new_client(model.weights))
        outcome = self._engine.train(self._training, round=0, model=model, server=server, cohort=[client])
        return server_step(self._algorithm, self._engine.problem, outcome, server)[0]
