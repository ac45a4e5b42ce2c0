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

from fedflat.algorithms.drift import Drift
from fedflat.algorithms.lr_schedule import LrSchedule, Schedule
from fedflat.algorithms.perturbation import Perturbation
from fedflat.algorithms.server import Sgd
from fedflat.algorithms.slot import CohortMeans, Field, Fields, Gradient, LocalContext, Slot, State, new_state
from fedflat.averaging import Average
from fedflat.models.layout import Layout


@dataclass(frozen=True)
class Descent:
    """Local SGD: y <- y - lr (clip(d) + weight_decay y), with optional heavy-ball momentum reset every round.

    y is the client's model and d the direction of a step after the drift correction. With ``clip_mode=grad``, the
    gradient is clipped before the drift correction, and d is not.

    >>> import torch
    >>> y, d, lr = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0]), torch.tensor(0.1)
    >>> Descent(clip=1.0).move(y, d, lr, None)[0]  # d has norm 5 and is scaled to norm 1
    tensor([0.9400, 1.9200])
    """

    weight_decay: float = 0.0
    momentum: float = 0.0
    clip: float | None = None
    """Largest l2 norm; None disables clipping."""
    clip_mode: Literal["total", "grad"] = "total"
    """``total`` clips the corrected direction, ``grad`` the raw gradient before the drift correction."""

    def clip_gradient(self, g: Tensor) -> Tensor:
        """The gradient ``g`` of shape (P,) before the drift correction, clipped if ``clip_mode`` is ``grad``."""
        return _clipped(g, self.clip) if self.clip is not None and self.clip_mode == "grad" else g

    def move(self, y: Tensor, d: Tensor, lr: Tensor, velocity: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Take one step; with ``clip_mode=grad`` the caller has clipped the gradient already (``clip_gradient``).

        Args:
            y: the client's model, shape (P,).
            d: direction after the drift correction, shape (P,).
            lr: learning rate, shape ().
            velocity: momentum buffer of shape (P,), or None without momentum.

        Returns:
            The next model and momentum buffer.
        """
        if self.clip is not None and self.clip_mode == "total":
            d = _clipped(d, self.clip)
        if self.weight_decay:
            d = d + self.weight_decay * y
        if velocity is not None:
            velocity = self.momentum * velocity + d
            d = velocity
        return y - lr * d, velocity


def _clipped(v: Tensor, max_norm: float) -> Tensor:
    """The vector ``v``, scaled down to the l2 norm ``max_norm`` if its norm is larger."""
    scale: Tensor = max_norm / (v.norm() + 1e-12)  # finite for v = 0
    return v * scale.clamp(max=1)


SLOTS = ("drift", "perturbation", "lr_schedule", "server")
"""The slots that hold exactly one component; in addition, an algorithm may have any number of averages."""
States = dict[str, State]
"""State by slot: drift, perturbation, server."""


class LocalState(NamedTuple):
    """A client's state during its local steps."""

    drift: LocalContext
    perturbation: LocalContext
    velocity: Tensor | None
    """Buffer of the local heavy-ball momentum, shape (P,), zero at the start of every round."""


class Message(NamedTuple):
    """What a client sends: its displacement (P,), the sum of its learning rates (), and the slots' messages."""

    displacement: Tensor
    lr_sum: Tensor
    sent: States


@dataclass(frozen=True)
class Algorithm:
    """A federated algorithm: one component in each of four slots, and any number of averages of server models.

    The slots are the drift correction, the perturbation, the learning-rate schedule and the server optimiser. A
    component may keep state on the server and on every client, and may add messages to what clients send. Vectors have
    shape (P,), P being the number of trained parameters.

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
        yield from (("drift", self.drift), ("perturbation", self.perturbation), ("server", self.server))

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

        A client sends its displacement, the slots' messages, and its full-batch gradient if the drift needs its mean.
        """
        messages = sum(field.scalars(size) for field in flat_fields(self.message_fields()).values())
        return size + messages + self._common_gradient_floats(size)

    def _common_gradient_floats(self, size: int) -> int:
        """Floats sent in each direction to compute and distribute the cohort's common gradient."""
        return size if self.drift.full_gradient == "common" else 0

    @property
    def backward_passes(self) -> int:
        """Number of backward passes per local step.

        A step needs one pass at the perturbed point and those that compute the perturbation. If the drift needs extra
        passes to correct a gradient, it takes them for each gradient that it corrects. The full-batch gradient that
        some drifts need once per round is not counted.
        """
        ascent_passes = self.perturbation.ascent_passes
        corrected_gradients = 1 + ascent_passes if self.perturbation.uses_drift else 1
        return 1 + ascent_passes + self.drift.extra_passes * corrected_gradients

    def broadcast(self, x: Tensor, server: States) -> Tensor:
        """Return the model z from which clients start, shape (P,), given the server model ``x`` and its state."""
        return self.drift.start(x, server["drift"])

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
    ) -> LocalState:
        """Return the state of a client before its first local step, for which the slots' ``begin`` has been called.

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
        """
        zero = torch.zeros((), dtype=z.dtype, device=z.device)
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
        )
        drift_ctx = drift_ctx._replace(local=self.drift.begin(drift_ctx))
        # The perturbation has its own state, and may read what the drift computed for this round.
        perturbation_ctx = drift_ctx._replace(
            server=server["perturbation"], client=client["perturbation"], local={}, drift=drift_ctx.local
        )
        perturbation_ctx = perturbation_ctx._replace(local=self.perturbation.begin(perturbation_ctx))
        velocity = torch.zeros_like(z) if descent.momentum else None
        return LocalState(drift_ctx, perturbation_ctx, velocity)

    def step(self, local: LocalState, gradient: Gradient, schedule: Schedule, descent: Descent) -> LocalState:
        """Take one local step: perturb the model, compute the gradient there, correct it, and descend.

            e_k = offset(y_k)
            g = blend(grad(y_k + e_k))
            d_k = direction(clip(g))
            y_{k+1} = y_k - eta_k (clip(d_k) + weight_decay y_k)

        Here y_k is the client's model after k steps, e_k the perturbation, grad(.) the batch's gradient at a point, d_k
        the direction after the drift correction and eta_k the learning rate. ``blend`` may mix in the gradient at y_k.
        At most one of g and d_k is clipped; ``Descent.clip_mode`` decides which.

        Args:
            local: the client's state before the step.
            gradient: gradient of the current batch at any point, one backward pass per call.
            schedule: learning-rate settings of the run.
            descent: settings of local SGD.
        """
        drift_ctx, perturbation_ctx, velocity = local  # ctx: the context that a slot sees
        offset, changed_state = self.perturbation.offset(perturbation_ctx, self._ascent_gradient(drift_ctx, gradient))
        perturbation_ctx = perturbation_ctx.changed(offset=offset, local={**perturbation_ctx.local, **changed_state})
        perturbed_point = perturbation_ctx.perturbed(perturbation_ctx.y)
        g = self.perturbation.blend(gradient(perturbed_point), perturbation_ctx)
        d = self.drift.direction(descent.clip_gradient(g), drift_ctx.changed(offset=offset), gradient)
        lr = self.lr_schedule(schedule, drift_ctx.round, drift_ctx.step, drift_ctx.steps)
        y, velocity = descent.move(drift_ctx.y, d, lr, velocity)
        step, lr_sum = drift_ctx.step + 1, drift_ctx.lr_sum + lr
        return LocalState(
            drift_ctx.changed(y=y, step=step, lr_sum=lr_sum),
            perturbation_ctx.changed(y=y, step=step, lr_sum=lr_sum, offset=None),
            velocity,
        )

    def _ascent_gradient(self, drift_ctx: LocalContext, gradient: Gradient) -> Gradient:
        """The gradient function from which the perturbation computes its offset; drift-corrected with ``uses_drift``.

        Args:
            drift_ctx: the drift's context before the step.
            gradient: gradient of the current batch at any point.
        """
        if not self.perturbation.uses_drift:
            return gradient

        def corrected(point: Tensor) -> Tensor:
            return self.drift.direction(gradient(point), drift_ctx.changed(y=point), gradient)

        return corrected

    def finish(self, local: LocalState) -> tuple[States, Message]:
        """Return the client's new state and its message to the server, both by slot, after the last local step.

        The entries of the server optimiser are empty, because it keeps no client state and needs no message.
        """
        drift_state, drift_sent = self.drift.finish(local.drift)
        perturbation_state, perturbation_sent = self.perturbation.finish(local.perturbation)
        client = {
            "drift": local.drift.client | drift_state,
            "perturbation": local.perturbation.client | perturbation_state,
            "server": {},
        }
        sent = {"drift": drift_sent, "perturbation": perturbation_sent, "server": {}}
        return client, Message(self.drift.displacement(local.drift), local.drift.lr_sum, sent)

    def aggregate(self, cohort: CohortMeans, means: States, server: States) -> tuple[Tensor, States]:
        """Compute the new server model from what the cohort sent.

        The drift computes a target model from the cohort's means. The server optimiser moves the server model x towards
        this target. The perturbation's server state is updated last, because it may depend on the new server model.

        Args:
            cohort: averaged displacements of the cohort, and the server model x at the start of the round.
            means: averaged messages by slot.
            server: server state by slot, before the round.

        Returns:
            The new server model of shape (P,) and the new server state by slot.
        """
        target, new_drift = self.drift.aggregate(cohort._replace(mean=means["drift"]), server["drift"])
        x, new_optimiser = self.server.step(cohort.x, target - cohort.x, server["server"])
        perturbation_means = cohort._replace(mean=means["perturbation"])
        new_perturbation = self.perturbation.aggregate(perturbation_means, server["perturbation"], x)
        return x, {
            "drift": server["drift"] | new_drift,
            "perturbation": server["perturbation"] | new_perturbation,
            "server": server["server"] | new_optimiser,
        }


def flat_fields(fields: dict[str, Fields]) -> dict[str, Field]:
    """Fields by full name, ``slot.field``."""
    return {f"{slot}.{field.name}": field for slot, slot_fields in fields.items() for field in slot_fields}


def flat_state(states: Mapping[str, State]) -> State:
    """State by full name, ``slot.field``."""
    return {f"{slot}.{name}": value for slot, state in states.items() for name, value in state.items()}


def nested_state(flat: State) -> States:
    """State by slot and field, ``states[slot][field]``, from state by full name, ``slot.field``; slots may be empty."""
    states: States = {"drift": {}, "perturbation": {}, "server": {}}
    for full_name, value in flat.items():
        slot, name = full_name.split(".", 1)
        states[slot][name] = value
    return states
