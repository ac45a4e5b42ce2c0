"""SAM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedflat.algorithms.slot import PERTURB_FROM, Gradient, LocalContext, Perturbation, Slot, unit
from fedflat.algorithms.state import State
from fedflat.text import param


@dataclass(frozen=True)
class Sam(Perturbation):
    """Each gradient is evaluated after an ascent step of length rho (FedSAM; Caldarola et al. 2022, eqs. 3-4).

        e = rho g(y_k) / ||g(y_k)||
        g = g(y_k + e)

    y_k is the client's model before local step k, and g(y) the gradient of the batch's loss at y. If ``share``
    is below 1 (as in FedSpeed), the step uses a weighted mean of two gradients: g = (1 - share) g(y_k) +
    share g(y_k + e).

    >>> from fedflat.testing import local_context
    >>> ctx = local_context(y=[1.5, 2.0], z=[0.0, 0.0])
    >>> Sam(rho=0.1).offset(ctx, gradient=lambda point: 2 * point)[0]  # g = [3, 4], norm 5
    tensor([0.0600, 0.0800])
    """

    rho: float = param(0.05, "length of the ascent step", low=0, positional=True)
    share: float = param(1.0, "weight of the perturbed gradient in the mean of both (alpha in FedSpeed)", low=0, high=1)
    normalise: bool = param(True, "whether to scale the ascent step to length rho; otherwise the step is rho g(y_k)")
    perturb_from: Literal["data", "total"] = param("data", PERTURB_FROM)

    @property
    def ascent_passes(self) -> int:
        return 1 if self.rho else 0

    @property
    def uses_drift(self) -> bool:
        return self.perturb_from == "total"

    def begin(self, ctx: LocalContext) -> State:
        return {} if self.share == 1 else {"ascent": torch.zeros_like(ctx.z)}

    def offset(self, ctx: LocalContext, gradient: Gradient) -> tuple[Tensor | None, State]:
        """The offset e = rho g(y_k) / ||g(y_k)||, or None if rho is 0, and the local state that changes.

        With ``normalise=False``, e is rho g(y_k). If ``share`` is below 1, g(y_k), the gradient at the client's model,
        is kept for ``blend``.
        """
        if self.rho == 0:
            return None, {}
        g = gradient(ctx.y)
        offset = self.rho * (unit(g) if self.normalise else g)
        return offset, {} if self.share == 1 else {"ascent": g}

    def blend(self, g: Tensor, ctx: LocalContext) -> Tensor:
        """(1 - share) g(y_k) + share g(y_k + e), where ``g`` is g(y_k + e), the gradient at the perturbed point."""
        if self.share == 1 or self.rho == 0:  # with rho = 0 both gradients are the same, and ``offset`` kept none
            return g
        return (1 - self.share) * ctx.local["ascent"] + self.share * g

    def conflict(self, slots: Mapping[str, Slot]) -> str | None:
        """Why ``share`` and ``perturb_from`` contradict each other; None if they do not. ``slots`` do not matter."""
        if self.share == 1 or self.perturb_from == "data":
            return None
        return "share below 1 blends data gradients and would add the drift correction twice; use perturb_from=data"
