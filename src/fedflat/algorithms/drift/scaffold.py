"""SCAFFOLD."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from fedflat.algorithms.drift.control_variates import ControlVariates
from fedflat.algorithms.slot import CohortMeans, LocalContext
from fedflat.algorithms.state import Fields, State, vector
from fedflat.text import param


@dataclass(frozen=True)
class Scaffold(ControlVariates):
    """Control variates correct each client's gradients (SCAFFOLD; Karimireddy et al. 2020, eqs. 3-5).

        d_k = g - c_i + c
        c_i+ = c_i - c + (z - y_K) / H
        c <- c + (|S| / N) mean_S (c_i+ - c_i)

    - d_k: direction of local step k
    - g: gradient of the loss on the step's batch
    - c_i: control variate of client i; c_i+ is its value after the round
    - c: control variate of the server
    - z: broadcast model, from which clients start
    - y_K: the client's model after its K local steps
    - H: sum of the learning rates of the client's K local steps
    - mean_S: mean over the round's cohort S
    - |S|, N: number of clients in the cohort S, and of all clients

    The equations are the paper's option II. With ``option=I``, c_i+ is the client's full-batch gradient at z instead.

    >>> from torch import tensor
    >>> from fedflat.testing import local_context
    >>> scaffold, server, client = Scaffold(), {"c": [1.0, 1.0]}, {"c": [0.5, 2.0]}
    >>> ctx = local_context(y=[0.75, 1.25], z=[1.0, 1.0], server=server, client=client, lr_sum=0.25)
    >>> scaffold.direction(tensor([0.1, 0.1]), ctx._replace(local=scaffold.begin(ctx)), None)
    tensor([ 0.6000, -0.9000])
    >>> scaffold.finish(ctx)  # c_i+ = c_i - c + [1, -1]
    ({'c': tensor([0.5000, 0.0000])}, {'dc': tensor([ 0., -2.])})
    """

    SERVER, NAME = "c", "scaffold"
    option: Literal["I", "II"] = param("II", "source of c_i+: full-batch gradient at z (I) or displacement (II)")
    cv_weight: float = param(1.0, "weight of c - c_i in the direction d_k; 0.1 in FedLESAM-S's published code", low=0)

    def on_server(self) -> Fields:
        return (vector("c"),)

    def sends(self) -> Fields:
        return (vector("dc"),)

    def begin(self, ctx: LocalContext) -> State:
        return {"correction": self.cv_weight * (ctx.server["c"] - ctx.client["c"])}

    def finish(self, ctx: LocalContext) -> tuple[State, State]:
        new_c = self.new_variate(ctx)
        return {"c": new_c}, {"dc": new_c - ctx.client["c"]}

    def aggregate(self, means: CohortMeans, server: State) -> tuple[Tensor, State]:
        return means.z + means.displacement, {"c": server["c"] + means.share * means.mean["dc"]}

    def robust_aggregation_conflict(self) -> str | None:
        return "the server's control variate must equal the mean of the clients' control variates"
