"""FedMo and FedMoSWA: momentum-based stochastic control."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from fedflat.algorithms.drift.control_variates import ControlVariates
from fedflat.algorithms.slot import TINY_LR, CohortMeans, LocalContext
from fedflat.algorithms.state import Fields, State, vector
from fedflat.text import param


@dataclass(frozen=True)
class Mo(ControlVariates):
    """Control variates and the server's momentum correct each gradient (FedMoSWA; Liu et al. 2025, eqs. 5-7).

        d_k = g - c_i + m
        c_i+ = c_i - m + (z - y_K) / H
        m <- m + gamma mean_S (c_i+ - m)

    - d_k: direction of local step k
    - g: gradient of the loss on the step's batch
    - c_i: control variate of client i; c_i+ is its value after the round
    - m: momentum of the server
    - z: broadcast model, from which clients start
    - y_K: the client's model after its K local steps
    - H: sum of the learning rates of the client's K local steps
    - mean_S: mean over the round's cohort S

    The equations are the paper's option II. With ``option=I``, c_i+ is the client's full-batch gradient at z instead.

    >>> from torch import tensor
    >>> from fedflat.testing import local_context
    >>> mo, server, client = Mo(), {"m": [1.0, 1.0]}, {"c": [0.5, 2.0]}
    >>> ctx = local_context(y=[0.75, 1.25], z=[1.0, 1.0], server=server, client=client, lr_sum=0.25)
    >>> mo.direction(tensor([0.1, 0.1]), ctx._replace(local=mo.begin(ctx)), None)
    tensor([ 0.6000, -0.9000])
    >>> mo.finish(ctx)  # c_i+ = c_i - m + [1, -1]
    ({'c': tensor([0.5000, 0.0000])}, {'dm': tensor([-0.5000, -1.0000])})
    """

    SERVER, NAME = "m", "fedmo"
    gamma: float = param(0.2, "step size of the server's momentum towards the clients' control variates", low=0, high=1)
    option: Literal["I", "II"] = param("II", "source of c_i+: the gradient at z (I) or the displacement (II)")
    option_I_batches: int = param(0, "number of batches in option I's gradient; 0 uses all of the client's data", low=0)
    gamma_first_round: float | None = param(None, "gamma in round 0, if set; 1 in the published code", low=0, high=1)
    normaliser: Literal["sum", "trapezoid"] = param(
        "sum", "H: sum of learning rates, or K times the mean of the first and that after the last step (trapezoid)"
    )

    @property
    def full_gradient_batches(self) -> int:
        return self.option_I_batches

    def on_server(self) -> Fields:
        return (vector("m", momentum="ascent"),)

    def sends(self) -> Fields:
        return (vector("dm"),)

    @property
    def relative_messages(self) -> Mapping[str, str]:
        return {"dm": "m"}

    def mean_direction(self, ctx: LocalContext) -> Tensor:
        H = ctx.lr_sum if self.normaliser == "sum" else ctx.steps * (ctx.first_lr + ctx.next_lr) / 2
        return (ctx.z - ctx.y) / H.clamp(min=TINY_LR)

    def finish(self, ctx: LocalContext) -> tuple[State, State]:
        new_c = self.new_variate(ctx)
        return {"c": new_c}, {"dm": new_c - ctx.server["m"]}

    def aggregate(self, means: CohortMeans, server: State) -> tuple[Tensor, State]:
        first_gamma = self.gamma_first_round if means.round == 0 else None
        gamma = self.gamma if first_gamma is None else first_gamma
        return means.z + means.displacement, {"m": server["m"] + gamma * means.mean["dm"]}
