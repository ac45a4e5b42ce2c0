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
    """The declaration of one vector or scalar that a slot keeps or sends."""

    name: str
    """Key of this entry in the state."""
    vector: bool = True
    """Whether it is a vector of shape (P,) instead of a scalar."""
    start: float | Literal["model"] = 0.0
    """Initial value of every entry; ``"model"`` starts as a copy of the initial model."""
    sent: bool = True
    """For server state: whether clients receive it."""
    by_samples: bool = False
    """For messages: whether their mean is weighted by sample counts instead of uniform."""
    momentum: Literal["ascent", "descent"] | None = None
    """For server state: marks the slot's momentum, in gradient units (ascent) or displacement units (descent)."""

    def new(self, x: Tensor) -> Tensor:
        """The field's initial value: a copy of the initial model ``x`` of shape (P,), or ``start`` in every entry."""
        if self.start == "model":
            return x.clone()
        if self.vector:
            return torch.full_like(x, self.start)
        return torch.full((), self.start, dtype=x.dtype, device=x.device)

    def scalars(self, size: int) -> int:
        """Number of values that this field holds for a model of ``size`` parameters."""
        return size if self.vector else 1


def vector(
    name: str,
    *,
    start: float | Literal["model"] = 0.0,
    sent: bool = True,
    by_samples: bool = False,
    momentum: Literal["ascent", "descent"] | None = None,
) -> Field:
    """Declare a vector of shape (P,) that a slot keeps or sends.

    Args:
        name: key of the vector in the state.
        start: initial value of every entry; ``"model"`` starts as a copy of the initial model.
        sent: for server state, whether clients receive it.
        by_samples: for messages, whether to average by sample counts instead of uniformly.
        momentum: for server state, marks a momentum, in units of gradients (ascent) or displacements (descent).
    """
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
    """Sample-weighted mean of the cohort's full-batch gradients at z, shape (P,), if the drift requests it."""

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
    """What the clients of a round sent, averaged over the cohort; vectors have shape (P,)."""

    x: Tensor
    """Server model at the start of the round."""
    z: Tensor
    """Broadcast model."""
    displacement: Tensor
    """Mean of the displacements D_i, weighted by the aggregation weights."""
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
    """``v`` of shape (P,) scaled to l2 norm 1; a zero vector stays zero.

    >>> unit(torch.tensor([3.0, 4.0]))
    tensor([0.6000, 0.8000])
    """
    length: Tensor = v.norm()
    return v / (length + 1e-12)


class Slot:
    """Base class of an algorithm's components, which fill its slots.

    These are drift corrections, perturbations, learning-rate schedules and server optimisers. By default a component
    keeps no state and sends no messages.
    """

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
        """Return why this component cannot be combined with the algorithm's other ones, or None if it can.

        Args:
            slots: all components of the algorithm by slot: drift, perturbation, lr_schedule, server.
        """
        return None

    def divergence_hint(self) -> str | None:
        """Return why this slot may make a run diverge and what to change, or None if no risk is known."""
        return None

    def robust_aggregation_conflict(self) -> str | None:
        """Return why robust aggregation must not replace the mean of client messages, or None if it may."""
        return None


FullGradient = Literal["none", "own", "common"]


