"""FedSOL."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fedflat.algorithms.perturbation.ascent import AscentStep
from fedflat.algorithms.slot import Gradient, LocalContext, unit
from fedflat.algorithms.state import State
from fedflat.algorithms.teacher import Teacher
from fedflat.text import param


@dataclass(frozen=True)
class Sol(AscentStep):
    """Gradients are evaluated after a step away from the received model's predictions (FedSOL; Lee et al. 2024).

        r = grad(KL(p_z, p_y))
        e = rho n(|y_k - z|) r / ||r||
        g = g(y_k + e)

    - KL(p_z, p_y): mean Kullback-Leibler divergence between the predictions of z and of the client's model on the
      step's batch; p is the softmax of the logits divided by tau
    - r: gradient of this divergence at y_k
    - e: perturbation, i.e. the offset from y_k to the point at which the gradient is evaluated
    - n: normalisation that divides each parameter tensor by its l2 norm along the first dimension, e.g. each column of
      a matrix
    - y_k: the client's model after k local steps
    - z: broadcast model, from which clients start
    - g(y): gradient of the loss on the step's batch at the model y
    - g: gradient that the local step uses

    Products are elementwise. With ``adaptive=False``, e is rho r / ||r||. The first step of a round has no
    perturbation, because y_0 = z and r = 0. Each step needs an additional forward pass, of the model z. The task must
    have logits.

    >>> from fedflat.testing import local_context
    >>> ctx = local_context(y=[3.0, 4.0], z=[0.0, 0.0], step=1)
    >>> Sol(rho=0.5).offset(ctx, gradient=lambda point: point)[0]  # n = [0.6, 0.8], r / ||r|| = [0.6, 0.8]
    tensor([0.1800, 0.3200])
    """

    rho: float = param(1.0, "length of the ascent step before the adaptive scaling", low=0, positional=True)
    adaptive: bool = param(True, "whether to scale the perturbation by each weight's distance from the received model")
    tau: float = param(3.0, "temperature of the divergence", above=0)

    @property
    def needs_teacher(self) -> bool:
        return self.rho > 0

    def teacher(self, ctx: LocalContext) -> Teacher | None:
        return Teacher(ctx.z, self.tau, with_loss=False) if self.needs_teacher else None

    def offset(self, ctx: LocalContext, gradient: Gradient) -> tuple[Tensor | None, State]:
        """Return e, or None if rho is 0; ``gradient`` is that of the divergence."""
        if self.rho == 0:
            return None, {}
        offset = self.rho * unit(gradient(ctx.y))
        if self.adaptive:
            distances = ctx.layout.views((ctx.y - ctx.z).abs())  # torch 2.9 cannot compile ctx.displacement.abs()
            offset = offset * ctx.layout.flatten({name: F.normalize(each, dim=0) for name, each in distances.items()})
        # In the first step, r is 0 only up to rounding errors, which ``unit`` would scale up to length 1.
        return torch.where(ctx.step == 0, 0.0, offset), {}
