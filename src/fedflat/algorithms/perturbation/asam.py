"""ASAM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedflat.algorithms.slot import PERTURB_FROM, Gradient, LocalContext, Perturbation, unit
from fedflat.algorithms.state import State
from fedflat.text import param


@dataclass(frozen=True)
class Asam(Perturbation):
    """Adaptive SAM scales the ascent step by the size of each weight (FedASAM; Caldarola et al. 2022, eq. 5).

        T = |y_k| + eta
        q = T g(y_k)
        e = rho T q / ||q||
        g = g(y_k + e)

    y_k is the client's model before local step k, g(y) the gradient of the batch's loss at y, and e the perturbation. T
    scales the perturbation of each weight by the weight's size; all products are elementwise. For parameter tensors
    whose name does not contain "weight", T is 1 unless ``scope=all``.

    >>> from fedflat.testing import local_context
    >>> asam, ctx = Asam(rho=0.1, eta=0.0), local_context(y=[1.0, -2.0], z=[0.0, 0.0])
    >>> ctx = ctx._replace(local=asam.begin(ctx))
    >>> asam.offset(ctx, gradient=lambda point: point.new([3.0, 2.0]))[0]  # T = [1, 2], q = [3, 4], norm 5
    tensor([0.0600, 0.1600])
    """

    rho: float = param(0.5, "radius of the ascent step in the norm scaled by T", low=0, positional=True)
    eta: float = param(0.2, "constant added to |y_k|, so that small weights are perturbed too", low=0)
    scope: Literal["weight", "all"] = param(
        "weight",
        "parameters scaled by T: those with weight in their name (weight), or all, another common variant (all)",
    )
    perturb_from: Literal["data", "total"] = param("data", PERTURB_FROM)

    @property
    def ascent_passes(self) -> int:
        return 1 if self.rho else 0

    @property
    def uses_drift(self) -> bool:
        return self.perturb_from == "total"

    def begin(self, ctx: LocalContext) -> State:
        """``scaled`` marks the entries of parameters that T scales, shape (P,)."""
        return {"scaled": ctx.layout.indicator(lambda name: self.scope == "all" or "weight" in name, ctx.z)}

    def offset(self, ctx: LocalContext, gradient: Gradient) -> tuple[Tensor | None, State]:
        """The offset e = rho T q / ||q|| with q = T g(y_k), or None if rho is 0; no local state changes.

        ``local["scaled"]`` marks the entries with T = |y_k| + eta; in all others T is 1.
        """
        if self.rho == 0:
            return None, {}
        T = torch.where(ctx.local["scaled"], ctx.y.abs() + self.eta, 1.0)
        return self.rho * T * unit(T * gradient(ctx.y)), {}
