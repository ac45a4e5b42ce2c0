"""A run after one of its rounds, for whoever goes through them in a loop of their own."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from fedflat.algorithms.algorithm import flat_state
from fedflat.engines.round.contract import ModelState
from fedflat.errors import UserError, one_of
from fedflat.experiment.analysis.batchnorm import with_statistics
from fedflat.experiment.analysis.reopen import full_name

if TYPE_CHECKING:
    from fedflat.experiment.run import Run, Server


@dataclass(frozen=True, eq=False)
class Round:
    """A round that is done: who took part, what came of it, and the model and the states as they are now."""

    number: int
    """How many rounds are done, this one included."""
    cohort: tuple[int, ...]
    """The clients that took part."""
    loss: float
    """The mean training loss over all steps of these clients."""
    figures: dict[str, Any]
    """The evaluation after this round, as ``history`` keeps it; empty where none was due (``every=``)."""
    server: Server = field(repr=False)
    """All that the server holds: its model and its vectors."""
    run: Run = field(repr=False)
    """The run that goes on."""

    @classmethod
    def of(cls, run: Run) -> Round:
        """The round that a run has just done."""
        number = run.server.rounds
        newest = run.history[-1] if run.history and run.history[-1]["round"] == number else {}
        return cls(number, tuple(run.cohort(number - 1)), run.loss, newest, run.server, run)

    @property
    def score(self) -> float:
        """The task's metric on the test set, of the model that stands for the run: its last average, or the server's."""
        return self._figure(self.run.problem.task.metric)

    @property
    def accuracy(self) -> float:
        """The accuracy of that model on the test set."""
        return self._figure("accuracy")

    @property
    def model(self) -> nn.Module:
        """The server's model after this round: a copy of yours, in evaluation mode, which is yours to keep."""
        return self.module()

    def module(self, name: str = "server") -> nn.Module:
        """One of the run's models, for example ``wima``, as a module to keep."""
        problem = self.run.problem
        state = with_statistics(problem, self._state(name), self.run.partition.trained_on)
        built = copy.deepcopy(problem.model)
        built.load_state_dict(problem.named(*state), strict=False)  # what is no tensor is not there
        return built.eval()

    def state_dict(self, name: str = "server") -> dict[str, Tensor]:
        """The tensors of one of the run's models, to keep."""
        return {key: tensor.clone() for key, tensor in self.run.problem.named(*self._state(name)).items()}

    def server_state(self) -> dict[str, Tensor]:
        """What the algorithm keeps on the server, by slot and name: ``drift.m``."""
        return flat_state(self.server.states)

    def client_state(self, number: int) -> dict[str, Tensor]:
        """What one client keeps, by slot and name; what it starts with, where it has not taken part yet."""
        self._be_now(f"the state of client {number}")
        if not 0 <= number < len(self.run.partition.clients):
            raise UserError(
                f"there is no client {number}; this run has {len(self.run.partition.clients)}, counted from 0"
            )
        return flat_state(self.run.client(number).state)

    def _state(self, name: str) -> ModelState:
        if name == "server":
            return self.server.model
        self._be_now(name)
        models = self.run.models()
        return models[full_name("model of this run", name, models)]

    def _figure(self, metric: str) -> float:
        if not self.figures:
            raise UserError(
                f"round {self.number} was not evaluated (every={self.run.config.evaluation.every}); look at round.figures first"
            )
        scores = self.figures["test"].get(self.run.primary, self.figures["test"]["server"])
        if metric not in scores:
            raise one_of("metric of this run", metric, scores)
        return float(scores[metric])

    def _be_now(self, what: str) -> None:
        """Averages and clients are kept once, not for every round."""
        if self.run.server.rounds != self.number:
            raise UserError(f"round {self.number} is over, and {what} has moved on; take it within the loop")
