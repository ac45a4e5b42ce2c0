"""ASAM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedflat.algorithms.perturbation.ascent import AscentStep
from fedflat.algorithms.slot import PERTURB_FROM, Gradient, LocalContext, unit
from fedflat.algorithms.state import State
from fedflat.text import param


@dataclass(frozen=True)
class Asam(AscentStep):
    """Adaptive SAM scales the ascent step by the magnitude of each weight (FedASAM; Caldarola et al. 2022, eq. 5).

        T = |y_k| + eta
        r = T g(y_k)
        e = rho T r / ||r||
        g = g(y_k + e)

    - T: scale of each weight's perturbation
    - eta: small constant, so that weights near 0 are perturbed too; here it is not the learning rate
    - y_k: the client's model after k local steps
    - g(y): gradient of the loss on the step's batch at the model y
    - e: perturbation, i.e. the offset from y_k to the point at which the gradient is evaluated
    - g: gradient that the local step uses

    Products are elementwise. For parameter tensors whose name does not contain "weight", T is 1 unless ``scope=all``.
    In a model without such names, T scales the tensors with at least two dimensions.

    >>> from fedflat.testing import local_context
    >>> asam, ctx = Asam(rho=0.1, eta=0.0), local_context(y=[1.0, -2.0], z=[0.0, 0.0])
    >>> ctx = ctx._replace(local=asam.begin(ctx))
    >>> asam.offset(ctx, gradient=lambda point: point.new([3.0, 2.0]))[0]  # T = [1, 2], r = [3, 4], norm 5
    tensor([0.0600, 0.1600])
    """

    rho: float = param(0.5, "radius of the ascent step in the norm scaled by T", low=0, positional=True)
    eta: float = param(0.2, "constant added to |y_k|, so that weights near 0 are perturbed too", low=0)
    scope: Literal["weight", "all"] = param(
        "weight",
        "parameters that T scales: those with weight in their name or, if there are none, with at least two dimensions "
        "(weight), or every parameter (all)",
    )
    perturb_from: Literal["data", "total"] = param("data", PERTURB_FROM)

    @property
    def uses_drift(self) -> bool:
        return self.perturb_from == "total"

    def begin(self, ctx: LocalContext) -> State:
        """Return a boolean vector ``scaled`` of shape (P,), true for the entries that T scales."""
        if self.scope == "all":
            return {"scaled": ctx.layout.indicator(lambda name: True, ctx.z)}
        return {"scaled": ctx.layout.weight_indicator(ctx.z)}

    def offset(self, ctx: LocalContext, gradient: Gradient) -> tuple[Tensor | None, State]:
        if self.rho == 0:
            return None, {}
        T = torch.where(ctx.local["scaled"], ctx.y.abs() + self.eta, 1.0)
        return self.rho * T * unit(T * gradient(ctx.y)), {}
