"""FedSOL."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fedflat.algorithms.slot import Gradient, LocalContext, Perturbation, unit
from fedflat.algorithms.state import State
from fedflat.algorithms.teacher import Teacher
from fedflat.text import param


@dataclass(frozen=True)
class Sol(Perturbation):
    """Gradients are evaluated where the predictions differ more from the received model's (FedSOL; Lee et al. 2024).

        q = grad(KL(p_z, p_y))
        e = rho n(|y_k - z|) q / ||q||
        g = g(y_k + e)

    y_k is the client's model before local step k, z the model that the client received, and g(y) the gradient of the
    batch's loss at y. q is the gradient at y_k of the mean Kullback-Leibler divergence between the predictions of z and
    of y on the same batch, where p is the softmax of the logits divided by tau. The perturbation e is scaled
    elementwise: n divides each tensor of the model by its l2 norm along the first dimension, e.g. each column of a
    matrix. With ``adaptive=False``, e is rho q / ||q||. The first step of a round, in which y_k = z and q = 0, has no
    perturbation. A step costs an additional forward pass of z, and the task must have logits.

    >>> from fedflat.testing import local_context
    >>> ctx = local_context(y=[3.0, 4.0], z=[0.0, 0.0], step=1)
    >>> Sol(rho=0.5).offset(ctx, gradient=lambda point: point)[0]  # n = [0.6, 0.8], q / ||q|| = [0.6, 0.8]
    tensor([0.1800, 0.3200])
    """

    rho: float = param(1.0, "length of the ascent step before the adaptive scaling", low=0, positional=True)
    adaptive: bool = param(True, "whether to scale the perturbation by each weight's distance from the received model")
    tau: float = param(3.0, "temperature of the divergence", above=0)

    @property
    def ascent_passes(self) -> int:
        return 1 if self.rho else 0

    @property
    def needs_teacher(self) -> bool:
        return self.rho > 0

    def teacher(self, ctx: LocalContext) -> Teacher | None:
        return Teacher(ctx.z, self.tau, with_loss=False) if self.needs_teacher else None

    def offset(self, ctx: LocalContext, gradient: Gradient) -> tuple[Tensor | None, State]:
        """The offset e, or None if rho is 0; no local state changes. ``gradient`` is that of the divergence."""
        if self.rho == 0:
            return None, {}
        offset = self.rho * unit(gradient(ctx.y))
        if self.adaptive:
            distances = ctx.layout.views((ctx.y - ctx.z).abs())  # torch 2.9 cannot compile ctx.displacement.abs()
            offset = offset * ctx.layout.flatten({name: F.normalize(each, dim=0) for name, each in distances.items()})
        # In the first step q is 0 only up to rounding, of which ``unit`` would make a full step.
        return torch.where(ctx.step == 0, 0.0, offset), {}
