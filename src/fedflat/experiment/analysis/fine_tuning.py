"""Local fine-tuning: a client trains a given model on a part of its own data, to be scored on the rest."""

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
from fedflat.engines.round.randomness import generator
from fedflat.errors import UserError
from fedflat.experiment.config import Config


@dataclass(frozen=True)
class FineTuning:
    """How many clients fine-tune, for how long, and on which share of their data."""

    clients: int = 20
    """Clients, drawn by the run's seed among those with at least two examples."""
    epochs: int = 1
    share: float = 0.8
    """The share of a client's examples that it trains on; the rest is for scoring, at least one example each."""
    lr: float | None = None
    """The learning rate; the run's own, before any decay, where none is given."""
    batch_size: int | None = None
    """The batch size; the run's own where none is given."""

    def __post_init__(self) -> None:
        for name in ("clients", "epochs", "batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"fine-tuning with {name}={value} is not possible; expected at least 1")
        if not 0 < self.share < 1:
            raise UserError(
                f"fine-tuning on a share of {self.share:g} is not possible; expected a number between 0 and 1"
            )
        if self.lr is not None and not self.lr > 0:
            raise UserError(f"fine-tuning with lr={self.lr:g} is not possible; expected a number above 0")

    def among(self, sizes: list[int], seed: int) -> list[int]:
        """Which clients fine-tune, of clients with so many examples."""
        able = np.flatnonzero(np.array(sizes) >= 2)
        chosen = generator(seed, "fine-tuned clients").permutation(len(able))[: self.clients]
        return [int(number) for number in np.sort(able[chosen])]

    def divided(self, indices: np.ndarray, seed: int, client: int) -> tuple[np.ndarray, np.ndarray]:
        """A client's examples to train on, and those to be scored on."""
        count = min(max(round(self.share * len(indices)), 1), len(indices) - 1)
        order = generator(seed, "fine-tuned examples", 0, client).permutation(len(indices))
        return np.sort(indices[order[:count]]), np.sort(indices[order[count:]])


class FineTuner:
    """Fine-tunes by plain local steps, as a round of FedAvg with one client takes them, with the run's other settings."""

    def __init__(self, problem: Problem, config: Config, wanted: FineTuning) -> None:
        own = config.training
        self.lr = own.lr if wanted.lr is None else wanted.lr
        self.batch_size = own.batch_size if wanted.batch_size is None else wanted.batch_size
        self._algorithm = algorithm("fedavg")
        self._engine = LoopEngine(problem, workers=1)
        self._training = Training(
            self._algorithm,
            Descent(own.weight_decay, own.momentum, own.clip, own.clip_mode),
            Schedule(self.lr),
            Plan(self.batch_size, wanted.epochs),
            config.seed,
            clients=1,
            aggregation=Aggregation(),
        )

    def tuned(self, model: ModelState, client: int, indices: np.ndarray) -> ModelState:
        """The model after a client has trained it on examples at some positions."""
        server = self._algorithm.new_server(model.weights)
        alone = Client(client, indices, self._algorithm.new_client(model.weights))
        outcome = self._engine.train(self._training, 0, model, server, [alone])
        weights, _ = self._algorithm.aggregate(outcome.returned, outcome.means, server)
        return ModelState(weights, outcome.buffers, outcome.integers)
