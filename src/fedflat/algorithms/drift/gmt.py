"""FedGMT: distillation from a moving average of the server's models, with a dual variable."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedflat.algorithms.drift.dual import Dual
from fedflat.algorithms.slot import Gradient, LocalContext
from fedflat.algorithms.state import Fields, State, vector
from fedflat.algorithms.teacher import Teacher
from fedflat.text import param


@dataclass(frozen=True)
class Gmt(Dual):
    """Clients distil from a moving average of server models, and FedDyn's dual aligns them (FedGMT; Li et al. 2025).

        g = grad(f + gamma tau^2 KL(p_e, p_y))
        d_k = g + a_i / beta
        a_i <- a_i + D_i
        target = mean_S y_K + mean_all a_i
        e <- alpha e + (1 - alpha) x

    - d_k: direction of local step k
    - g: gradient of the loss f on the step's batch plus a distillation term
    - e: teacher, a moving average of the server models x; initially the initial model
    - KL(p_e, p_y): mean Kullback-Leibler divergence between the predictions of the teacher and of the client's model y;
      p is the softmax of the logits divided by tau
    - a_i: dual variable of client i, i.e. the sum of its displacements over all rounds so far
    - D_i: displacement y_K - y_0 of client i in the round, where K is its number of local steps
    - z: broadcast model, from which clients start
    - y_K: the client's model after its K local steps
    - mean_S: mean over the round's cohort S
    - mean_all: mean over all clients
    - target: model towards which the server moves

    With gamma = 0, this is FedDyn with alpha = 1 / beta, but without its proximal term. Each step needs an additional
    forward pass, of the teacher. The task must have logits.

    >>> from torch import tensor
    >>> from fedflat.testing import local_context
    >>> ctx = local_context(y=[1.0, 3.0], z=[1.0, 1.0], client={"a": [0.5, -0.5]})
    >>> Gmt(beta=10.0).direction(tensor([0.1, 0.1]), ctx, None)
    tensor([0.1500, 0.0500])
    >>> Gmt(alpha=0.95).after_server_step(tensor([3.0, 4.0]), {"teacher": tensor([1.0, 2.0])})
    {'teacher': tensor([1.1000, 2.1000])}
    """

    gamma: float = param(1.0, "weight of the distillation term", low=0)
    tau: float = param(3.0, "temperature of the distillation term", above=0)
    beta: float = param(10.0, "divisor of the dual variable in local steps", above=0)
    alpha: float = param(0.95, "share of the old average in the teacher's update", low=0, high=1)

    @property
    def needs_teacher(self) -> bool:
        return self.gamma > 0

    def teacher(self, ctx: LocalContext) -> Teacher | None:
        return Teacher(ctx.server["teacher"], self.tau, self.gamma * self.tau**2) if self.needs_teacher else None

    def on_server(self) -> Fields:
        """Declare the mean ``a`` of all clients' duals, which clients do not need, and the teacher, which is sent."""
        return (vector("a", sent=False), vector("teacher", start="model"))

    def direction(self, g: Tensor, ctx: LocalContext, gradient: Gradient) -> Tensor:
        return g + ctx.client["a"] / self.beta

    def after_server_step(self, x: Tensor, server: State) -> State:
        return {"teacher": self.alpha * server["teacher"] + (1 - self.alpha) * x}

    def divergence_hint(self) -> str | None:
        return "FedGMT's dual accumulates displacements without decay; clip gradients (training.clip=10) or raise beta"
