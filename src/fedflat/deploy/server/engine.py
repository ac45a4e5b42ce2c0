"""The engine of a real federation: asks the sites' nodes to train, inspects their updates and averages them.

It replaces the engine of a simulation. The code for averages, checkpoints, metrics and resuming is the same.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from functools import partial

import numpy as np
import torch
from flwr.app import ArrayRecord, RecordDict
from torch import Tensor

from fedflat.algorithms.algorithm import States, flat_fields
from fedflat.data import Examples
from fedflat.deploy.flower.wire import (
    ARRAYS,
    BASE,
    BUFFERS,
    DISPLACEMENT,
    EXPERIMENT,
    FIRST_BASE,
    GRADIENT,
    INTEGERS,
    MODEL,
    ROUND,
    STATE_VERSION,
    array_record,
    broadcast_state,
    client_header,
    message_content,
    numbers_of,
    numpy_of,
)
from fedflat.deploy.server.arrivals import expected_arrays, keep_on_disk, report_of, sum_one_by_one, total_gradient_cost
from fedflat.deploy.server.ledger import RoundLedger
from fedflat.deploy.server.nodes import NOT_CONNECTED, Nodes
from fedflat.deploy.server.site_scores import validate_at_sites
from fedflat.deploy.settings import Deployment
from fedflat.deploy.trust.inspection import (
    LR_SUM,
    ArraySpec,
    ExpectedUpdates,
    Update,
    find_wrong_array,
    inspect_updates,
)
from fedflat.deploy.trust.signatures import arrays_digest
from fedflat.display import names_by_reason
from fedflat.engines.cpu.engine import LoopEngine
from fedflat.engines.problem.problem import Problem
from fedflat.engines.round.aggregation import CohortWeights, weights_by_samples
from fedflat.engines.round.cohort import WeightedRows, build_outcome, reduce_rows, weighted_rows
from fedflat.engines.round.cohort_buffers import CohortBuffers
from fedflat.engines.round.contract import Client, Cost, ModelState, Outcome, RoundStart, Training
from fedflat.engines.round.privacy import protect_rows

log = logging.getLogger("flwr")
NO_TRAINING = {LR_SUM: 0.0, "loss": 0.0, "steps": 0}
"""Numbers that clients do not report with a gradient."""
SITES_SET = "sites"
"""Name of the sites' held-out data among the evaluation sets of the history."""


