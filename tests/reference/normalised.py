"""FedNova, whose displacements are normalised."""

import numpy as np

from .plain import Cohorts, Rates, Steps
from .problem import Quadratics
from .trace import Trace, Vector, at


def effective_steps(steps: int, eta: float, momentum: float = 0.0, mu: float = 0.0) -> float:
    """In closed form, with momentum or with a proximal term; with both, by the recursion on the gradient 1."""
    if not mu:
        return sum((1 - momentum ** (k + 1)) / (1 - momentum) for k in range(steps))
    if not momentum:
        return (1 - (1 - eta * mu) ** steps) / (eta * mu)
    y = velocity = 0.0
    for _ in range(steps):
        velocity = momentum * velocity + 1 + mu * y
        y -= eta * velocity
    return -y / eta


def fednova(
    problem: Quadratics,
    x0: Vector,
    cohorts: Cohorts,
    eta: Rates,
    steps: Steps,
    *,
    mu: float = 0.0,
    server_lr: float = 1.0,
) -> Trace:
    return fednova_with_momentum(problem, x0, cohorts, eta, steps, momentum=0.0, mu=mu, server_lr=server_lr)


def fednova_with_momentum(
    problem: Quadratics,
    x0: Vector,
    cohorts: Cohorts,
    eta: Rates,
    steps: Steps,
    *,
    momentum: float,
    mu: float = 0.0,
    server_lr: float = 1.0,
) -> Trace:
    """The momentum is that of the local optimiser."""
    x, trace = x0, Trace()
    for t, cohort in enumerate(cohorts):
        lr = at(eta, t)
        d, tau = [], []
        for i in cohort:
            y, velocity, K = x, np.zeros_like(x), at(steps, i)
            for _ in range(K):
                velocity = momentum * velocity + problem.gradient(i, y) + mu * (y - x)
                y = y - lr * velocity
            a = effective_steps(K, lr, momentum, mu)
            d.append((y - x) / a)
            tau.append(K if mu else a)
        x = x + server_lr * problem.mean(cohort, tau) * problem.mean(cohort, d)
        trace.record(x)
    return trace
