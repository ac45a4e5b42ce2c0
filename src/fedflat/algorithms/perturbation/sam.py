"""SAM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedflat.algorithms.perturbation.ascent import AscentStep
from fedflat.algorithms.slot import PERTURB_FROM, Gradient, LocalContext, Slot, unit
from fedflat.algorithms.state import State
from fedflat.text import param


@dataclass(frozen=True)
class Sam(AscentStep):
    """Each gradient is evaluated after an ascent step of length rho (FedSAM; Caldarola et al. 2022, eqs. 3-4).

        e = rho g(y_k) / ||g(y_k)||
        g = g(y_k + e)

    - e: perturbation, i.e. the offset from y_k to the point at which the gradient is evaluated
    - y_k: the client's model after k local steps
    - g(y): gradient of the loss on the step's batch at the model y
    - g: gradient that the local step uses

    If ``share`` is below 1, as in FedSpeed, the step uses a weighted mean of two gradients: g = (1 - share) g(y_k) +
    share g(y_k + e).

    >>> from fedflat.testing import local_context
    >>> ctx = local_context(y=[1.5, 2.0], z=[0.0, 0.0])
    >>> Sam(rho=0.1).offset(ctx, gradient=lambda point: 2 * point)[0]  # g = [3, 4], norm 5
    tensor([0.0600, 0.0800])
    """

    rho: float = param(0.05, "length of the ascent step", low=0, positional=True)
    share: float = param(1.0, "weight of g(y_k + e) against g(y_k) in g (alpha in FedSpeed)", low=0, high=1)
    normalise: bool = param(True, "whether to scale the ascent step to length rho; otherwise the step is rho g(y_k)")
    perturb_from: Literal["data", "total"] = param("data", PERTURB_FROM)

    @property
    def uses_drift(self) -> bool:
        return self.perturb_from == "total"

    def begin(self, ctx: LocalContext) -> State:
        return {} if self.share == 1 else {"ascent": torch.zeros_like(ctx.z)}

    def offset(self, ctx: LocalContext, gradient: Gradient) -> tuple[Tensor | None, State]:
        """Return e, or None if rho is 0; if ``share`` is below 1, g(y_k) is kept as ``ascent`` for ``blend``."""
        if self.rho == 0:
            return None, {}
        g = gradient(ctx.y)
        offset = self.rho * (unit(g) if self.normalise else g)
        return offset, {} if self.share == 1 else {"ascent": g}

    def blend(self, g: Tensor, ctx: LocalContext) -> Tensor:
        if self.share == 1 or self.rho == 0:  # with rho = 0 both gradients are the same, and ``offset`` kept none
            return g
        return (1 - self.share) * ctx.local["ascent"] + self.share * g

    def conflict(self, slots: Mapping[str, Slot]) -> str | None:
        if self.share == 1 or self.perturb_from == "data":
            return None
        return "share below 1 blends data gradients and would add the drift correction twice; use perturb_from=data"