class SitesEngine:
    """Trains cohorts of sites; models are evaluated in this process, on the server's data.

    Attributes:
        experiment: name under which nodes save their clients' state; set when the run begins.
        settings_digest: digest of the run's settings, for secure aggregation.
        attempt_class: the class of an attempt at a round.
        primary: name of the model that sites validate, or ``server`` until it exists; set when the run begins.
        gradients: the last secure mean gradient, by round and clients.
    """

    def __init__(self, problem: Problem, nodes: Nodes, ledger: RoundLedger, deployment: Deployment) -> None:
        self.problem, self.nodes, self.ledger, self.deployment = problem, nodes, ledger, deployment
        self.experiment, self.settings_digest, self.primary, self.attempt_class = "", "", "server", RoundAttempt
        self.gradients: dict[tuple[int, ...], Tensor] = {}
        self._evaluator = LoopEngine(problem, workers=1)

    def train(self, training: Training, round: int, model: ModelState, server: States, cohort: list[Client]) -> Outcome:
        """Train a cohort for one round, without clients that are not connected, are late, or send unusable updates.

        Tries again if too few updates are accepted, up to ``deploy.tries`` times, and then raises ``UserError``.
        ``server`` is the server's state by slot, and ``cohort`` lists the clients that were chosen for the round.
        """
        deployment = self.deployment
        if training.privacy:
            self.ledger.count_private_round()
        # With local privacy, every answer of a site costs epsilon, and only one per round is accounted for.
        tries = 1 if training.privacy and training.privacy.is_local else deployment.tries
        for attempt in range(tries):
            connected = self._connected_clients(cohort)
            current = self.attempt_class(self, training, round, model, server, connected)
            outcome = current.train() if len(connected) >= deployment.minimum else None
            absent = [client.number for client in cohort if client.number not in self.nodes.present]
            missing = dict.fromkeys(absent, NOT_CONNECTED) | current.missing
            for kind, reasons in (("rejected", current.rejected), ("missing", missing)):
                for reason, names in names_by_reason(self.nodes.labelled(reasons)).items():
                    log.warning("round %d: %s update from %s: %s", round, kind, names, reason)
            if outcome is not None:
                outcome.clients.clear()  # the server stores no client's state
                self.ledger.record(round, current.accepted, current.rejected, missing, self.nodes.names())
                return outcome
            log.warning("round %d: try %d of %d gave %d updates", round, attempt + 1, tries, len(current.accepted))
        setting = "deploy.minimum" if current.required == deployment.minimum else "deploy.secure_threshold"
        updates, what_happened = len(current.accepted), f"round {round} has too few updates"
        raise self.nodes.too_few_error(updates, current.required, what_happened, setting)

    def _connected_clients(self, cohort: list[Client]) -> list[Client]:
        """Wait until enough of the cohort's nodes are connected, or the time is up, and return their clients.

        The server knows only the number n of a site's examples. The client's indices are n zeros, which need no memory.
        """
        numbers = {client.number for client in cohort}
        needed = min(self.deployment.minimum, len(cohort))
        self.nodes.wait_for(
            lambda: len(numbers & self.nodes.present.keys()) >= needed, self.deployment.wait, self.deployment.timeout
        )
        present = self.nodes.present
        return [
            client._replace(indices=np.broadcast_to(0, present[client.number].examples))
            for client in cohort
            if client.number in present
        ]

    @property
    def private_rounds(self) -> int:
        """How often sites were asked to train a round, over all starts of a private run; 0 without privacy."""
        return self.ledger.private_rounds

    def prepare(self, training: Training, round: int, clients: list[tuple[int, np.ndarray]]) -> None:
        """Do nothing: sites draw their batches themselves."""

    def evaluate(
        self, models: dict[str, ModelState], examples: dict[str, Examples]
    ) -> dict[str, dict[str, dict[str, float]]]:
        """Return the metrics of every model on the server's held-out data: model -> set -> metric -> value.

        With ``deploy.validation``, connected sites also evaluate the primary model, and the set ``sites`` has the means
        of their metrics.
        """
        scores = self._evaluator.evaluate(models, examples)
        if self.deployment.validation:
            name = self.primary if self.primary in models else "server"
            metrics = next(iter(scores[name].values()))
            means = validate_at_sites(self.nodes, self.experiment, models[name], metrics, self.deployment)
            scores[name] |= {SITES_SET: means} if means else {}
        return scores


