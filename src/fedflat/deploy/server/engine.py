"""The engine of a federation of real sites: it asks their nodes to train, inspects what they send, and reduces it in cohort order.

It stands where the loop stands in a simulation, so that averages, checkpoints, metrics and resuming are the same code.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from fedflat.algorithms.algorithm import States
from fedflat.data import Examples
from fedflat.deploy.flower.wire import (
    ARRAYS,
    BUFFERS,
    DISPLACEMENT,
    GRADIENT,
    INTEGERS,
    MODEL,
    content,
    forms_up,
    joined_as,
    numbers_of,
    numpy_of,
    sent_down,
)
from fedflat.deploy.server.ledger import Ledger
from fedflat.deploy.server.nodes import Nodes, too_few
from fedflat.deploy.server.settings import Deployment
from fedflat.deploy.trust.inspection import Expected, Form, Update, inspect_updates
from fedflat.deploy.trust.privacy import CLIPPING_NORM, noise
from fedflat.engines.cpu.engine import LoopEngine
from fedflat.engines.problem.problem import Problem
from fedflat.engines.round.aggregation import by_samples, weighted_sum
from fedflat.engines.round.cohort_buffers import CohortBuffers
from fedflat.engines.round.contract import Client, ModelState, Outcome, Training
from fedflat.engines.round.reduction import ClientReport, reduce_rows

log = logging.getLogger("flwr")


class SitesEngine:
    """Trains cohorts of sites; models are evaluated here, on what the server has."""

    def __init__(self, problem: Problem, nodes: Nodes, ledger: Ledger, wanted: Deployment) -> None:
        self.problem, self.nodes, self.ledger, self.wanted = problem, nodes, ledger, wanted
        self.experiment = ""
        """The name under which nodes remember; the run has one once it has begun."""
        self._here = LoopEngine(problem, workers=1)

    def train(self, training: Training, round: int, model: ModelState, server: States, cohort: list[Client]) -> Outcome:
        """Train a cohort for one round, without those that are not there, are late, or send what cannot be used."""
        for attempt in range(self.wanted.tries):
            asked = self._seated(cohort)
            done = _Round(self, training, round, model, server, asked)
            outcome = done.train() if len(asked) >= self.wanted.minimum else None
            missing = {
                client.number: "its node is not there" for client in cohort if client.number not in self.nodes.present
            }
            for what, reasons in (("refused", done.refused), ("without an update", missing | done.missing)):
                for client, why in reasons.items():
                    log.warning("round %d: client %d is %s: %s", round, client, what, why)
            if outcome is not None:
                self.ledger.record(round, done.accepted, done.refused, missing | done.missing)
                return outcome
            log.warning(
                "round %d: try %d of %d gave %d updates", round, attempt + 1, self.wanted.tries, len(done.accepted)
            )
        raise too_few(len(done.accepted), self.wanted.minimum, f"round {round} has too few updates")

    def _seated(self, cohort: list[Client]) -> list[Client]:
        """Those of a cohort whose nodes are there, with as many examples as they said."""
        numbers = {client.number for client in cohort}
        enough = min(self.wanted.minimum, len(cohort))
        self.nodes.gather(
            lambda: len(numbers & self.nodes.present.keys()) >= enough, self.wanted.wait, self.wanted.timeout
        )
        present = self.nodes.present
        return [
            client._replace(indices=np.arange(present[client.number].examples))
            for client in cohort
            if client.number in present
        ]

    def prepare(self, training: Training, round: int, cohort: list[tuple[int, np.ndarray]]) -> None:
        """Nothing: sites draw their batches themselves."""

    def evaluate(
        self, models: dict[str, ModelState], examples: dict[str, Examples]
    ) -> dict[str, dict[str, dict[str, float]]]:
        """Every metric of every model on what the server holds out."""
        return self._here.evaluate(models, examples)


class _Round:
    """One try at a round."""

    def __init__(
        self,
        engine: SitesEngine,
        training: Training,
        round: int,
        model: ModelState,
        server: States,
        cohort: list[Client],
    ) -> None:
        self.engine, self.training, self.round, self.model, self.server, self.cohort = (
            engine,
            training,
            round,
            model,
            server,
            cohort,
        )
        self.accepted: list[int] = []
        self.refused: dict[int, str] = {}
        self.missing: dict[int, str] = {}
        self.z = training.algorithm.broadcast(model.weights, server)
        self._passes = self._samples = 0

    def train(self) -> Outcome | None:
        """What came back; none where it is too little to go on."""
        common = None
        down = self._down()
        if self.training.algorithm.drift.whole_gradient == "common":
            common = self._common_gradient(down)
            if common is None:
                return None
            down = {GRADIENT: common}
        updates = self._ask("train", down)
        taken, refused = inspect_updates(updates, self._expected())
        self.refused |= refused
        self.accepted = [update.client for update in taken]
        if len(taken) < self.engine.wanted.minimum:
            return None
        return self._reduced(taken, common)

    def _down(self) -> dict[str, Tensor]:
        """Exactly what the algorithm's card says, and the statistics that all clients share."""
        down = {MODEL: self.z, **sent_down(self.training.algorithm, self.server)}
        if not self.training.own_statistics:
            if len(self.model.buffers):
                down[BUFFERS] = self.model.buffers
            down |= {INTEGERS + name: value for name, value in self.model.integers.items()}
        return down

    def _ask(self, kind: str, down: Mapping[str, Tensor]) -> list[Update]:
        """The updates of those that answer, in cohort order."""
        engine, round = self.engine, self.round
        asked = [client.number for client in self.cohort if client.number not in self.missing | self.refused]
        last = {client: engine.ledger.last(client, round) for client in asked}
        about: dict[str, int | float | str] = {"experiment": engine.experiment, "round": round}
        if engine.wanted.clipping_norm is not None:
            about[CLIPPING_NORM] = engine.wanted.clipping_norm
        examples = self._examples()
        contents = {
            client: content(down, about | joined_as(client, examples[client]) | {"before": last[client]})
            for client in asked
        }
        answers, missing = engine.nodes.ask(kind, contents, str(round), engine.wanted.timeout)
        self.missing |= missing
        found = []
        for client in asked:
            if client in answers:
                arrays = answers[client].array_records.get(ARRAYS)
                found.append(Update(client, numpy_of(arrays) if arrays else {}, numbers_of(answers[client])))
        return found

    def _examples(self) -> dict[int, int]:
        return {client.number: len(client.indices) for client in self.cohort}

    def _expected(self) -> Expected:
        """What honest updates of this cohort look like."""
        training, examples = self.training, self._examples()
        plan = training.plan
        steps = {
            client: len(plan.batches(training.seed, self.round, client, count)) for client, count in examples.items()
        }
        rates = {count: self._rates(count) for count in set(steps.values())}
        forms = forms_up(self.engine.problem, training)
        wanted = self.engine.wanted
        return Expected(
            forms,
            examples,
            steps,
            {client: rates[count] for client, count in steps.items()},
            wanted.bound,
            wanted.clipping_norm,
        )

    def _rates(self, steps: int) -> float:
        """H, the sum of the learning rates over so many steps."""
        training = self.training
        steps_, round = torch.tensor(float(steps)), torch.tensor(float(self.round))
        rates = [
            training.algorithm.lr_schedule(training.schedule, round, torch.tensor(float(k)), steps_)
            for k in range(steps)
        ]
        return float(sum(float(lr) for lr in rates))

    def _common_gradient(self, down: Mapping[str, Tensor]) -> Tensor | None:
        """The mean of the cohort's whole gradients, by examples."""
        updates, examples = self._ask("train.gradient", down), self._examples()
        form = Form(tuple(self.z.shape), self.z.cpu().numpy().dtype)
        nothing = {"rates": 0.0, "loss": 0.0, "steps": 0}
        whole = [update._replace(numbers={**update.numbers, **nothing}) for update in updates]
        zero = dict.fromkeys(examples, 0)
        taken, refused = inspect_updates(
            whole, Expected({GRADIENT: form}, examples, zero, dict.fromkeys(examples, 0.0), self.engine.wanted.bound)
        )
        self.refused |= refused
        self.accepted = [update.client for update in taken]
        if len(taken) < self.engine.wanted.minimum:
            return None
        self._passes = int(sum(update.numbers["backward_passes"] for update in taken))
        self._samples = int(sum(update.numbers["samples"] for update in taken))
        rows = torch.stack([torch.from_numpy(update.arrays[GRADIENT]) for update in taken]).to(self.z)
        return weighted_sum(rows, by_samples([examples[update.client] for update in taken]))

    def _reduced(self, taken: list[Update], common: Tensor | None) -> Outcome:
        """The means of what was accepted, by the same code that reduces a simulated cohort."""
        size, buffers = len(self.z), len(self.model.buffers)
        table = CohortBuffers.new(self.training.algorithm, size, buffers, len(taken), self.z, shared=False)
        table.client = {}  # the clients' states stay with them
        if common is not None:
            table.common_gradient.copy_(common)
        for row, update in enumerate(taken):
            tensors = {name: torch.from_numpy(array) for name, array in update.arrays.items()}
            table.displacement[row].copy_(tensors[DISPLACEMENT])
            table.buffers[row].copy_(tensors.get(BUFFERS, self.model.buffers))
            for name, rows in table.sent.items():
                rows[row].copy_(tensors[name])
        drawn = noise(self.engine.wanted, size)
        if drawn is not None:
            table.displacement[0] += torch.from_numpy(drawn).to(self.z)
        reports = [_report(update, self.z.device) for update in taken]
        seated = {client.number: client for client in self.cohort}
        cohort = [seated[update.client] for update in taken]
        outcome = reduce_rows(self.training, self.round, self.model, self.z, table, cohort, reports)
        outcome.cost.backward_passes += self._passes
        outcome.cost.samples += self._samples
        outcome.clients.clear()
        return outcome


def _report(update: Update, device: torch.device) -> ClientReport:
    numbers = update.numbers
    integers = {
        name.removeprefix(INTEGERS): torch.from_numpy(array).to(device)
        for name, array in update.arrays.items()
        if name.startswith(INTEGERS)
    }
    return ClientReport(
        numbers["rates"],
        numbers["loss"],
        int(numbers["steps"]),
        int(numbers["backward_passes"]),
        int(numbers["samples"]),
        integers,
    )
