"""Building blocks shared by all slots: declared state, the context of a local step, and the cohort's averaged results.

A slot is written for one client and works on flat vectors of P numbers, P being the number of trained parameters.
It declares its state field by field, so that engines can store, send and count it. The server uses only averages of
client messages, so an engine may form partial sums on any worker.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

from torch import Tensor

from fedflat.algorithms.state import Fields, State
from fedflat.algorithms.teacher import Teacher
from fedflat.models.layout import Layout

Gradient = Callable[[Tensor], Tensor]
"""Maps a point of shape (P,) to the gradient of the current batch's loss there; each call is one backward pass."""


TINY_LR = 1e-12
"""Divisor in place of a learning rate of 0, with which no step moves the model."""


class Pilot(NamedTuple):
    """Gradients of a few of a client's batches at the model from which it starts."""

    gradient: Tensor
    """Mean of the gradients, shape (P,)."""
    norm: Tensor
    """Mean of their l2 norms, shape ()."""


class LocalContext(NamedTuple):
    """Everything that a slot can see during a client's round.

    Quantities that change between steps are tensors, so that an engine can capture a step as a CUDA graph.
    """

    y: Tensor
    """Current model y_k of the client, shape (P,)."""
    z: Tensor
    """Model from which the client started, shape (P,): the received one, unless the client has a start of its own."""
    server: State
    """The part of this slot's server state that is sent to clients."""
    client: State
    """State that the client keeps for this slot between rounds."""
    local: State
    """State of this slot within the round: created by ``begin`` and updated by every step."""
    drift: State
    """The drift slot's ``local`` state, which a perturbation may read."""
    step: Tensor
    """Number k of the current step, counted from 0, shape ()."""
    steps: Tensor
    """Number of local steps K of this client in this round, shape ()."""
    lr_sum: Tensor
    """Sum H of the learning rates of the steps taken so far in this round, shape ()."""
    first_lr: Tensor
    """Learning rate of step 0, shape ()."""
    next_lr: Tensor
    """Learning rate that the schedule gives after the last step, i.e. for step K (steps count from 0), shape ()."""
    round: Tensor
    """Number t of the round, counted from 0, shape ()."""
    layout: Layout
    """Names and shapes of the parameters in a flat vector."""
    offset: Tensor | None = None
    """Perturbation e_k of the current step, shape (P,); None if there is none, or before it has been computed."""
    own_gradient: Tensor | None = None
    """Full-batch gradient of this client at z, shape (P,); None unless the drift correction requests it."""
    common_gradient: Tensor | None = None
    """Mean of the cohort's full-batch gradients at z, weighted by samples, shape (P,); None unless requested."""
    received: Tensor | None = None
    """Broadcast model, shape (P,), if the client starts from a model z of its own; else None. See ``broadcast``."""
    pilot: Pilot | None = None
    """Gradients of a few batches; only in the perturbation's ``begin``, and None unless it requests them."""

    def changed(self, **values: Any) -> LocalContext:
        """Return a copy with other values in some fields; unlike ``_replace``, torch 2.6 can compile this."""
        fields: dict[str, Any] = {name: values.get(name, old) for name, old in zip(_CONTEXT_FIELDS, self, strict=True)}
        return LocalContext(**fields)

    def perturbed(self, point: Tensor) -> Tensor:
        """Return ``point`` of shape (P,), shifted by the current perturbation."""
        return point if self.offset is None else point + self.offset

    @property
    def broadcast(self) -> Tensor:
        """Model that all clients received, shape (P,): z, unless the client starts from a model of its own."""
        return self.z if self.received is None else self.received

    @property
    def effective_steps(self) -> Tensor:
        """Effective steps a so far, shape (), if the drift requests them (``Drift.counts_effective_steps``).

        They are the distance that the local optimiser moves if every gradient is 1, divided by ``first_lr``.
        """
        return -self.local["unit"] / self.first_lr.clamp(min=TINY_LR)

    @property
    def displacement(self) -> Tensor:
        """Displacement D = y - z of the client's model so far, shape (P,)."""
        return self.y - self.z

    @property
    def mean_direction(self) -> Tensor:
        """Mean direction (z - y) / H of the steps taken so far, in units of gradients, shape (P,)."""
        return (self.z - self.y) / self.lr_sum.clamp(min=TINY_LR)


_CONTEXT_FIELDS = LocalContext._fields  # torch 2.6 cannot compile the attribute


