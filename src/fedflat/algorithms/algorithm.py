"""An algorithm: one component per slot, and the fixed order in which the components act in a round.

A round calls ``broadcast``; for each client ``begin``, ``step`` K times and ``finish``; then ``aggregate`` with the
averaged messages. Engines call these methods for one client or for many at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fedflat.algorithms.descent import Descent
from fedflat.algorithms.drift import Drift
from fedflat.algorithms.local_optimiser import LocalOptimiser
from fedflat.algorithms.lr_schedule import LrSchedule, Schedule
from fedflat.algorithms.part_checks import (
    aggregate,
    explain_key_errors,
    finish,
    require_begun,
    require_declared,
    require_sent,
)
from fedflat.algorithms.perturbation import Perturbation
from fedflat.algorithms.server import Sgd
from fedflat.algorithms.slot import CohortMeans, Gradient, LocalContext, Pilot, Slot
from fedflat.algorithms.start import Start
from fedflat.algorithms.state import Field, Fields, State, new_state
from fedflat.algorithms.teacher import BatchGradient, with_teacher
from fedflat.algorithms.weights import Weights
from fedflat.averaging import Average
from fedflat.models.layout import Layout

SLOTS = ("drift", "perturbation", "lr_schedule", "local_optimiser", "server", "start", "weights")
"""The slots that hold exactly one component; in addition, an algorithm may have any number of averages."""
States = dict[str, State]
"""State by slot, for every slot but lr_schedule."""


class LocalState(NamedTuple):
    """A client's state during its local steps."""

    drift: LocalContext
    perturbation: LocalContext
    optimiser: LocalContext
    """Context of the local optimiser; its state, e.g. a momentum, is reset in every round."""


class Message(NamedTuple):
    """What a client sends: its displacement (P,), the sum of its learning rates (), and the slots' messages."""

    displacement: Tensor
    lr_sum: Tensor
    sent: States


