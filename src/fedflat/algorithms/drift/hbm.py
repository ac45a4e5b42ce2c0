"""GHBM, LocalGHBM and FedHBM: heavy-ball momentum over several rounds, in local steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from fedflat.algorithms.server import Sgd
from fedflat.algorithms.slot import TINY_LR, CohortMeans, Drift, Gradient, LocalContext, Slot
from fedflat.algorithms.state import Fields, State, scalar, vector
from fedflat.text import param


@dataclass(frozen=True)
class HeavyBall(Drift):
    """Base class of drifts that add a heavy-ball momentum, the difference of two models, to each local step."""

    beta: float = param(0.9, "weight of the momentum in the sum of a round's local steps", low=0)

    def _per_step(self, difference: Tensor, ctx: LocalContext) -> Tensor:
        """Return what each of the K local steps adds to its gradient.

        Together, steps with the learning rate of the first one move by -beta ``difference``.
        """
        return self.beta * difference / (ctx.first_lr.clamp(min=TINY_LR) * ctx.steps)

    def conflict(self, slots: Mapping[str, Slot]) -> str | None:
        """Return an error message unless the server optimiser in ``slots`` is SGD; others may have momentum, too."""
        if type(slots["server"]) is Sgd:
            return None
        return "GHBM, LocalGHBM and FedHBM have their own momentum and allow only the server optimiser sgd"

    def sgd_conflict(self, optimiser: str) -> str | None:
        return f"the momentum is scaled for SGD steps; use one without momentum, e.g. fedprox+{optimiser}"

    def divergence_hint(self) -> str | None:
        return f"heavy-ball momentum beta={self.beta:g} amplifies displacements; lower beta or the learning rate"


@dataclass(frozen=True)
class Ghbm(HeavyBall):
    """Local steps follow a momentum over the last tau rounds (GHBM; Zaccone et al. 2025).

        m = (x_old - z) / tau
        d_k = g + beta m / (eta K)

    - m: momentum, which points uphill like a gradient; 0 in the first tau rounds
    - z: broadcast model
    - x_old: server model tau rounds ago
    - d_k: direction of local step k
    - g: gradient of the loss on the step's batch
    - eta: learning rate of the round's first step
    - K: number of local steps in a round

    At a constant learning rate, all steps of a round together move the model by -beta m; if the learning rate falls
    within the round, they move it less. If tau is the number of clients divided by the number of clients per round, the
    last tau rounds cover about all clients. The server keeps its last tau models.

    >>> from torch import tensor
    >>> from fedflat.testing import local_context
    >>> ghbm, old = Ghbm(beta=0.5, tau=2), {"old": [1.4, 0.6]}
    >>> ctx = local_context(y=[1.0, 3.0], z=[1.0, 1.0], server=old, steps=2, lr=0.1, round=2)
    >>> ghbm.direction(tensor([0.1, 0.1]), ctx._replace(local=ghbm.begin(ctx)), None)  # m = [0.2, -0.2]
    tensor([ 0.6000, -0.4000])
    """

    tau: int = param(
        10, "rounds over which the momentum averages, ideally clients / clients_per_round", low=1, high=10_000
    )

    def on_server(self) -> Fields:
        """Declare the last tau server models: ``x1``, ``x2``, ... by age, and ``old``, which clients receive."""
        newer = (vector(f"x{age}", start="model", sent=False) for age in range(self.tau - 1, 0, -1))
        return (vector("old", start="model"), *newer)

    def begin(self, ctx: LocalContext) -> State:
        momentum = (ctx.round >= self.tau) * (ctx.server["old"] - ctx.broadcast) / self.tau
        return {"momentum": self._per_step(momentum, ctx)}

    def direction(self, g: Tensor, ctx: LocalContext, gradient: Gradient) -> Tensor:
        return g + ctx.local["momentum"]

    def aggregate(self, means: CohortMeans, server: State) -> tuple[Tensor, State]:
        """Return the target z + mean_S D_i; every kept model ages by one round, and the newest is x."""
        names = [field.name for field in self.on_server()]  # from the oldest to the newest
        aged = dict(zip(names, [*(server[name] for name in names[1:]), means.x], strict=True))
        return means.z + means.displacement, aged


@dataclass(frozen=True)
class Anchored(HeavyBall):
    """Base class of drifts that compute the momentum from a model that the client keeps between participations."""

    participation: float = param(
        0.1, "share C of the clients that participate in a round, i.e. clients_per_round / clients", above=0, high=1
    )
    first_anchor: Literal["absent", "initial"] = param(
        "absent", "momentum when a client first participates: none (absent), or from the initial model (initial)"
    )

    def on_client(self) -> Fields:
        return (vector("last", start="model"), scalar("seen", start=float(self.first_anchor == "initial")))

    def _momentum(self, model: Tensor, ctx: LocalContext) -> Tensor:
        """Return what a step adds to its gradient for the momentum C (last - model).

        It is zero until the client has participated once (``seen``), unless ``first_anchor=initial``.
        """
        since_last = ctx.client["seen"] * (ctx.client["last"] - model)
        return self._per_step(self.participation * since_last, ctx)


@dataclass(frozen=True)
class LocalGhbm(Anchored):
    """Each client estimates GHBM's momentum from the models it received (LocalGHBM; Zaccone et al. 2025).

        m_i = C (z_last - z)
        d_k = g + beta m_i / (eta K)

    - m_i: momentum of client i, which points uphill like a gradient; 0 when the client participates for the first time
    - z: broadcast model
    - z_last: model that the client received when it last participated
    - C: share of the clients that participate in a round (``participation``)
    - d_k: direction of local step k
    - g: gradient of the loss on the step's batch
    - eta: learning rate of the round's first step
    - K: number of local steps in a round

    >>> from torch import tensor
    >>> from fedflat.testing import local_context
    >>> ghbm, client = LocalGhbm(beta=0.5, participation=0.5), {"last": [1.4, 0.6], "seen": 1.0}
    >>> ctx = local_context(y=[1.0, 3.0], z=[1.0, 1.0], client=client, steps=2, lr=0.1)
    >>> ghbm.direction(tensor([0.1, 0.1]), ctx._replace(local=ghbm.begin(ctx)), None)  # m_i = [0.2, -0.2]
    tensor([ 0.6000, -0.4000])
    """

    def begin(self, ctx: LocalContext) -> State:
        return {"momentum": self._momentum(ctx.broadcast, ctx)}

    def direction(self, g: Tensor, ctx: LocalContext, gradient: Gradient) -> Tensor:
        return g + ctx.local["momentum"]

    def finish(self, ctx: LocalContext) -> tuple[State, State]:
        return {"last": ctx.broadcast, "seen": ctx.lr_sum.new_ones(())}, {}


@dataclass(frozen=True)
class Hbm(Anchored):
    """A client's momentum is the distance to its model at the end of its last round (FedHBM; Zaccone et al. 2025).

        m_k = C (y_last - y_k)
        d_k = g + beta m_k / (eta K)

    - m_k: momentum of the client in local step k, which points uphill like a gradient; 0 when the client participates
      for the first time
    - y_k: the client's model after k local steps
    - y_last: the client's model at the end of its previous participation
    - C: share of the clients that participate in a round (``participation``)
    - d_k: direction of local step k
    - g: gradient of the loss on the step's batch
    - eta: learning rate of the round's first step
    - K: number of local steps in a round

    The momentum pushes the client's model away from y_last. It has the form of FedProx's proximal term, with the
    opposite sign.

    >>> from torch import tensor
    >>> from fedflat.testing import local_context
    >>> ctx = local_context(
    ...     y=[1.0, 3.0], z=[1.0, 1.0], client={"last": [1.4, 2.6], "seen": 1.0}, steps=2, lr=0.1
    ... )
    >>> Hbm(beta=0.5, participation=0.5).direction(tensor([0.1, 0.1]), ctx, None)  # m_k = [0.2, -0.2]
    tensor([ 0.6000, -0.4000])
    """

    def direction(self, g: Tensor, ctx: LocalContext, gradient: Gradient) -> Tensor:
        return g + self._momentum(ctx.y, ctx)

    def finish(self, ctx: LocalContext) -> tuple[State, State]:
        return {"last": ctx.y, "seen": ctx.lr_sum.new_ones(())}, {}
