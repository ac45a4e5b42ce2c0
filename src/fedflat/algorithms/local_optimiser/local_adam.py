"""Adam on clients."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedflat.algorithms.descent import Descent
from fedflat.algorithms.local_optimiser.adamw import AdamW
from fedflat.algorithms.slot import LocalContext
from fedflat.algorithms.state import State


@dataclass(frozen=True)
class LocalAdam(AdamW):
    """Clients take Adam steps, with new moments in every round (Kingma and Ba 2015).

        d <- d_k + weight_decay y_k
        m <- beta1 m + (1 - beta1) d
        v <- beta2 v + (1 - beta2) d^2
        m_hat = m / (1 - beta1^(k+1))
        v_hat = v / (1 - beta2^(k+1))
        y_{k+1} = y_k - eta_k m_hat / (sqrt(v_hat) + eps)

    - d_k: direction of local step k, after the drift correction and clipping
    - m, v: moments, which are zero at the start of every round
    - k: local step, counted from 0
    - y_k: the client's model after k local steps
    - eta_k: learning rate of local step k

    All operations are elementwise. Unlike AdamW, Adam adds the weight decay (``training.weight_decay``) to the
    direction. ``local-adam`` runs on clients; the part ``adam`` is Adam on the server.

    >>> from torch import tensor
    >>> from fedflat.testing import local_context
    >>> adam, ctx = LocalAdam(), local_context(y=[1.0, 2.0], z=[1.0, 2.0])
    >>> ctx = ctx._replace(local=adam.begin(ctx, Descent()))
    >>> adam.move(tensor([4.0, -0.01]), tensor(0.1), ctx, Descent(weight_decay=0.5))[0]  # y - 0.1 sign(d + 0.5 y)
    tensor([0.9000, 1.9000])
    """

    def move(self, d: Tensor, lr: Tensor, ctx: LocalContext, descent: Descent) -> tuple[Tensor, State]:
        step, moments = self.step(d + descent.weight_decay * ctx.y if descent.weight_decay else d, ctx)
        return ctx.y - lr * step, moments
