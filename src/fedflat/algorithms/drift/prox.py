"""FedProx."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedflat.algorithms.slot import Drift, Gradient, LocalContext
from fedflat.text import param


@dataclass(frozen=True)
class Prox(Drift):
    """A proximal term pulls the client's model towards the received one (FedProx; Li et al. 2020, eq. 2).

        d_k = g + mu (y_k - z)

    - d_k: direction of local step k
    - g: gradient of the loss on the step's batch
    - y_k: the client's model after k local steps
    - z: broadcast model, from which clients start

    >>> from torch import tensor
    >>> from fedflat.testing import local_context
    >>> ctx = local_context(y=[1.0, 3.0], z=[1.0, 1.0])
    >>> Prox(mu=0.5).direction(tensor([0.1, 0.2]), ctx, None)
    tensor([0.1000, 1.2000])
    """

    mu: float = param(0.1, "strength of the pull towards the received model", low=0)

    def direction(self, g: Tensor, ctx: LocalContext, gradient: Gradient) -> Tensor:
        return g + self.mu * (ctx.y - ctx.z)
