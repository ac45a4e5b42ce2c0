"""Muon on clients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedflat.algorithms.descent import Descent
from fedflat.algorithms.local_optimiser.adamw import AdamW, moving_average
from fedflat.algorithms.local_optimiser.base import LocalOptimiser
from fedflat.algorithms.local_optimiser.matrices import by_rank, joined, matrix_names, orthogonal_steps
from fedflat.algorithms.slot import LocalContext
from fedflat.algorithms.state import State
from fedflat.models.layout import Layout
from fedflat.text import param

ADAM = AdamW(beta1=0.9, beta2=0.95, eps=1e-10)
"""Optimiser of tensors with fewer than two dimensions."""


@dataclass(frozen=True)
class Muon(LocalOptimiser):
    """Clients orthogonalise the momentum of each matrix, with new momenta in every round (Muon; Jordan et al. 2024).

        M <- beta M + (1 - beta) d_k
        u = beta M + (1 - beta) d_k
        O = sqrt(max(1, rows / columns)) NS5(u)
        y_{k+1} = (1 - a weight_decay) y_k - a O,  a = alpha eta_k

    - d_k: direction of local step k, after the drift correction and clipping
    - M: momentum of one matrix, which is zero at the start of every round
    - NS5(u): u with all singular values made about 1, by five Newton-Schulz steps
    - O: orthogonalised step
    - y_k: the client's model after k local steps
    - eta_k: learning rate of local step k

    The equations are those of one tensor with at least two dimensions, taken as a matrix whose rows are indexed by the
    first. All other tensors take AdamW steps with learning rate eta_k (beta1 = 0.9, beta2 = 0.95, eps = 1e-10).

    >>> from fedflat.testing import local_context
    >>> muon = Muon(alpha=1, orthogonalise="exact")
    >>> ctx = local_context(y=[0.0] * 5, z=[0.0] * 5)._replace(layout=Layout(("weight", "bias"), ((2, 2), (1,))))
    >>> ctx = ctx._replace(local=muon.begin(ctx, Descent()))
    >>> muon.move(torch.tensor([3.0, 0.0, 0.0, -0.2, 5.0]), torch.tensor(0.1), ctx, Descent())[0]
    tensor([-0.1000,  0.0000,  0.0000,  0.1000, -0.1000])
    """

    beta: float = param(0.95, "decay of the momentum M", low=0, high=0.9999)
    alpha: float = param(0.5, "learning rate of matrices, relative to that of other tensors", low=0)
    orthogonalise: Literal["ns5", "exact"] = param(
        "ns5", "how to orthogonalise u: by five Newton-Schulz steps (ns5), or up to rounding errors (exact)"
    )
    shape_factor: Literal["matrix", "kernel"] = param(
        "matrix", "rows and columns in the factor of O: the matrix's, or the tensor's last two dimensions (kernel)"
    )

    def begin(self, ctx: LocalContext, descent: Descent) -> State:
        is_matrix = ctx.layout.indicator(matrix_names(ctx.layout).__contains__, ctx.z)
        _, others = by_rank(ctx.z, ctx.layout)
        return {"M": torch.zeros_like(ctx.z), "is_matrix": is_matrix} | ADAM.begin(ctx.changed(z=others), descent)

    def move(self, d: Tensor, lr: Tensor, ctx: LocalContext, descent: Descent) -> tuple[Tensor, State]:
        M = moving_average(ctx.local["M"], d, self.beta)
        matrices, _ = by_rank(moving_average(M, d, self.beta), ctx.layout)
        steps = orthogonal_steps(matrices, ctx.layout, self.orthogonalise, self.shape_factor)
        adam_step, moments = ADAM.step(by_rank(d, ctx.layout)[1], ctx)
        step = joined(steps, adam_step, ctx.layout)
        if descent.weight_decay:
            step = step + descent.weight_decay * ctx.y
        step = torch.where(ctx.local["is_matrix"], self.alpha * step, step)
        return ctx.y - lr * step, {"M": M, **moments}

    def run_conflict(self, descent: Descent, layout: Layout) -> str | None:
        if not matrix_names(layout):
            return "no trained parameter is a matrix; use adamw, or train parameters with at least two dimensions"
        return super().run_conflict(descent, layout)
