"""Building blocks shared by all slots: declared state, the context of a local step, and the cohort's averaged results.

A slot is written for one client and works on flat vectors of P numbers, P being the number of trained parameters.
It declares its state field by field, so that engines can store, send and count it. Client messages are only ever
averaged, so engines may form partial sums anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fedflat.models.layout import Layout

State = dict[str, Tensor]
"""Tensors by field name: vectors of shape (P,) and scalars of shape ()."""
Gradient = Callable[[Tensor], Tensor]
"""Maps a point of shape (P,) to the gradient of the current batch's loss there; each call is one backward pass."""


@dataclass(frozen=True)
class Field:
    """One piece of a slot's state: a vector of shape (P,) or a scalar of shape ()."""

    name: str
    vector: bool = True
    start: float | Literal["model"] = 0.0
    """Initial value of every entry; ``"model"`` starts as a copy of the initial model."""
    sent: bool = True
    """For server state: whether clients receive it."""
    by_samples: bool = False
    """For messages: average weighted by sample counts instead of uniformly."""
    momentum: Literal["ascent", "descent"] | None = None
    """For server state: marks the slot's momentum, in gradient units (ascent) or displacement units (descent)."""

    def new(self, x: Tensor) -> Tensor:
        """The initial value for a model ``x`` of shape (P,)."""
        if self.start == "model":
            return x.clone()
        if self.vector:
            return torch.full_like(x, self.start)
        return torch.full((), self.start, dtype=x.dtype, device=x.device)

    def scalars(self, size: int) -> int:
        """How many numbers are sent for a model of ``size`` parameters."""
        return size if self.vector else 1


def vector(
    name: str,
    *,
    start: float | Literal["model"] = 0.0,
    sent: bool = True,
    by_samples: bool = False,
    momentum: Literal["ascent", "descent"] | None = None,
) -> Field:
    """Declare a state vector of shape (P,); the arguments are those of ``Field``."""
    return Field(name, True, start, sent, by_samples, momentum)


def scalar(name: str, *, start: float = 0.0, sent: bool = True) -> Field:
    """Declare a scalar; the arguments are those of ``Field``."""
    return Field(name, False, start, sent)


Fields = tuple[Field, ...]


def new_state(fields: Fields, x: Tensor) -> State:
    """The initial state of ``fields`` for a model ``x`` of shape (P,)."""
    return {field.name: field.new(x) for field in fields}


class LocalContext(NamedTuple):
    """Everything that a slot can see during a client's round.

    Quantities that change between steps are tensors, so that an engine can capture a step as a CUDA graph.
    """

    y: Tensor
    """Current local iterate y_k, shape (P,)."""
    z: Tensor
    """Received model, from which local training started, shape (P,)."""
    server: State
    """This slot's server state that was sent to clients."""
    client: State
    """This slot's client state, kept between rounds."""
    local: State
    """This slot's state within the round: created by ``begin``, updated by every step."""
    drift: State
    """The drift slot's ``local`` state, which a perturbation may read."""
    step: Tensor
    """Step k, counted from 0, shape ()."""
    steps: Tensor
    """Number of local steps K of this client in this round, shape ()."""
    lr_sum: Tensor
    """H: sum of the learning rates of the steps taken so far in this round, shape ()."""
    first_lr: Tensor
    """Learning rate of step 0, shape ()."""
    final_lr: Tensor
    """Learning rate that step K would have; K-1 is the last step taken, shape ()."""
    round: Tensor
    """Round t, counted from 0, shape ()."""
    layout: Layout
    """Names and shapes of the parameters in a flat vector."""
    offset: Tensor | None = None
    """Current perturbation e_k, shape (P,), once it is known."""
    own_gradient: Tensor | None = None
    """Full-batch gradient of this client at z, shape (P,), if the drift requests it."""
    common_gradient: Tensor | None = None
    """The cohort's mean full-batch gradient at z weighted by samples, shape (P,), if the drift requests it."""

    def perturbed(self, point: Tensor) -> Tensor:
        """``point`` shifted by the current perturbation."""
        return point if self.offset is None else point + self.offset

    @property
    def displacement(self) -> Tensor:
        """D = y - z, shape (P,)."""
        return self.y - self.z

    @property
    def mean_direction(self) -> Tensor:
        """u = (z - y) / H: the mean direction of the steps taken so far, in gradient units, shape (P,)."""
        return (self.z - self.y) / self.lr_sum


class CohortMeans(NamedTuple):
    """Averages over the cohort of what its clients sent in a round; vectors have shape (P,)."""

    x: Tensor
    """Server model at the start of the round."""
    z: Tensor
    """Broadcast model."""
    displacement: Tensor
    """Mean displacement D_i, by the aggregation weights."""
    uniform: Tensor
    """Uniform mean of the displacements, for duals and control variates."""
    direction: Tensor
    """Uniform mean of (z - y_K) / H_i: displacements in gradient units."""
    mean: State
    """Means of this slot's messages."""
    share: float
    """Cohort size divided by the number of clients, |S| / N."""
    round: int
    """Round t, counted from 0."""
    common_gradient: Tensor | None = None
    """The cohort's mean full-batch gradient at z, if the drift requests it."""


def unit(v: Tensor) -> Tensor:
    """v / ||v||, with one l2 norm over all P entries; a zero vector stays zero.

    >>> unit(torch.tensor([3.0, 4.0]))
    tensor([0.6000, 0.8000])
    """
    length: Tensor = v.norm()
    return v / (length + 1e-12)


class Slot:
    """Base of drifts, perturbations, learning-rate schedules and server optimisers; stateless unless overridden."""

    def on_server(self) -> Fields:
        """State that the server keeps for this slot."""
        return ()

    def on_client(self) -> Fields:
        """State that each client keeps for this slot between rounds."""
        return ()

    def sends(self) -> Fields:
        """What a client sends for this slot in addition to its displacement."""
        return ()

    def conflict(self, slots: Mapping[str, Slot]) -> str | None:
        """Why this slot cannot be combined with the others, or None if it can.

        Args:
            slots: the algorithm's slots by name: drift, perturbation, lr_schedule, server.
        """
        return None

    def divergence_hint(self) -> str | None:
        """Why this slot may make a run diverge and what to change, if there is a known risk."""
        return None

    def requires_mean(self) -> str | None:
        """Why robust aggregation must not replace the mean of client messages, or None if it may."""
        return None
