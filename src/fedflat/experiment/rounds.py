"""``Round``: what ``fedflat.rounds`` yields to a user's training loop after every round."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from fedflat.algorithms.algorithm import flat_state
from fedflat.engines.round.contract import ModelState
from fedflat.errors import UserError, one_of
from fedflat.experiment.analysis.reopen import full_name
from fedflat.experiment.analysis.replay import check_client
from fedflat.experiment.analysis.run_model import with_statistics
from fedflat.experiment.stopping import describe_divergence
from fedflat.experiment.store.checkpoint import ServerState

if TYPE_CHECKING:
    from fedflat.experiment.run import Run


@dataclass(frozen=True, eq=False)
class Round:
    """A completed round: its cohort and loss, its evaluation, and the models and states after it."""

    number: int
    """Number of completed rounds, including this one."""
    cohort: tuple[int, ...]
    """Numbers of the clients that participated."""
    loss: float
    """Mean training loss over all local steps of the cohort."""
    evaluation: dict[str, Any]
    """The evaluation after this round, as in ``history``; empty if the round was not evaluated (``eval_every``)."""
    server: ServerState = field(repr=False)
    """The server's model, and the state that the algorithm keeps on the server."""
    run: Run = field(repr=False)
    """The run that the round belongs to."""

    @classmethod
    def of(cls, run: Run) -> Round:
        """Return the round that a run has just completed."""
        is_evaluated = bool(run.history) and run.history[-1]["round"] == run.rounds
        evaluation = run.history[-1] if is_evaluated else {}
        return cls(run.rounds, run.timeline.participants, run.loss, evaluation, run.server, run)

    @property
    def score(self) -> float:
        """Primary metric of the primary model (the last average, or ``server`` without averages) on the test set."""
        return self._test_metric(self.run.metric)

    @property
    def accuracy(self) -> float:
        """Accuracy of the primary model on the test set."""
        return self._test_metric("accuracy")

    @property
    def model(self) -> nn.Module:
        """A copy of the server's model after this round, in evaluation mode."""
        return self.module()

    def module(self, average: str = "server") -> nn.Module:
        """Return a copy of one of the run's models, e.g. ``wima``, in evaluation mode."""
        problem = self.run.problem
        # If clients keep their own BatchNorm statistics, those of the server model are estimated on training data.
        state = with_statistics(problem, self._state(average), self.run.partition.trained_on)
        module = copy.deepcopy(problem.model)
        module.load_state_dict(problem.state_dict(*state), strict=False)  # without extra state that is not a tensor
        return module.eval()

    def state_dict(self, average: str = "server") -> dict[str, Tensor]:
        """Return a copy of the state dict of one of the run's models."""
        return {key: tensor.clone() for key, tensor in self.run.problem.state_dict(*self._state(average)).items()}

    def server_state(self) -> dict[str, Tensor]:
        """Return the algorithm's state on the server; keys consist of slot and name, e.g. ``drift.m``."""
        return flat_state(self.server.states)

    def client_state(self, number: int) -> dict[str, Tensor]:
        """Return the algorithm's state on client ``number``, e.g. ``drift.c``.

        For a client that has not yet participated, this is the initial state.
        """
        self._require_current(f"the state of client {number}")
        check_client(number, len(self.run.partition.clients))
        return flat_state(self.run.client(number).state)

    def _state(self, name: str) -> ModelState:
        """Weights and buffers of one of the run's models."""
        if name == "server":
            return self.server.model
        self._require_current(name)
        models = self.run.models()
        return models[full_name("model of this run", name, models)]

    def _test_metric(self, metric: str) -> float:
        """A metric of the primary model on the test set after this round."""
        run, weights = self.run, self.server.model.weights
        if not self.evaluation:
            reason = f" (eval_every={run.config.evaluation.every}); check that round.evaluation is not empty"
            if divergence := describe_divergence(weights, self.loss, run.algorithm, run.config, run.problem):
                reason = f", because the run diverged: {divergence}"
            raise UserError(f"round {self.number} was not evaluated{reason}")
        # An average that has not started yet is replaced by the server model.
        scores = self.evaluation["test"].get(run.primary, self.evaluation["test"]["server"])
        if metric not in scores:
            raise one_of("metric", metric, scores, owner="this run")
        return float(scores[metric])

    def _require_current(self, subject: str) -> None:
        """Reject access to ``subject`` once a later round has ended: the run keeps only its current value."""
        if self.run.rounds != self.number:
            raise UserError(f"{subject} has changed since round {self.number}; read it inside the loop")