class RoundAttempt:
    """One attempt at a round. Clients are given by number.

    Attributes:
        accepted: clients whose updates were accepted.
        rejected: for each client whose update was rejected, the reason.
        missing: for each client without an update, the reason.
        required: minimum number of updates.
        start: what the round starts from.
        z: the broadcast model, from which clients start, [parameters].
    """

    def __init__(
        self,
        engine: SitesEngine,
        training: Training,
        round: int,
        model: ModelState,
        server: States,
        cohort: list[Client],
    ) -> None:
        """Prepare the attempt; ``cohort`` lists the connected clients, ``server`` is the server's state by slot."""
        self.engine, self.training, self.round = engine, training, round
        self.model, self.server, self.cohort = model, server, cohort
        self.accepted: list[int] = []
        self.rejected: dict[int, str] = {}
        self.missing: dict[int, str] = {}
        self.required = engine.deployment.minimum
        self.start = RoundStart.of(training, round, model, server)
        self.z = self.start.z
        self._examples = {client.number: len(client.indices) for client in cohort}
        self._gradient_cost = Cost()  # of the common gradient, if the drift needs it
        self._first_base = ""  # digest of the arrays of the first phase, in the second one

    def train(self) -> Outcome | None:
        """Train the cohort and average its updates; returns None if too few updates are usable.

        Some drift corrections need the cohort's mean gradient ("common") before training; sites then answer twice.
        """
        common_gradient = None
        broadcast = self._broadcast()
        if self.training.algorithm.drift.full_gradient == "common":
            common_gradient = self._common_gradient(broadcast)
            if common_gradient is None:
                return None
            self._first_base = arrays_digest(array_record(broadcast))
            broadcast = {GRADIENT: common_gradient}  # sites still have the rest from the first message
        return self._train(broadcast, common_gradient)

    def _train(self, broadcast: Mapping[str, Tensor], common_gradient: Tensor | None) -> Outcome | None:
        """Let the sites train, and average their updates; returns None if too few updates are usable."""
        expected = self._expected_updates()
        updates = self._accept(self._ask("train", broadcast, expected.arrays), expected)
        return None if updates is None else self._reduce(updates, common_gradient)

    def _accept(self, updates: list[Update], expected: ExpectedUpdates) -> list[Update] | None:
        """Inspect updates and return the accepted ones; None if they are fewer than ``deploy.minimum``."""
        accepted, rejected = inspect_updates(updates, expected)
        self.rejected |= rejected
        self.accepted = [update.client for update in accepted]
        return accepted if len(accepted) >= self.required else None

    def _broadcast(self) -> dict[str, Tensor]:
        """Return what clients receive: the model, the server's state, and BatchNorm buffers unless each keeps its own.

        Floating-point buffers are one vector. Integer buffers are sent one by one, with the prefix ``INTEGERS``.
        """
        broadcast = {MODEL: self.z, **broadcast_state(self.training.algorithm, self.server)}
        if not self.training.own_statistics:
            if len(self.model.buffers):
                broadcast[BUFFERS] = self.model.buffers
            broadcast |= {INTEGERS + name: value for name, value in self.model.integer_buffers.items()}
        return broadcast

    def _ask(self, kind: str, tensors: Mapping[str, Tensor], specs: Mapping[str, ArraySpec]) -> list[Update]:
        """Send tensors to the clients and return the updates of those that answer, in cohort order.

        Clients that have failed in an earlier phase of this attempt are not asked. ``kind`` is Flower's message type.
        Updates whose arrays do not meet ``specs`` are rejected at once.
        """
        engine, eligible = self.engine, self._eligible()
        broadcast = array_record(tensors)  # shared by all messages
        base = arrays_digest(broadcast)
        contents = {client: message_content(broadcast, self._header(client, base)) for client in eligible}
        updates: dict[int, Update] = {}

        def receive(client: int, records: RecordDict) -> str:
            """Keep an update until all have arrived, without keeping its message in memory; returns its flaw."""
            received = records.array_records.get(ARRAYS) or ArrayRecord()
            arrays = numpy_of(received)
            flaw = find_wrong_array(arrays, specs)
            if not flaw:
                mapped = keep_on_disk(arrays, engine.ledger.path.parent)
                updates[client] = Update(client, mapped, numbers_of(records))
            received.clear()  # Flower's records are reference cycles, which Python frees late
            return flaw

        missing, rejected = engine.nodes.ask(
            kind, contents, str(self.round), engine.deployment.timeout, receive, engine.deployment.quorum
        )
        self.missing |= missing
        self.rejected |= rejected
        return [updates[client] for client in eligible if client in updates]

    def _eligible(self) -> list[int]:
        """Return the clients that have not failed so far."""
        return [client.number for client in self.cohort if client.number not in self.missing | self.rejected]

    def _header(self, client: int, base: str) -> dict[str, int | float | str]:
        """Return the header of a message to a client; ``base`` is the digest of the broadcast arrays."""
        header = client_header(client, self._examples[client])
        header |= {EXPERIMENT: self.engine.experiment, ROUND: self.round, BASE: base, FIRST_BASE: self._first_base}
        header[STATE_VERSION] = self.engine.ledger.last_state_version(client, self.round)  # which state to train from
        return header

    def _expected_updates(self) -> ExpectedUpdates:
        """Return what honest updates of this cohort look like."""
        training, deployment = self.training, self.engine.deployment
        steps = {
            client: training.plan.unlimited_steps(training.seed, self.round, client, count)
            for client, count in self._examples.items()
        }
        lr_sums = {count: self._lr_sum(count) for count in set(steps.values())}  # by number of steps
        return ExpectedUpdates(
            arrays=expected_arrays(self.engine.problem, training),
            examples=self._examples,
            steps=steps,
            lr_sums={client: lr_sums[count] for client, count in steps.items()},
            # With privacy, a site must not influence whose updates count; clipping bounds the norms.
            bound=math.inf if training.privacy else deployment.bound,
            ranges={
                f"{slot}.{name}": limits
                for slot, component in training.algorithm.slots()
                for name, limits in component.message_ranges(self.engine.problem.data.num_classes).items()
            },
        )

    def _lr_sum(self, steps: int) -> float:
        """Return the sum of the learning rates over the local steps of a client that makes ``steps`` of them."""
        training, total_steps, round = self.training, torch.tensor(float(steps)), torch.tensor(float(self.round))
        lr_at = partial(training.algorithm.lr_schedule, training.schedule, round)
        return float(sum(float(lr_at(torch.tensor(float(step)), total_steps)) for step in range(steps)))

    def _expected_gradients(self) -> ExpectedUpdates:
        """Return what honest gradients of this cohort look like, as updates without training."""
        return ExpectedUpdates(
            arrays={GRADIENT: ArraySpec(tuple(self.z.shape), self.z.cpu().numpy().dtype)},
            examples=self._examples,
            steps=dict.fromkeys(self._examples, 0),
            lr_sums=dict.fromkeys(self._examples, 0.0),
            bound=self.engine.deployment.bound,
        )

    def _common_gradient(self, broadcast: Mapping[str, Tensor]) -> Tensor | None:
        """Return the mean of the clients' full gradients at z [parameters], weighted by examples.

        Gradients are inspected as if they were updates without training. None if too few are usable.
        """
        expected = self._expected_gradients()
        updates = [
            update._replace(numbers={**update.numbers, **NO_TRAINING})
            for update in self._ask("train.gradient", broadcast, expected.arrays)
        ]
        accepted = self._accept(updates, expected)
        if accepted is None:
            return None
        self._gradient_cost = total_gradient_cost(accepted)
        weights = weights_by_samples([self._examples[update.client] for update in accepted])

        def gradient(position: int) -> WeightedRows:
            row = torch.from_numpy(accepted[position].arrays[GRADIENT]).to(self.z)
            return {GRADIENT: (row[None], [weights[position]])}

        return sum_one_by_one(len(accepted), gradient)[GRADIENT]

    def _reduce(self, updates: list[Update], common_gradient: Tensor | None) -> Outcome:
        """Average accepted updates like a simulated cohort, one at a time unless the algorithm compares clients."""
        training, reports = self.training, [report_of(update, self.z.device) for update in updates]
        by_number = {client.number: client for client in self.cohort}
        cohort = [by_number[update.client] for update in updates]
        if training.aggregation.needs_rows or training.algorithm.weights.are_chosen or self.z.is_cuda:
            cohort_buffers = self._rows(updates, common_gradient)
            return reduce_rows(self.start, cohort_buffers, cohort, reports, self._gradient_cost)
        weights = CohortWeights.of(training.aggregation, [len(client.indices) for client in cohort])

        def weighted(position: int) -> WeightedRows:
            """The rows of one client and its weights in the cohort, by name."""
            cohort_buffers = self._row(updates[position])
            client_weights = weights.subset([position])
            return weighted_rows(training, cohort_buffers, client_weights, [reports[position]], len(cohort))

        averages = sum_one_by_one(len(cohort), weighted)
        return build_outcome(self.start, averages, cohort, reports, self._gradient_cost, common_gradient)

    def _row(self, update: Update) -> CohortBuffers:
        """Return an update as the row of a cohort of one client, without copying it unless it is clipped."""
        tensors = {name: torch.from_numpy(array) for name, array in update.arrays.items()}
        if self.training.privacy:
            tensors = {name: tensor.clone() for name, tensor in tensors.items()}
        nothing = self.z.new_empty(0)
        cohort_buffers = CohortBuffers(
            z=self.z,
            server={},
            common_gradient=nothing,
            client_states={},
            sent={name: tensors[name][None] for name in flat_fields(self.training.algorithm.message_fields())},
            displacement=tensors[DISPLACEMENT][None],
            gradient=nothing,
            statistics=tensors.get(BUFFERS, self.model.buffers)[None],
        )
        self._clip(cohort_buffers, [update])
        return cohort_buffers

    def _rows(self, updates: list[Update], common_gradient: Tensor | None) -> CohortBuffers:
        """Return updates as the rows that a simulated cohort writes."""
        size = len(self.z)
        cohort_buffers = CohortBuffers.new(self.training.algorithm, size, len(self.model.buffers), len(updates), self.z)
        cohort_buffers.client_states = {}  # clients' states stay at the sites
        if common_gradient is not None:
            cohort_buffers.common_gradient.copy_(common_gradient)
        for row, update in enumerate(updates):
            tensors = {name: torch.from_numpy(array) for name, array in update.arrays.items()}
            cohort_buffers.displacement[row].copy_(tensors[DISPLACEMENT])
            cohort_buffers.statistics[row].copy_(tensors.get(BUFFERS, self.model.buffers))
            for name, rows in cohort_buffers.sent.items():
                rows[row].copy_(tensors[name])
        self._clip(cohort_buffers, updates)
        return cohort_buffers

    def _clip(self, cohort_buffers: CohortBuffers, updates: list[Update]) -> None:
        """Clip updates with central privacy: sites clip as well, but the others must not depend on that."""
        privacy = self.training.privacy
        if privacy and not privacy.is_local:
            protect_rows(self.training, self.round, cohort_buffers, [update.client for update in updates])
