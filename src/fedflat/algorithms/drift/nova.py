"""FedNova: normalised averaging."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedflat.algorithms.slot import CohortMeans, Drift, Gradient, LocalContext
from fedflat.algorithms.state import Fields, State, scalar
from fedflat.text import param


@dataclass(frozen=True)
class Nova(Drift):
    """Displacements are divided by the clients' effective steps before averaging (FedNova; Wang et al. 2020).

        d_k = g + mu (y_k - z)
        target = z + (mean_S a_i) mean_S (D_i / a_i)

    - d_k: direction of local step k
    - g: gradient of the loss on the step's batch
    - y_k: the client's model after k local steps
    - z: broadcast model, from which clients start
    - D_i: displacement y_K - y_0 of client i in the round, where K is its number of local steps
    - a_i: effective steps of client i, i.e. the distance that its optimiser moves if every gradient is 1, divided by
      the learning rate of the first step
    - mean_S: mean over the round's cohort S, with the weights that displacements have in the run
    - target: model towards which the server moves

    With SGD, a_i is the number of local steps; local momentum makes it larger. With mu > 0, the target contains the
    mean number of local steps in place of mean_S a_i. If all clients take the same steps, FedNova equals FedAvg.

    >>> from fedflat.testing import cohort_means
    >>> means = cohort_means(z=[1.0, 1.0], displacement=[0.9, 1.1], normalised=[0.1, 0.2], mean={"a": 8.0})
    >>> Nova().aggregate(means, {})[0]
    tensor([1.8000, 2.6000])
    """

    mu: float = param(0.0, "strength of the pull towards the received model, as in FedProx", low=0)

    @property
    def counts_effective_steps(self) -> bool:
        return True

    @property
    def displacement_divisor(self) -> str:
        return "a"

    def sends(self) -> Fields:
        """Declare the effective steps ``a``, and the number of ``steps`` if the server needs their mean."""
        effective = scalar("a", weighting="aggregation")
        return (effective, scalar("steps", weighting="aggregation")) if self.mu else (effective,)

    def direction(self, g: Tensor, ctx: LocalContext, gradient: Gradient) -> Tensor:
        return g + self.mu * (ctx.y - ctx.z) if self.mu else g

    def finish(self, ctx: LocalContext) -> tuple[State, State]:
        sent = {"a": ctx.effective_steps}
        return {}, sent | {"steps": ctx.steps} if self.mu else sent

    def sgd_conflict(self, optimiser: str) -> str | None:
        return f"effective steps are counted for SGD only; use another drift correction, e.g. fedprox+{optimiser}"

    def asynchronous_conflict(self) -> str | None:
        return "displacements are normalised by the mean steps of a cohort that starts together"

    def aggregate(self, means: CohortMeans, server: State) -> tuple[Tensor, State]:
        assert means.normalised is not None
        return means.z + means.mean["steps" if self.mu else "a"] * means.normalised, {}
