"""FedAdamW."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedflat.algorithms.local_optimiser.adamw import AdamW
from fedflat.algorithms.local_optimiser.global_update import GlobalUpdate
from fedflat.algorithms.slot import LocalContext
from fedflat.text import param


@dataclass(frozen=True)
class FedAdamW(GlobalUpdate, AdamW):
    """Clients take AdamW steps with a shared second moment, plus the last global update (FedAdamW; Liu et al. 2026).

        m <- beta1 m + (1 - beta1) d_k
        v <- beta2 v + (1 - beta2) d_k^2
        m_hat = m / (1 - beta1^(k+1))
        v_hat = v / (1 - beta2^(t K + k + 1))
        y_{k+1} = (1 - eta_k weight_decay) y_k - eta_k m_hat / (sqrt(v_hat) + eps) + (gamma / K) (eta_t / eta_{t-1}) D
        v <- mean_S v_i, then its mean over each parameter tensor
        D <- mean_S D_i

    - d_k: direction of local step k, after the drift correction and clipping
    - m: first moment, which is zero at the start of every round
    - v: second moment; at the start of a round, the client's v is the server's
    - v_i: second moment of client i at the end of the round
    - y_k: the client's model after k local steps
    - eta_k: learning rate of local step k
    - eta_t: learning rate of the first step of round t
    - k, K: local step, counted from 0, and number of local steps in a round
    - t: round, counted from 0
    - D: mean displacement of the previous round, initially 0
    - D_i: displacement y_K - y_0 of client i in the round, where K is its number of local steps
    - mean_S: mean over the round's cohort S

    The published code differs in two ways: the server does not average v over tensors (``second_moment=weight``), and m
    is corrected by the number of steps since the start of the run (``m_steps=run``).

    >>> from torch import tensor
    >>> from fedflat.algorithms.descent import Descent
    >>> from fedflat.testing import cohort_means, local_context
    >>> fedadamw, server = FedAdamW(gamma=0.5), {"v": [0.0, 0.0], "last": [0.4, 0.8], "lr": 0.1}
    >>> ctx = local_context(y=[1.0, 2.0], z=[1.0, 2.0], server=server, steps=2)
    >>> ctx = ctx._replace(local=fedadamw.begin(ctx, Descent()))
    >>> fedadamw.move(tensor([4.0, -0.01]), tensor(0.1), ctx, Descent())[0]  # y - 0.1 sign(d) + 0.5 / 2 * [0.4, 0.8]
    tensor([1.0000, 2.3000])
    >>> fedadamw.finish(ctx._replace(local={"v": tensor([1.0, 3.0])}))[1]["v"]
    tensor([2., 2.])
    """

    SHARED: ClassVar = "v"
    second_moment: Literal["tensor", "weight"] = param(
        "tensor", "second moment that the server keeps: one value per parameter tensor (tensor) or per weight (weight)"
    )
    m_steps: Literal["round", "run"] = param(
        "round", "steps by which m is corrected for its initial value 0: those of the round, or of the run so far"
    )

    def privacy_conflict(self, equal_steps: bool) -> str | None:
        return "clients also send their second moments, which noise would make negative"

    def averaged_steps(self, ctx: LocalContext) -> tuple[Tensor, Tensor]:
        of_round, of_run = ctx.step + 1, ctx.round * ctx.steps + ctx.step + 1
        return (of_round if self.m_steps == "round" else of_run), of_run

    def shared(self, ctx: LocalContext) -> Tensor:
        """Return the second moment: its mean over each parameter tensor, or itself."""
        v = ctx.local["v"]
        if self.second_moment == "weight":
            return v
        return ctx.layout.per_tensor(torch.stack([piece.mean() for piece in torch.split(v, ctx.layout.sizes)]))