class CohortMeans(NamedTuple):
    """Averages over the cohort of what its clients sent in a round; vectors have shape (P,)."""

    x: Tensor
    """Server model at the start of the round."""
    z: Tensor
    """Model that the server broadcast at the start of the round."""
    displacement: Tensor
    """Mean of the clients' displacements D_i, weighted by the aggregation weights."""
    uniform: Tensor
    """Uniform mean of the displacements, which duals and control variates need."""
    direction: Tensor
    """Uniform mean of (z - y_K) / H_i, where H_i is the sum of the learning rates of client i's K steps."""
    mean: State
    """Means of the messages that clients sent for this slot, by name."""
    share: float
    """Cohort size divided by the number of clients, |S| / N."""
    cohort_size: int
    """Number of clients in the cohort, |S|."""
    round: int
    """Number t of the round, counted from 0."""
    normalised: Tensor | None = None
    """Mean of D_i / a_i, weighted like ``displacement``, a_i being ``Drift.displacement_divisor``; None without one."""
    common_gradient: Tensor | None = None
    """Mean of the cohort's full-batch gradients at z; None unless the drift correction requests it."""


def unit(v: Tensor) -> Tensor:
    """Return ``v`` of shape (P,) scaled to l2 norm 1; a zero vector stays zero.

    >>> from torch import tensor
    >>> unit(tensor([3.0, 4.0]))
    tensor([0.6000, 0.8000])
    """
    length: Tensor = v.norm()
    return v / (length + 1e-12)


class Slot:
    """Base class of an algorithm's components, which fill its slots.

    The components are drift corrections, perturbations, learning-rate schedules, local optimisers, server optimisers,
    starts of local training and client weights. By default a component keeps no state and sends no messages.
    """

    def on_server(self) -> Fields:
        """Declare the state that the server keeps for this slot."""
        return ()

    def on_client(self) -> Fields:
        """Declare the state that each client keeps for this slot between rounds."""
        return ()

    def sends(self) -> Fields:
        """Declare what a client sends for this slot in addition to its displacement."""
        return ()

    def message_ranges(self, classes: int) -> dict[str, tuple[float, float]]:
        """Return the smallest and largest value that an honest client can send, by message; {} if there are no bounds.

        A server of real sites rejects other values. ``classes`` is the number of classes of the task.
        """
        return {}

    def conflict(self, slots: Mapping[str, Slot]) -> str | None:
        """Return why this component cannot be combined with the algorithm's other components, or None if it can.

        Args:
            slots: all components of the algorithm by slot, e.g. ``drift``.
        """
        return None

    @property
    def needs_teacher(self) -> bool:
        """Whether ``teacher`` returns a teacher; the task must then have logits."""
        return False

    def teacher(self, ctx: LocalContext) -> Teacher | None:
        """Return the teacher from which a local step distils, or None; only drifts and perturbations can have one.

        A drift's teacher adds a term to the client's loss and therefore to all gradients of a step. A perturbation's
        teacher changes only the gradients from which the offset is computed.
        """
        return None

    def divergence_hint(self) -> str | None:
        """Return why this slot may make a run diverge and what to change, or None if no risk is known."""
        return None

    def robust_aggregation_conflict(self) -> str | None:
        """Return why robust aggregation must not replace the mean of client messages, or None if it may."""
        return None

    def asynchronous_conflict(self) -> str | None:
        """Return why clients must not start from different versions of the server model, or None if they may.

        Under an asynchronous policy, ``CohortMeans`` describes a buffer of updates: displacements are scaled by
        staleness weights, directions are averaged with these weights, messages are plain means, and ``x``, ``z`` and
        ``round`` are the current ones.
        """
        return None

    def privacy_conflict(self, equal_steps: bool) -> str | None:
        """Return why clipping and noise do not suit this slot, or None, given whether step counts are equal."""
        for field in self.sends():
            if not field.vector:
                return f"clients also send the number {field.name}, which cannot be clipped together with their update"
            if field.weighting == "samples":
                return f"clients also send {field.name}, which the server weights by their number of examples"
        return None

    @property
    def relative_messages(self) -> Mapping[str, str]:
        """Messages that are differences to a server vector, by name, and the name of that vector.

        An asynchronous server makes the messages of late clients relative to its current vector.
        """
        return {}


FullGradient = Literal["none", "own", "common"]


