"""Methods with a teacher: FedGMT, FedSOL."""

import math

import numpy as np

from .plain import Cohorts, Rates, Steps
from .problem import Quadratics
from .softmax import Softmax
from .trace import Trace, Vector, at, unit


def teacher_gradient(problem: Quadratics, i: int, y: Vector, e: Vector, tau: float) -> Vector:
    """T(y; e, tau); on quadratics the KL divergence is taken to second order, with the gradient A (y - e) / tau^2."""
    if not isinstance(problem, Softmax):
        return problem.A[i] @ (y - e) / tau**2
    a, (rows, columns) = problem.features[i], problem.shapes[0]
    powers = [np.exp((a @ x[: rows * columns].reshape(rows, columns).T + x[rows * columns :]) / tau) for x in (y, e)]
    own, teachers = (each / each.sum(1, keepdims=True) for each in powers)
    slopes = (own - teachers) / tau  # in the logits
    return np.concatenate([(slopes.T @ a).ravel(), slopes.sum(0)]) / len(a)


def fedgmt(
    problem: Quadratics,
    x0: Vector,
    cohorts: Cohorts,
    eta: Rates,
    steps: Steps,
    *,
    gamma: float = 1.0,
    tau: float = 3.0,
    beta: float = 10.0,
    alpha: float = 0.95,
    server_lr: float = 1.0,
) -> Trace:
    x, e, h = x0, x0, np.zeros((problem.N, len(x0)))
    trace = Trace()
    for t, cohort in enumerate(cohorts):
        ends = []
        for i in cohort:
            y = x
            for _ in range(at(steps, i)):
                T = teacher_gradient(problem, i, y, e, tau)
                y = y - at(eta, t) * (problem.gradient(i, y) + gamma * tau**2 * T + h[i] / beta)
            h[i] = h[i] + y - x
            ends.append(y)
        x = (1 - server_lr) * x + server_lr * (problem.mean(cohort, ends) + h.sum(0) / problem.N)
        e = alpha * e + (1 - alpha) * x
        trace.record(x, {"h": h.mean(0), "e": e}, {"h": h})
    return trace


def fedsol(
    problem: Quadratics,
    x0: Vector,
    cohorts: Cohorts,
    eta: Rates,
    steps: Steps,
    *,
    rho: float = 1.0,
    adaptive: bool = True,
    tau: float = 3.0,
) -> Trace:
    x = x0
    trace = Trace()
    for t, cohort in enumerate(cohorts):
        ends = []
        for i in cohort:
            y = x
            for k in range(at(steps, i)):
                offset = np.zeros_like(x)
                if k > 0:
                    offset = rho * unit(teacher_gradient(problem, i, y, x, tau))
                    if adaptive:
                        offset = offset * by_first_dimension(np.abs(y - x), problem.shapes)
                y = y - at(eta, t) * problem.gradient(i, y + offset)
            ends.append(y)
        x = problem.mean(cohort, ends)
        trace.record(x)
    return trace


def by_first_dimension(v: Vector, shapes: list[tuple[int, ...]]) -> Vector:
    """v, with each of its tensors divided by its l2 norm along the first dimension."""
    found, start = [], 0
    for shape in shapes:
        size = math.prod(shape)
        tensor = v[start : start + size].reshape(shape)
        found.append((tensor / np.maximum(np.sqrt((tensor**2).sum(0)), 1e-12)).ravel())
        start += size
    return np.concatenate(found)