@dataclass(frozen=True)
class Drift(Slot):
    """No drift correction (FedAvg; McMahan et al. 2017).

        d_k = g
        target = z + mean_S D_i

    d_k is the direction of local step k and g the gradient of its batch. The target is what the server moves towards: z
    is the broadcast model, D_i = y_K - z the displacement of client i, and mean_S the mean over the cohort S.

    >>> from torch import tensor
    >>> from fedflat.testing import cohort_means
    >>> means = cohort_means(z=[1.0, 2.0], displacement=[0.1, -0.1])
    >>> Drift().aggregate(means, {})
    (tensor([1.1000, 1.9000]), {})
    """

    @property
    def full_gradient(self) -> FullGradient:
        """Which full-batch gradient at the broadcast model z a client needs before local training.

        ``own``: that of its own data; ``common``: the mean of these gradients over the cohort; ``none``: neither.
        """
        return "none"

    @property
    def full_gradient_batches(self) -> int:
        """Number of batches over which the full-batch gradient is computed; 0 uses all of the client's data."""
        return 0

    @property
    def extra_passes(self) -> int:
        """Backward passes per local step in addition to the one that computes the gradient g."""
        return 0

    def start(self, x: Tensor, server: State) -> Tensor:
        """The model z to broadcast, shape (P,), from the server model ``x`` and this slot's server state."""
        return x

    def begin(self, ctx: LocalContext) -> State:
        """State of a client within one round, at its start, e.g. a correction that stays constant in the round."""
        return {}

    def direction(self, g: Tensor, ctx: LocalContext, gradient: Gradient) -> Tensor:
        """The direction d_k of a local step, shape (P,).

        Args:
            g: gradient of the current batch at the perturbed model, shape (P,).
            ctx: the client's context; ``ctx.y`` is its model, without the perturbation.
            gradient: gradient of the current batch at any point, one backward pass per call.
        """
        return g

    def displacement(self, ctx: LocalContext) -> Tensor:
        """The vector that the client uploads and the server averages; by default D = y_K - z, shape (P,)."""
        return ctx.displacement

    def local_displacement(self, uploaded: Tensor, client: State) -> Tensor:
        """y_K - z recovered from the uploaded vector and the client's state before the round, shape (P,)."""
        return uploaded

    def finish(self, ctx: LocalContext) -> tuple[State, State]:
        """After the last local step: changed client state, and messages sent in addition to the displacement."""
        return {}, {}

    def aggregate(self, means: CohortMeans, server: State) -> tuple[Tensor, State]:
        """The target model that the server optimiser moves towards, shape (P,), and the changed server state."""
        return means.z + means.displacement, {}

    def evaluated(self, server: State) -> State:
        """Further models by name, made from the server state, to evaluate along with the server model."""
        return {}


LARGE_RHO = 10
"""A perturbation radius beyond every published value."""
PERTURB_FROM = "data: ascend along the data gradient; total: along the drift-corrected direction"


@dataclass(frozen=True)
class Perturbation(Slot):
    """No perturbation: gradients are evaluated at the client's model y_k itself, not at y_k + e.

    e = 0
    """

    @property
    def ascent_passes(self) -> int:
        """Backward passes per local step that are needed to compute the offset e."""
        return 0

    @property
    def uses_drift(self) -> bool:
        """Whether the offset is computed from drift-corrected directions instead of data gradients."""
        return False

    def divergence_hint(self) -> str | None:
        """Why a radius ``rho`` above 10 may make a run diverge; None if it is smaller or there is no radius."""
        rho = getattr(self, "rho", 0)
        return f"rho={rho:g} evaluates gradients far from the model; lower it" if rho > LARGE_RHO else None

    def begin(self, ctx: LocalContext) -> State:
        """State of a client within one round, at its start."""
        return {}

    def offset(self, ctx: LocalContext, gradient: Gradient) -> tuple[Tensor | None, State]:
        """The offset e_k from the client's model y_k at which the gradient of a local step is evaluated.

        Args:
            ctx: the client's context.
            gradient: gradient of the current batch at any point, one backward pass per call.

        Returns:
            The offset of shape (P,), or None for no offset; and the fields of the local state that changed.
        """
        return None, {}

    def blend(self, g: Tensor, ctx: LocalContext) -> Tensor:
        """The gradient to pass to the drift correction, given the gradient ``g`` at the perturbed point, shape (P,)."""
        return g

    def finish(self, ctx: LocalContext) -> tuple[State, State]:
        """After the last local step: changed client state, and messages of this slot."""
        return {}, {}

    def aggregate(self, means: CohortMeans, server: State, x: Tensor) -> State:
        """Changed server state of this slot, from the cohort's means; ``x`` is the new server model, shape (P,)."""
        return {}