@dataclass(frozen=True)
class Algorithm:
    """A federated algorithm: one component in each of seven slots, and any number of averages of server models.

    The slots are the drift correction, the perturbation, the learning-rate schedule, the local optimiser, the server
    optimiser, the start of local training and the client weights. A component may keep state on the server and on every
    client, and may add messages to what clients send. Vectors have shape (P,), for P trained parameters.

    >>> from fedflat.algorithms.drift import Scaffold
    >>> from fedflat.algorithms.perturbation import Sam
    >>> Algorithm(drift=Scaffold(), perturbation=Sam(rho=0.1)).backward_passes
    2
    """

    drift: Drift = field(default_factory=Drift)
    """Drift correction, which changes the direction of each local step."""
    perturbation: Perturbation = field(default_factory=Perturbation)
    """Perturbation, which moves the point at which gradients are evaluated."""
    lr_schedule: LrSchedule = field(default_factory=LrSchedule)
    """Schedule that gives the learning rate of each local step."""
    server: Sgd = field(default_factory=Sgd)
    """Server optimiser, which updates the server model after each round."""
    averages: tuple[Average, ...] = ()
    """Averages of server models over rounds, which are evaluated along with the server model."""
    local_optimiser: LocalOptimiser = field(default_factory=LocalOptimiser)
    """Optimiser that takes the local steps; by default, SGD with the run's momentum."""
    start: Start = field(default_factory=Start)
    """Start, which gives each client the model from which it begins local training."""
    weights: Weights = field(default_factory=Weights)
    """Client weights, with which the server averages displacements."""

    def conflict(self) -> str | None:
        """Return why the components in the slots cannot be combined, as a sentence, or None if they can."""
        slots: dict[str, Slot] = {name: getattr(self, name) for name in SLOTS}
        for slot in slots.values():
            reason = slot.conflict(slots)
            if reason is not None:
                return reason
        return None

    def slots(self) -> Iterator[tuple[str, Slot]]:
        """Yield name and component of each slot that may keep state, i.e. all but the learning-rate schedule."""
        return ((name, getattr(self, name)) for name in SLOTS if name != "lr_schedule")

    def server_fields(self) -> dict[str, Fields]:
        """Return the declarations of the server state, by slot."""
        return {name: slot.on_server() for name, slot in self.slots()}

    def client_fields(self) -> dict[str, Fields]:
        """Return the declarations of the client state, by slot."""
        return {name: slot.on_client() for name, slot in self.slots()}

    def message_fields(self) -> dict[str, Fields]:
        """Return the declarations of the messages that clients send in addition to the displacement, by slot."""
        return {name: slot.sends() for name, slot in self.slots()}

    def new_server(self, x: Tensor) -> States:
        """Return the initial server state, given the initial model ``x`` of shape (P,)."""
        return {name: new_state(fields, x) for name, fields in self.server_fields().items()}

    def new_client(self, x: Tensor) -> States:
        """Return the state of a client that has not participated yet, given the initial model ``x`` of shape (P,)."""
        return {name: new_state(fields, x) for name, fields in self.client_fields().items()}

    def momentum(self, server: States) -> tuple[Tensor, Literal[1, -1]] | None:
        """Return the server's momentum vector, which is used in measurements, or None if no slot keeps one.

        Args:
            server: server state by slot.

        Returns:
            The momentum of shape (P,), and the sign that makes it a descent direction: -1 for a momentum of gradients,
            which point uphill, and 1 for a momentum of displacements.
        """
        for slot, fields in self.server_fields().items():
            for declared in fields:
                if declared.momentum is not None:
                    return server[slot][declared.name], -1 if declared.momentum == "ascent" else 1
        return None

    def floats_down(self, size: int) -> int:
        """Return how many floats the server sends to each client per round, for a model of ``size`` parameters.

        The server sends the model, the state that is declared as sent, and the common gradient if the drift needs it.
        """
        state = sum(field.scalars(size) for field in flat_fields(self.server_fields()).values() if field.sent)
        return size + state + self._common_gradient_floats(size)

    def floats_up(self, size: int) -> int:
        """Return how many floats each client sends to the server per round, for a model of ``size`` parameters.

        A client sends its displacement, the slots' messages and, if the drift correction needs the common gradient, its
        own full-batch gradient.
        """
        messages = sum(field.scalars(size) for field in flat_fields(self.message_fields()).values())
        return size + messages + self._common_gradient_floats(size)

    def _common_gradient_floats(self, size: int) -> int:
        """Floats sent in each direction to compute and distribute the cohort's common gradient."""
        return size if self.drift.full_gradient == "common" else 0

    @property
    def backward_passes(self) -> int:
        """Number of backward passes per local step.

        A step needs one pass at the perturbed point and those that compute the perturbation. Extra passes of the drift
        correction count once for every gradient that it corrects. The full-batch gradient that some drift corrections
        need once per round is not counted.
        """
        ascent_passes = self.perturbation.ascent_passes
        corrected_gradients = 1 + ascent_passes if self.perturbation.uses_drift else 1
        return 1 + ascent_passes + self.drift.extra_passes * corrected_gradients

    @property
    def needs_teacher(self) -> bool:
        """Whether local steps distil from a teacher, for which the task must have logits."""
        return self.drift.needs_teacher or self.perturbation.needs_teacher

    @explain_key_errors
    def broadcast(self, x: Tensor, server: States) -> Tensor:
        """Return the model z from which clients start, shape (P,), given the server model ``x`` and its state."""
        return self.drift.start(x, server["drift"])

    def local_start(self, z: Tensor, client: Mapping[str, State]) -> Tensor:
        """Return the model from which a client starts, shape (P,), given the broadcast model ``z`` and its state."""
        return self.start.personal(z, client["start"])

    @explain_key_errors
    def begin(
        self,
        z: Tensor,
        server: States,
        client: States,
        layout: Layout,
        schedule: Schedule,
        round: Tensor,
        steps: Tensor,
        descent: Descent,
        own_gradient: Tensor | None = None,
        common_gradient: Tensor | None = None,
        pilot: Pilot | None = None,
    ) -> LocalState:
        """Call ``begin`` of every slot, and return the state of a client before its first local step.

        Args:
            z: broadcast model, shape (P,).
            server: server state by slot.
            client: the client's state by slot.
            layout: names and shapes of the parameters in z.
            schedule: learning-rate settings of the run.
            round: number of the round, counted from 0, shape ().
            steps: number of local steps K, shape ().
            descent: settings of local SGD.
            own_gradient: the client's full-batch gradient at z, shape (P,); None unless the drift requests it.
            common_gradient: the cohort's mean of these gradients, shape (P,); None unless the drift requests it.
            pilot: gradients of a few of the client's batches; None unless the perturbation requests them.
        """
        zero = torch.zeros((), dtype=z.dtype, device=z.device)
        broadcast, z = z, self.local_start(z, client)
        drift_ctx = LocalContext(
            y=z.clone(),
            z=z,
            server=server["drift"],
            client=client["drift"],
            local={},  # set below, from the result of ``begin``
            drift={},  # only for the perturbation
            step=zero,
            steps=steps,
            lr_sum=zero,
            first_lr=self.lr_schedule(schedule, round, zero, steps),
            next_lr=self.lr_schedule(schedule, round, steps, steps),
            round=round,
            layout=layout,
            own_gradient=own_gradient,
            common_gradient=common_gradient,
            received=None if z is broadcast else broadcast,
        )
        drift_ctx = drift_ctx._replace(local=self.drift.begin(drift_ctx))
        if self.drift.counts_effective_steps:
            drift_ctx.local.update({"unit": zero, "unit velocity": zero} if descent.momentum else {"unit": zero})
        # The perturbation has its own state, and may read what the drift computed for this round.
        perturbation_ctx = drift_ctx._replace(
            server=server["perturbation"], client=client["perturbation"], local={}, drift=drift_ctx.local
        )
        local = self.perturbation.begin(perturbation_ctx._replace(pilot=pilot))
        perturbation_ctx = perturbation_ctx._replace(local=local)
        optimiser_ctx = drift_ctx._replace(server=server["local_optimiser"], client=client["local_optimiser"], local={})
        optimiser_ctx = optimiser_ctx._replace(local=self.local_optimiser.begin(optimiser_ctx, descent))
        return LocalState(drift_ctx, perturbation_ctx, optimiser_ctx)

    def step(
        self, local: LocalState, batch_gradient: BatchGradient, schedule: Schedule, descent: Descent
    ) -> LocalState:
        """Take one local step: perturb the model, compute the gradient there, correct it, and descend.

            e_k = offset(y_k)
            g = blend(grad(y_k + e_k))
            d_k = direction(clip(g))
            y_{k+1} = y_k - eta_k (clip(d_k) + weight_decay y_k), or another step of the local optimiser

        Here y_k is the client's model after k steps, e_k the perturbation, grad(.) the batch's gradient at a point, d_k
        the direction after the drift correction and eta_k the learning rate. ``blend`` may mix in the gradient at y_k.
        At most one of g and d_k is clipped; ``Descent.clip_mode`` decides which.

        Args:
            local: the client's state before the step.
            batch_gradient: gradient of the current batch at any point, one backward pass per call.
            schedule: learning-rate settings of the run.
            descent: settings of local SGD.
        """
        drift_ctx, perturbation_ctx, optimiser_ctx = local  # ctx: the context that a slot sees
        gradient = with_teacher(batch_gradient, self.drift.teacher(drift_ctx))
        ascent_gradient = self._ascent_gradient(drift_ctx, gradient)
        if self.perturbation.needs_teacher:
            ascent_gradient = with_teacher(batch_gradient, self.perturbation.teacher(perturbation_ctx))
        offset, changed_state = self.perturbation.offset(perturbation_ctx, ascent_gradient)
        require_begun(self.perturbation, perturbation_ctx.local, changed_state)
        perturbation_ctx = perturbation_ctx.changed(offset=offset, local={**perturbation_ctx.local, **changed_state})
        perturbed_point = perturbation_ctx.perturbed(perturbation_ctx.y)
        g = self.perturbation.blend(gradient(perturbed_point), perturbation_ctx)
        d = self.drift.direction(descent.clip_gradient(g), drift_ctx.changed(offset=offset), gradient)
        lr = self.lr_schedule(schedule, drift_ctx.round, drift_ctx.step, drift_ctx.steps)
        y, moments = self.local_optimiser.move(descent.clip_direction(d), lr, optimiser_ctx, descent)
        require_begun(self.local_optimiser, optimiser_ctx.local, moments)
        step, lr_sum = drift_ctx.step + 1, drift_ctx.lr_sum + lr
        if self.drift.counts_effective_steps:
            drift_ctx = drift_ctx.changed(local=self._unit_step(drift_ctx, lr, descent))
        return LocalState(
            drift_ctx.changed(y=y, step=step, lr_sum=lr_sum),
            perturbation_ctx.changed(y=y, step=step, lr_sum=lr_sum, offset=None),
            optimiser_ctx.changed(y=y, step=step, lr_sum=lr_sum, local={**optimiser_ctx.local, **moments}),
        )

    def _unit_step(self, drift_ctx: LocalContext, lr: Tensor, descent: Descent) -> State:
        """Return the drift's local state after one more step of ``unit``, which counts the effective steps of FedNova.

        ``unit`` is a model with a single weight, which starts at 0 and whose gradient is always 1. It takes the same
        steps as the client's model, but without clipping and weight decay.
        """
        unit = drift_ctx.local["unit"]
        unit_ctx = drift_ctx.changed(y=unit, z=torch.zeros_like(unit))
        d = self.drift.direction(torch.ones_like(unit), unit_ctx, torch.ones_like)
        unit, velocity = descent.descend(unit, d, lr, drift_ctx.local.get("unit velocity"))
        changed_state = {"unit": unit} if velocity is None else {"unit": unit, "unit velocity": velocity}
        return {**drift_ctx.local, **changed_state}

    def _ascent_gradient(self, drift_ctx: LocalContext, gradient: Gradient) -> Gradient:
        """Return the gradient function from which the perturbation computes its offset.

        It includes the drift correction if the perturbation asks for it (``uses_drift``).

        Args:
            drift_ctx: the drift's context before the step.
            gradient: gradient of the current batch at any point.
        """
        if not self.perturbation.uses_drift:
            return gradient

        def corrected(point: Tensor) -> Tensor:
            return self.drift.direction(gradient(point), drift_ctx.changed(y=point), gradient)

        return corrected

    @explain_key_errors
    def finish(self, local: LocalState) -> tuple[States, Message]:
        """Return the client's new state and its message to the server, both by slot, after the last local step.

        The server optimiser keeps no client state; its message is computed from the displacement.
        """
        drift_state, drift_sent = finish(self.drift, local.drift)
        perturbation_state, perturbation_sent = finish(self.perturbation, local.perturbation)
        optimiser_state, optimiser_sent = finish(self.local_optimiser, local.optimiser)
        start_state, start_sent = finish(self.start, local.drift)
        client = {
            "drift": local.drift.client | drift_state,
            "perturbation": local.perturbation.client | perturbation_state,
            "local_optimiser": local.optimiser.client | optimiser_state,
            "server": {},
            "start": start_state,
            "weights": {},
        }
        displacement = self.drift.displacement(local.drift)
        sent = {
            "drift": drift_sent,
            "perturbation": perturbation_sent,
            "local_optimiser": optimiser_sent,
            "server": require_sent(self.server, self.server.measure(displacement), displacement),
            "start": start_sent,
            "weights": {},
        }
        return client, Message(displacement, local.drift.lr_sum, sent)

    @explain_key_errors
    def aggregate(self, cohort: CohortMeans, means: States, server: States) -> tuple[Tensor, States]:
        """Compute the new server model from what the cohort sent.

        The drift computes a target model from the cohort's means. The server optimiser moves the server model x towards
        this target. The perturbation's server state is updated after it, because it may depend on the new server model.

        Args:
            cohort: averaged displacements of the cohort, and the server model x at the start of the round.
            means: averaged messages by slot; for the client weights, also their changed server state.
            server: server state by slot, before the round.

        Returns:
            The new server model of shape (P,) and the new server state by slot.
        """
        cohort = cohort._replace(z=self.start.mean_start(cohort._replace(mean=means["start"])))
        target, new_drift = aggregate(self.drift, cohort._replace(mean=means["drift"]), server["drift"])
        server_means = cohort._replace(mean=means["server"])
        x, new_optimiser = aggregate(self.server, server_means, target - cohort.x, server["server"])
        after_step = self.drift.after_server_step(x, server["drift"] | new_drift)
        new_drift = new_drift | require_declared(self.drift, "on_server", after_step)
        perturbation_means = cohort._replace(mean=means["perturbation"])
        new_perturbation = self.perturbation.aggregate(perturbation_means, server["perturbation"], x)
        require_declared(self.perturbation, "on_server", new_perturbation)
        optimiser_means = cohort._replace(mean=means["local_optimiser"])
        new_local_optimiser = self.local_optimiser.aggregate(optimiser_means, server["local_optimiser"])
        require_declared(self.local_optimiser, "on_server", new_local_optimiser)
        return x, {
            "drift": server["drift"] | new_drift,
            "perturbation": server["perturbation"] | new_perturbation,
            "local_optimiser": server["local_optimiser"] | new_local_optimiser,
            "server": server["server"] | new_optimiser,
            "start": server["start"],
            "weights": {name: means["weights"].get(name, old) for name, old in server["weights"].items()},
        }


def flat_fields(fields: dict[str, Fields]) -> dict[str, Field]:
    """Return the fields by full name, ``slot.field``."""
    return {f"{slot}.{field.name}": field for slot, slot_fields in fields.items() for field in slot_fields}


def flat_state(states: Mapping[str, State]) -> State:
    """Return the state by full name, ``slot.field``."""
    return {f"{slot}.{name}": value for slot, state in states.items() for name, value in state.items()}


def nested_state(flat: State) -> States:
    """Return the state by slot and field; the inverse of ``flat_state``. Slots may be empty."""
    states: States = {slot: {} for slot in SLOTS if slot != "lr_schedule"}
    for full_name, value in flat.items():
        slot, name = full_name.split(".", 1)
        states[slot][name] = value
    return states
