"""FedSCAM: a SAM radius from each client's heterogeneity."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from fedflat.algorithms.perturbation.ascent import AscentStep
from fedflat.algorithms.slot import CohortMeans, Gradient, LocalContext, unit
from fedflat.algorithms.state import Fields, State, scalar, vector
from fedflat.text import param


@dataclass(frozen=True)
class Scam(AscentStep):
    """The radius of SAM is smaller for heterogeneous clients (FedSCAM; Rahil et al. 2026).

        c_i = cos(-g_i, u)
        h_i = mean_b ||g_b|| max(0, 1 - kappa c_i)
        e = rho / (1 + alpha h_i) g(y_k) / ||g(y_k)||
        u <- unit(Delta)

    - g_b, g_i: gradient of batch b at the received model, and their mean over a few batches, before local training
    - u: direction of the last change Delta of the server model, unit(Delta) = Delta / ||Delta||; 0 in the first round
    - c_i: alignment of client i with u; sent, like h_i, for the client weighting ``aligned``
    - h_i: heterogeneity of client i; mean_b is the mean over the batches
    - e: perturbation, i.e. the offset from y_k to the point at which the step's gradient is evaluated
    - y_k: the client's model after k local steps
    - g(y): gradient of the loss on the step's batch at the model y

    >>> from torch import tensor
    >>> from fedflat.algorithms.slot import Pilot
    >>> from fedflat.testing import local_context
    >>> scam, ctx = Scam(rho=0.1), local_context(y=[1.5, 2.0], z=[0.0, 0.0], server={"u": [1.0, 0.0]})
    >>> local = scam.begin(ctx._replace(pilot=Pilot(tensor([3.0, 0.0]), tensor(3.0))))  # uphill along u: c = -1
    >>> local["h"], local["c"], local["radius"]
    (tensor(6.), tensor(-1.), tensor(0.0143))
    >>> scam.offset(ctx._replace(local={"radius": tensor(0.1)}), gradient=lambda point: 2 * point)[0]
    tensor([0.0600, 0.0800])
    """

    rho: float = param(0.05, "largest length of the ascent step", low=0, positional=True)
    alpha: float = param(1.0, "how much the radius shrinks for heterogeneous clients", low=0)
    kappa: float = param(1.0, "how much alignment lowers heterogeneity", low=0)
    batches: int = param(3, "number of batches whose gradients a client computes before local training", low=1)
    pilot: Literal["step", "gradient"] = param("step", "what c_i compares with u: the step -g_i or the gradient g_i")

    @property
    def pilot_batches(self) -> int:
        return self.batches

    def on_server(self) -> Fields:
        return (vector("u"),)

    def sends(self) -> Fields:
        return (scalar("h"), scalar("c"))

    def message_ranges(self, classes: int) -> dict[str, tuple[float, float]]:
        return {"h": (0.0, math.inf), "c": (-1.0, 1.0)}

    def begin(self, ctx: LocalContext) -> State:
        assert ctx.pilot is not None
        direction = unit(ctx.pilot.gradient) if self.pilot == "gradient" else -unit(ctx.pilot.gradient)
        c = direction @ ctx.server["u"]
        h = ctx.pilot.norm * (1 - self.kappa * c).clamp(min=0)
        return {"radius": self.rho / (1 + self.alpha * h), "h": h, "c": c}

    def offset(self, ctx: LocalContext, gradient: Gradient) -> tuple[Tensor | None, State]:
        return (ctx.local["radius"] * unit(gradient(ctx.y)), {}) if self.rho else (None, {})

    def finish(self, ctx: LocalContext) -> tuple[State, State]:
        return {}, {"h": ctx.local["h"], "c": ctx.local["c"]}

    def aggregate(self, means: CohortMeans, server: State, x: Tensor) -> State:
        return {"u": unit(x - means.x)}