@dataclass(frozen=True)
class Drift(Slot):
    """By default, there is no drift correction: local steps follow the gradient (FedAvg; McMahan et al. 2017).

        d_k = g
        target = z + mean_S D_i

    - d_k: direction of local step k
    - g: gradient of the loss on the step's batch
    - target: model towards which the server moves, here the mean of the clients' models after local training
    - z: broadcast model, from which clients start
    - D_i: displacement y_K - y_0 of client i in the round, where K is its number of local steps
    - mean_S: mean over the round's cohort S

    >>> from torch import tensor
    >>> from fedflat.testing import cohort_means
    >>> means = cohort_means(z=[1.0, 2.0], displacement=[0.1, -0.1])
    >>> Drift().aggregate(means, {})
    (tensor([1.1000, 1.9000]), {})
    """

    NEEDS_SGD: ClassVar = "displacements divided by learning rates are gradients only after SGD steps"
    """Why a drift correction that divides displacements by H needs SGD as the local optimiser."""

    @property
    def full_gradient(self) -> FullGradient:
        """Which full-batch gradient at the broadcast model z a client needs before local training.

        ``own`` is the gradient on the client's own data, ``common`` the mean of these gradients over the cohort, and
        ``none`` means that no such gradient is needed.
        """
        return "none"

    @property
    def full_gradient_batches(self) -> int:
        """Number of batches over which the full-batch gradient is computed; 0 uses all of the client's data."""
        return 0

    @property
    def extra_passes(self) -> int:
        """Number of backward passes per local step in addition to the one that computes the gradient g."""
        return 0

    @property
    def counts_effective_steps(self) -> bool:
        """Whether ``LocalContext.effective_steps`` is needed."""
        return False

    @property
    def displacement_divisor(self) -> str | None:
        """Name of the message by which displacements are divided in ``CohortMeans.normalised``; None if not needed."""
        return None

    def start(self, x: Tensor, server: State) -> Tensor:
        """Return the model z to broadcast, shape (P,), given the server model ``x`` and this slot's server state."""
        return x

    def begin(self, ctx: LocalContext) -> State:
        """Return the client's state for this round, e.g. a correction that stays constant during the round."""
        return {}

    def direction(self, g: Tensor, ctx: LocalContext, gradient: Gradient) -> Tensor:
        """Return the direction d_k of a local step, shape (P,).

        Args:
            g: gradient of the current batch at the perturbed model, shape (P,).
            ctx: the client's context; ``ctx.y`` is its model, without the perturbation.
            gradient: function that computes the current batch's gradient at a point, one backward pass per call.
        """
        return g

    def displacement(self, ctx: LocalContext) -> Tensor:
        """Return the vector of shape (P,) that the client uploads and the server averages; by default D = y_K - z."""
        return ctx.displacement

    def local_displacement(self, uploaded: Tensor, client: State) -> Tensor:
        """Recover y_K - z, shape (P,), from the uploaded vector and the client's state before the round."""
        return uploaded

    def finish(self, ctx: LocalContext) -> tuple[State, State]:
        """Return the changed client state after the last step, and the messages to send along with the displacement."""
        return {}, {}

    def aggregate(self, means: CohortMeans, server: State) -> tuple[Tensor, State]:
        """Return the target that the server optimiser moves towards, shape (P,), and the changed server state."""
        return means.z + means.displacement, {}

    def sgd_conflict(self, optimiser: str) -> str | None:
        """Return why local steps must be those of SGD, or None if another local optimiser may take them.

        Args:
            optimiser: name of the local optimiser, for the text that the message suggests.
        """
        return None

    def after_server_step(self, x: Tensor, server: State) -> State:
        """Return the changed server state, given the new server model ``x`` and the state after ``aggregate``."""
        return {}

    def evaluated(self, server: State) -> State:
        """Return further models to evaluate along with the server model, by name, made from the server state."""
        return {}


LARGE_RHO = 10
"""A perturbation radius above every published value; runs with a larger one get a divergence hint."""
PERTURB_FROM = "direction of the ascent step: the data gradient (data) or the drift-corrected direction (total)"


@dataclass(frozen=True)
class Perturbation(Slot):
    """By default, there is no perturbation: gradients are evaluated at the client's model y_k."""

    @property
    def ascent_passes(self) -> int:
        """Number of backward passes per local step that are needed to compute the perturbation, i.e. the offset e."""
        return 0

    @property
    def pilot_batches(self) -> int:
        """Number of batches whose gradients at z a client computes before local training; 0 if none are needed."""
        return 0

    @property
    def uses_drift(self) -> bool:
        """Whether the offset is computed from drift-corrected directions instead of data gradients."""
        return False

    def divergence_hint(self) -> str | None:
        """Return why a radius ``rho`` above 10 may make a run diverge, or None if it is smaller or not a parameter."""
        rho = getattr(self, "rho", 0)
        return f"rho={rho:g} evaluates gradients far from the model; lower it" if rho > LARGE_RHO else None

    def begin(self, ctx: LocalContext) -> State:
        """Return the client's state for this round, at the start of the round."""
        return {}

    def offset(self, ctx: LocalContext, gradient: Gradient) -> tuple[Tensor | None, State]:
        """Return the offset e_k from the client's model y_k at which the gradient of a local step is evaluated.

        Args:
            ctx: the client's context.
            gradient: function that computes the current batch's gradient at a point, one backward pass per call.

        Returns:
            The offset of shape (P,), or None for no offset; and the fields of the local state that changed.
        """
        return None, {}

    def blend(self, g: Tensor, ctx: LocalContext) -> Tensor:
        """Return the gradient that the drift correction receives; ``g`` is that at the perturbed point, shape (P,)."""
        return g

    def finish(self, ctx: LocalContext) -> tuple[State, State]:
        """Return the changed client state after the last local step, and this slot's messages to the server."""
        return {}, {}

    def aggregate(self, means: CohortMeans, server: State, x: Tensor) -> State:
        """Return the changed server state, from the cohort's means; ``x`` is the new server model, shape (P,)."""
        return {}
