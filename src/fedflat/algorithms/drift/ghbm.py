"""GHBM: heavy-ball momentum over several rounds, in local steps."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedflat.algorithms.drift.heavy_ball import HeavyBall
from fedflat.algorithms.slot import CohortMeans, Gradient, LocalContext
from fedflat.algorithms.state import Fields, State, vector
from fedflat.text import param


@dataclass(frozen=True)
class Ghbm(HeavyBall):
    """Local steps follow a momentum over the last tau rounds (GHBM; Zaccone et al. 2025).

        m = (x_old - z) / tau
        d_k = g + beta m / (eta K)

    - m: momentum, which points uphill like a gradient; 0 in the first tau rounds
    - z: broadcast model
    - x_old: server model tau rounds ago
    - d_k: direction of local step k
    - g: gradient of the loss on the step's batch
    - eta: learning rate of the round's first step
    - K: number of local steps in a round

    At a constant learning rate, all steps of a round together move the model by -beta m; if the learning rate falls
    within the round, they move it less. If tau is the number of clients divided by the number of clients per round, the
    last tau rounds cover about all clients. The server keeps its last tau models.

    >>> from torch import tensor
    >>> from fedflat.testing import local_context
    >>> ghbm, old = Ghbm(beta=0.5, tau=2), {"old": [1.4, 0.6]}
    >>> ctx = local_context(y=[1.0, 3.0], z=[1.0, 1.0], server=old, steps=2, lr=0.1, round=2)
    >>> ghbm.direction(tensor([0.1, 0.1]), ctx._replace(local=ghbm.begin(ctx)), None)  # m = [0.2, -0.2]
    tensor([ 0.6000, -0.4000])
    """

    tau: int = param(
        10, "rounds over which the momentum averages, ideally clients / clients_per_round", low=1, high=10_000
    )

    def on_server(self) -> Fields:
        """Declare the last tau server models: ``x1``, ``x2``, ... by age, and ``old``, which clients receive."""
        newer = (vector(f"x{age}", start="model", sent=False) for age in range(self.tau - 1, 0, -1))
        return (vector("old", start="model"), *newer)

    def begin(self, ctx: LocalContext) -> State:
        momentum = (ctx.round >= self.tau) * (ctx.server["old"] - ctx.broadcast) / self.tau
        return {"momentum": self._per_step(momentum, ctx)}

    def direction(self, g: Tensor, ctx: LocalContext, gradient: Gradient) -> Tensor:
        return g + ctx.local["momentum"]

    def aggregate(self, means: CohortMeans, server: State) -> tuple[Tensor, State]:
        """Return the target z + mean_S D_i; every kept model ages by one round, and the newest is x."""
        names = [field.name for field in self.on_server()]  # from the oldest to the newest
        aged = dict(zip(names, [*(server[name] for name in names[1:]), means.x], strict=True))
        return means.z + means.displacement, aged
