"""An algorithm: one value for each slot, and the fixed order in which they act.

A round reads: ``broadcast``; per client ``begin``, ``step`` K times, ``finish``; then ``aggregate`` of what came back, averaged.
Engines call these, for one client or many; nothing here knows how.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from fedflat.algorithms.descent import Descent
from fedflat.algorithms.drift import Drift
from fedflat.algorithms.lr_schedule import LrSchedule, Schedule
from fedflat.algorithms.perturbation import Perturbation
from fedflat.algorithms.server import Sgd
from fedflat.algorithms.slot import At, Field, Fields, Gradient, Returned, Slot, State, new_state
from fedflat.averaging import Average
from fedflat.models.layout import Layout

States = dict[str, State]
"""State by slot: drift, perturbation, server."""


class Local(NamedTuple):
    """One client in the middle of its round."""

    drift: At
    perturbation: At
    velocity: Tensor | None
    """The heavy-ball buffer of local momentum, new in every round."""


class Message(NamedTuple):
    """What one client sends up: its displacement, the sum of its rates, and what its slots add."""

    displacement: Tensor
    rates: Tensor
    sent: States


@dataclass(frozen=True)
class Algorithm:
    """A point in the space of slots."""

    drift: Drift = field(default_factory=Drift)
    perturbation: Perturbation = field(default_factory=Perturbation)
    lr_schedule: LrSchedule = field(default_factory=LrSchedule)
    server: Sgd = field(default_factory=Sgd)
    averages: tuple[Average, ...] = ()

    # --- state -------------------------------------------------------------------------------------------------------------------

    def slots(self) -> Iterator[tuple[str, Slot]]:
        """The slots that keep state, by name."""
        yield from (("drift", self.drift), ("perturbation", self.perturbation), ("server", self.server))

    def server_fields(self) -> dict[str, Fields]:
        """What the server keeps, by slot."""
        return {name: slot.on_server() for name, slot in self.slots()}

    def client_fields(self) -> dict[str, Fields]:
        """What each client keeps, by slot."""
        return {name: slot.on_client() for name, slot in self.slots()}

    def message_fields(self) -> dict[str, Fields]:
        """What each client sends beside its displacement, by slot."""
        return {name: slot.sends() for name, slot in self.slots()}

    def new_server(self, x: Tensor) -> States:
        """The server's state before the first round."""
        return {name: new_state(fields, x) for name, fields in self.server_fields().items()}

    def new_client(self, x: Tensor) -> States:
        """A client's state before it first takes part; ``x`` is the model before the first round."""
        return {name: new_state(fields, x) for name, fields in self.client_fields().items()}

    # --- cost --------------------------------------------------------------------------------------------------------------------

    def floats_down(self, size: int) -> int:
        """Numbers sent to one client in a round, for a model of ``size`` numbers."""
        sent = sum(f.scalars(size) for fields in self.server_fields().values() for f in fields if f.sent)
        return size + sent + (size if self.drift.whole_gradient == "common" else 0)

    def floats_up(self, size: int) -> int:
        """Numbers sent by one client in a round."""
        sent = sum(f.scalars(size) for fields in self.message_fields().values() for f in fields)
        return size + sent + (size if self.drift.whole_gradient == "common" else 0)

    @property
    def backward_passes(self) -> int:
        """Backward passes per local step; whole gradients, once in a round, come on top."""
        climbed = self.perturbation.ascent_passes if self.perturbation.climbs_the_direction else 0
        return 1 + self.perturbation.ascent_passes + self.drift.extra_passes * (1 + climbed)

    # --- a round -----------------------------------------------------------------------------------------------------------------

    def broadcast(self, x: Tensor, server: States) -> Tensor:
        """z, from which clients start."""
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
    ) -> Local:
        """A client before its first step."""
        zero = torch.zeros((), dtype=z.dtype, device=z.device)
        at = At(
            y=z.clone(), z=z, server=server["drift"], client=client["drift"], local={}, drift={}, step=zero, steps=steps, rates=zero,
            first_lr=self.lr_schedule(schedule, round, zero, steps), final_lr=self.lr_schedule(schedule, round, steps, steps),
            round=round, layout=layout, own_gradient=own_gradient, common_gradient=common_gradient,
        )  # fmt: skip
        drift = at._replace(local=self.drift.begin(at))
        beside = at._replace(server=server["perturbation"], client=client["perturbation"], drift=drift.local)
        perturbation = beside._replace(local=self.perturbation.begin(beside))
        return Local(drift, perturbation, torch.zeros_like(z) if descent.momentum else None)

    def step(self, local: Local, gradient: Gradient, schedule: Schedule, descent: Descent) -> Local:
        """One local step: perturb, take the gradient, correct it, descend."""
        drift, at, velocity = local
        offset, changed = self.perturbation.offset(at, self._climbed(drift, gradient))
        at = at._replace(offset=offset, local=at.local | changed)
        g = self.perturbation.blend(gradient(at.perturbed(at.y)), at)
        d = self.drift.direction(descent.clip_gradient(g), drift._replace(offset=offset), gradient)
        lr = self.lr_schedule(schedule, at.round, at.step, at.steps)
        y, velocity = descent.move(at.y, d, lr, velocity)
        step, rates = at.step + 1, at.rates + lr
        return Local(
            drift._replace(y=y, step=step, rates=rates), at._replace(y=y, step=step, rates=rates, offset=None), velocity
        )

    def _climbed(self, drift: At, gradient: Gradient) -> Gradient:
        """What a perturbation climbs."""
        if not self.perturbation.climbs_the_direction:
            return gradient
        return lambda point: self.drift.direction(gradient(point), drift._replace(y=point), gradient)

    def finish(self, local: Local) -> tuple[States, Message]:
        """What a client keeps, and what it sends, after its last step."""
        kept, sent = self.drift.finish(local.drift)
        kept_too, sent_too = self.perturbation.finish(local.perturbation)
        client = {
            "drift": local.drift.client | kept,
            "perturbation": local.perturbation.client | kept_too,
            "server": {},
        }
        message = Message(
            self.drift.displacement(local.drift),
            local.drift.rates,
            {"drift": sent, "perturbation": sent_too, "server": {}},
        )
        return client, message

    def aggregate(self, back: Returned, means: States, server: States) -> tuple[Tensor, States]:
        """The server's new model and state, from what the cohort sent on average."""
        target, drift = self.drift.aggregate(back._replace(mean=means["drift"]), server["drift"])
        x, optimiser = self.server.step(back.x, target - back.x, server["server"])
        perturbation = self.perturbation.aggregate(back._replace(mean=means["perturbation"]), server["perturbation"], x)
        return x, {
            "drift": server["drift"] | drift,
            "perturbation": server["perturbation"] | perturbation,
            "server": server["server"] | optimiser,
        }


def flat_fields(fields: dict[str, Fields]) -> dict[str, Field]:
    """Fields under their full names, ``slot.field``."""
    return {f"{slot}.{field.name}": field for slot, some in fields.items() for field in some}


def flat_state(states: Mapping[str, State]) -> State:
    """State under its full names, ``slot.field``."""
    return {f"{slot}.{name}": value for slot, state in states.items() for name, value in state.items()}


def nested_state(flat: State) -> States:
    """The inverse of ``flat_state``; every slot is there, if only empty."""
    states: States = {"drift": {}, "perturbation": {}, "server": {}}
    for full, value in flat.items():
        slot, name = full.split(".", 1)
        states[slot][name] = value
    return states
