"""FedMuon."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedflat.algorithms.descent import Descent
from fedflat.algorithms.local_optimiser.global_update import GlobalUpdate
from fedflat.algorithms.local_optimiser.muon import Muon
from fedflat.algorithms.slot import LocalContext
from fedflat.algorithms.state import State
from fedflat.text import param


@dataclass(frozen=True)
class FedMuon(GlobalUpdate, Muon):
    """Clients take Muon steps with a shared momentum, plus the last global update (FedMuon; Liu et al. 2025).

        M <- beta M + (1 - beta) d_k
        u = beta M + (1 - beta) d_k
        O = sqrt(max(1, rows / columns)) NS5(u)
        y_{k+1} = (1 - a weight_decay) y_k - a O + (gamma / K) (eta_t / eta_{t-1}) D,  a = (1 - gamma) alpha eta_k
        M <- mean_S M_i
        D <- mean_S D_i

    - d_k: direction of local step k, after the drift correction and clipping
    - M: momentum of one matrix; at the start of a round, the client's M is the server's
    - M_i: momentum of client i at the end of the round
    - NS5(u): u with all singular values made about 1, by five Newton-Schulz steps
    - O: orthogonalised step
    - y_k: the client's model after k local steps
    - eta_k: learning rate of local step k
    - eta_t: learning rate of the first step of round t
    - K: number of local steps in a round
    - D: mean displacement of the previous round, initially 0
    - D_i: displacement y_K - y_0 of client i in the round, where K is its number of local steps
    - mean_S: mean over the round's cohort S

    The equations are those of one parameter tensor with at least two dimensions, taken as a matrix. Local steps are
    those of Muon, with learning rates multiplied by 1 - gamma. All other tensors, such as biases, take AdamW steps,
    whose moments are zero at the start of every round.

    >>> from torch import tensor
    >>> from fedflat.testing import local_context
    >>> fedmuon, server = FedMuon(gamma=0.5), {"M": [0.0, 0.0], "last": [0.4, 0.8], "lr": 0.1}
    >>> ctx = local_context(y=[1.0, 2.0], z=[1.0, 2.0], server=server, steps=2)
    >>> ctx = ctx._replace(local=fedmuon.begin(ctx, Descent()))
    >>> fedmuon.move(tensor([4.0, -0.01]), tensor(0.1), ctx, Descent())[0]  # a bias: y - 0.05 sign(d) + [0.1, 0.2]
    tensor([1.0500, 2.2500])
    """

    SHARED: ClassVar = "M"
    beta: float = param(0.98, "decay of the momentum M", low=0, high=0.9999)

    def move(self, d: Tensor, lr: Tensor, ctx: LocalContext, descent: Descent) -> tuple[Tensor, State]:
        return super().move(d, lr * (1 - self.gamma), ctx, descent)

    def shared(self, ctx: LocalContext) -> Tensor:
        """Return the momenta of matrices; other tensors have none."""
        return torch.where(ctx.local["is_matrix"], ctx.local["M"], 0.0)
