"""What every slot shares: where a client stands, what is kept and sent, and one unit of length.

A slot is written for one client on flat vectors. Its state is declared, field by field, so that engines can store it, send it and
count it; the names are the slot's own. What clients send is only ever averaged, so partial sums may be taken anywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fedflat.models.layout import Layout

State = dict[str, Tensor]
Gradient = Callable[[Tensor], Tensor]
"""The gradient of the current batch's loss at a point: each call is one backward pass."""


@dataclass(frozen=True)
class Field:
    """One piece of state: a vector like the model, or a scalar."""

    name: str
    vector: bool = True
    start: float | Literal["model"] = 0.0
    sent: bool = True
    """On the server: whether clients receive it."""
    by_samples: bool = False
    """In a message: averaged by the clients' sample counts instead of uniformly."""

    def new(self, x: Tensor) -> Tensor:
        """Its value before the first round, for a model ``x``."""
        if self.start == "model":
            return x.clone()
        return (
            torch.full_like(x, self.start)
            if self.vector
            else torch.full((), self.start, dtype=x.dtype, device=x.device)
        )

    def scalars(self, size: int) -> int:
        """How many numbers it is on the wire, for a model of ``size`` numbers."""
        return size if self.vector else 1


def vector(name: str, *, start: float | Literal["model"] = 0.0, sent: bool = True, by_samples: bool = False) -> Field:
    """A field as long as the model."""
    return Field(name, True, start, sent, by_samples)


def scalar(name: str, *, start: float = 0.0, sent: bool = True) -> Field:
    """A field of a single number."""
    return Field(name, False, start, sent)


Fields = tuple[Field, ...]


def new_state(fields: Fields, x: Tensor) -> State:
    """The state that some fields start with."""
    return {field.name: field.new(x) for field in fields}


class At(NamedTuple):
    """Where a client stands: all that a slot may look at. Numbers that change are tensors, so that a step can be captured whole."""

    y: Tensor
    """The local iterate."""
    z: Tensor
    """The model it received, from which it started."""
    server: State
    """This slot's vectors that were sent down."""
    client: State
    """This slot's vectors that the client keeps between rounds."""
    local: State
    """What this slot set up at the start of the round and changed since; its names are fixed then."""
    drift: State
    """What the drift slot set up: a perturbation may follow it."""
    step: Tensor
    """k, from 0."""
    steps: Tensor
    """K, the number of steps of this client in this round."""
    rates: Tensor
    """H: the sum of the learning rates used so far in this round."""
    first_lr: Tensor
    """The learning rate of step 0."""
    final_lr: Tensor
    """The learning rate that step K would have, which is not taken."""
    round: Tensor
    """t, from 0."""
    layout: Layout
    offset: Tensor | None = None
    """The current perturbation e, once it is known."""
    own_gradient: Tensor | None = None
    """The gradient of this client's whole data at z, where the drift asks for it."""
    common_gradient: Tensor | None = None
    """The mean of the cohort's whole gradients at z, by samples, where the drift asks for it."""

    def perturbed(self, point: Tensor) -> Tensor:
        """A point shifted by the current perturbation."""
        return point if self.offset is None else point + self.offset

    @property
    def moved(self) -> Tensor:
        """D = y - z, the displacement so far."""
        return self.y - self.z

    @property
    def mean_direction(self) -> Tensor:
        """u = (z - y) / H, the displacement in gradient units."""
        return (self.z - self.y) / self.rates


def unit(v: Tensor) -> Tensor:
    """v / ||v|| by one l2 norm over all parameters; zero stays zero."""
    length: Tensor = v.norm()
    return v / (length + 1e-12)


class Slot:
    """The state a slot declares; none unless it says otherwise."""

    def on_server(self) -> Fields:
        """What the server keeps for this slot."""
        return ()

    def on_client(self) -> Fields:
        """What each client keeps for this slot between rounds."""
        return ()

    def sends(self) -> Fields:
        """What a client sends for this slot beside its displacement."""
        return ()

    def may_explode(self) -> str:
        """Why this slot may make a run diverge and what to change, where that is known of it."""
        return ""

    def needs_the_mean(self) -> str:
        """Why what clients send must be averaged and nothing else, such as a robust centre, has a meaning; empty where it has one."""
        return ""


class Returned(NamedTuple):
    """What came back from a cohort, averaged."""

    x: Tensor
    """The server's model at the start of the round."""
    z: Tensor
    """The model that was broadcast."""
    displacement: Tensor
    """The clients' displacements, averaged by the aggregation weights."""
    uniform: Tensor
    """The clients' displacements, averaged uniformly: for duals and control vectors."""
    direction: Tensor
    """The uniform mean of (z - y_i) / H_i: displacements in gradient units."""
    mean: State
    """This slot's messages, averaged."""
    share: float
    """|cohort| / |clients|."""
    round: int
    common_gradient: Tensor | None = None
