"""FedMuon."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedflat.algorithms.descent import Descent
from fedflat.algorithms.local_optimiser import global_update
from fedflat.algorithms.local_optimiser.muon import Muon
from fedflat.algorithms.slot import CohortMeans, LocalContext
from fedflat.algorithms.state import Fields, State, vector
from fedflat.text import param


@dataclass(frozen=True)
class FedMuon(Muon):
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
    - D_i: displacement y_K - z of client i in the round, where K is its number of local steps
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

    beta: float = param(0.98, "decay of the momentum M", low=0, high=0.9999)
    gamma: float = param(0.5, global_update.GAMMA, low=0, high=1)

    def on_server(self) -> Fields:
        return (vector("M"), *global_update.on_server(self.gamma))

    def sends(self) -> Fields:
        return (vector("M"), *global_update.sends(self.gamma))

    def begin(self, ctx: LocalContext, descent: Descent) -> State:
        return super().begin(ctx, descent) | {"M": ctx.server["M"]} | global_update.begin(self.gamma, ctx)

    def move(self, d: Tensor, lr: Tensor, ctx: LocalContext, descent: Descent) -> tuple[Tensor, State]:
        y, momenta = super().move(d, lr * (1 - self.gamma), ctx, descent)
        return global_update.pushed(y, ctx), momenta

    def finish(self, ctx: LocalContext) -> tuple[State, State]:
        """Send the momenta of matrices; other tensors have none."""
        M = torch.where(ctx.local["is_matrix"], ctx.local["M"], 0.0)
        return {}, {"M": M} | global_update.finish(self.gamma, ctx)

    def aggregate(self, means: CohortMeans, server: State) -> State:
        return {"M": means.mean["M"]} | global_update.aggregate(self.gamma, means)
