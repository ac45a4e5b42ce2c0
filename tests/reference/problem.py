"""Heterogeneous quadratics f_i(x) = 0.5 (x - b_i)^T A_i (x - b_i), on which iterates are exact."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from .trace import Trace, Vector


class Quadratics:
    """N clients with Hessians A[N,P,P], minima b[N,P] and sample counts n[N] (equal unless given)."""

    def __init__(
        self,
        A: NDArray[np.float64],
        b: NDArray[np.float64],
        n: Sequence[int] | None = None,
        labels: Sequence[Sequence[int]] | None = None,
    ) -> None:
        self.A, self.b = np.asarray(A, float), np.asarray(b, float)
        self.n = np.ones(len(b)) if n is None else np.asarray(n, float)
        self._labels = labels

    def labels(self, n: Sequence[float]) -> NDArray[np.int64]:
        """Label counts [N,3] of clients with n samples, whose classes are 0, 1, 1 and so on; or the given ones."""
        if self._labels is not None:
            return np.asarray(self._labels)
        return np.array([np.bincount(np.arange(int(count)) ** 2 % 3, minlength=3) for count in n])

    @property
    def N(self) -> int:
        return len(self.b)

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Shapes of the model's tensors."""
        return [(self.b.shape[1],)]

    def gradient(self, i: int, x: Vector) -> Vector:
        return self.A[i] @ (x - self.b[i])

    def mean(self, cohort: Sequence[int], values: Sequence[Vector]) -> Vector:
        """Mean over the cohort weighted by samples, sum_i n_i v_i / sum_i n_i."""
        n = self.n[list(cohort)]
        return n @ np.asarray(values) / n.sum()

    def optimum(self) -> Vector:
        """x_opt = (sum A_i)^{-1} sum A_i b_i, the minimum of the uniform mean of the clients' losses."""
        return np.linalg.solve(self.A.sum(0), np.einsum("npq,nq->p", self.A, self.b))

    def fedavg_limit(self, lr: float, steps: int) -> Vector:
        """Where FedAvg ends under full participation: (sum Q_i)^{-1} sum Q_i b_i, Q_i = I - (I - rate A_i)^K."""
        eye = np.eye(self.b.shape[1])
        Q = eye - np.array([np.linalg.matrix_power(eye - lr * A, steps) for A in self.A])
        return np.linalg.solve(Q.sum(0), np.einsum("npq,nq->p", Q, self.b))


class Linear(Quadratics):
    """f_i(x) = b_i^T x."""

    def gradient(self, i: int, x: Vector) -> Vector:
        return self.b[i]


@dataclass(frozen=True)
class Setting:
    """Everything that a run needs except the method and its parameters."""

    problem: Quadratics
    x0: Vector
    eta: float | Sequence[float]  # one learning rate, or one per round
    steps: int | Sequence[int]  # one number of local steps, or one per client
    cohorts: list[list[int]] = field(default_factory=list)

    def run(self, method: Callable[..., Trace], **parameters: object) -> Trace:
        return method(self.problem, self.x0, self.cohorts, self.eta, self.steps, **parameters)

    def but(self, **changes: object) -> "Setting":
        return replace(self, **changes)  # type: ignore[arg-type]


def golden() -> Setting:
    """The two-client problem of the golden iterates."""
    A = np.array([np.diag([1.0, 2.0]), np.diag([3.0, 0.5])])
    b = np.array([[1.0, -1.0], [-1.0, 2.0]])
    return Setting(Quadratics(A, b), np.array([0.5, 0.25]), 0.1, 2, [[0], [1], [0, 1], [0, 1], [0, 1]])


def draw_cohorts(rounds: int, clients: int, size: int | None = None, seed: int = 0) -> list[list[int]]:
    """All clients in every round, or `size` of them drawn without replacement."""
    if size is None:
        return [list(range(clients))] * rounds
    random = np.random.default_rng(seed)
    return [sorted(random.choice(clients, size, replace=False).tolist()) for _ in range(rounds)]


def bed(seed: int = 0, rounds: int = 10, size: int | None = None) -> Setting:
    """The test bed: P=6, N=5, K=7, eta=0.05, random Hessians with eigenvalues in [0.5, 4]."""
    random = np.random.default_rng(seed)
    N, P = 5, 6
    A = np.empty((N, P, P))
    for i in range(N):
        Q, _ = np.linalg.qr(random.normal(size=(P, P)))
        A[i] = (Q * random.uniform(0.5, 4.0, size=P)) @ Q.T
    problem = Quadratics(A, 2.0 * random.normal(size=(N, P)))
    return Setting(problem, random.normal(size=P), 0.05, 7, draw_cohorts(rounds, N, size, seed))
