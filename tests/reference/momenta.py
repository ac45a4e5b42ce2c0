"""Methods with momentum over rounds in local steps: GHBM, LocalGHBM, FedHBM, FedNSAM."""

from typing import Literal

import numpy as np

from .plain import Cohorts, Rates, Steps
from .problem import Quadratics
from .trace import Trace, Vector, at, unit

Anchor = Literal["absent", "initial"]


def ghbm(
    problem: Quadratics,
    x0: Vector,
    cohorts: Cohorts,
    eta: Rates,
    steps: Steps,
    *,
    beta: float = 0.9,
    tau: int = 10,
    server_lr: float = 1.0,
) -> Trace:
    """In the form of the server: a round's steps together add beta (x^t - x^{t-tau}) / tau."""
    models, trace = [x0], Trace()
    for t, cohort in enumerate(cohorts):
        lr, x = at(eta, t), models[t]
        push = beta * (x - models[t - tau]) / tau if t >= tau else np.zeros_like(x)
        D = []
        for i in cohort:
            y, K = x, at(steps, i)
            for _ in range(K):
                y = y - lr * problem.gradient(i, y) + push / K
            D.append(y - x)
        models.append(x + server_lr * np.mean(D, 0))
        kept = {f"x{age}": models[max(0, t + 1 - age)] for age in range(1, tau)}
        trace.record(models[-1], {"old": models[max(0, t + 1 - tau)], **kept})
    return trace


def localghbm(
    problem: Quadratics,
    x0: Vector,
    cohorts: Cohorts,
    eta: Rates,
    steps: Steps,
    *,
    beta: float = 0.9,
    participation: float = 0.1,
    first_anchor: Anchor = "absent",
) -> Trace:
    x, received, trace = x0, np.tile(x0, (problem.N, 1)), Trace()
    seen = np.full(problem.N, first_anchor == "initial")
    for t, cohort in enumerate(cohorts):
        lr = at(eta, t)
        D = []
        for i in cohort:
            m = participation * (received[i] - x) if seen[i] else np.zeros_like(x)
            y, K = x, at(steps, i)
            for _ in range(K):
                y = y - lr * (problem.gradient(i, y) + beta * m / (lr * K))
            D.append(y - x)
            received[i], seen[i] = x, True
        x = x + np.mean(D, 0)
        trace.record(x, {}, {"y": received})
    return trace


def fedhbm(
    problem: Quadratics,
    x0: Vector,
    cohorts: Cohorts,
    eta: Rates,
    steps: Steps,
    *,
    beta: float = 1.0,
    participation: float = 0.1,
    first_anchor: Anchor = "absent",
) -> Trace:
    x, last, trace = x0, np.tile(x0, (problem.N, 1)), Trace()
    seen = np.full(problem.N, first_anchor == "initial")
    for t, cohort in enumerate(cohorts):
        lr = at(eta, t)
        D = []
        for i in cohort:
            y, K = x, at(steps, i)
            for _ in range(K):
                m = participation * (last[i] - y) if seen[i] else np.zeros_like(x)
                y = y - lr * (problem.gradient(i, y) + beta * m / (lr * K))
            D.append(y - x)
            last[i], seen[i] = y, True
        x = x + np.mean(D, 0)
        trace.record(x, {}, {"y": last})
    return trace


def fednsam_of_2026(
    problem: Quadratics, x0: Vector, cohorts: Cohorts, eta: Rates, steps: Steps, *, gamma: float, rho: float
) -> Trace:
    """The published script of 2026: SAM from the look-ahead, and a momentum that forgets."""
    x, m, trace = x0, np.zeros_like(x0), Trace()
    for t, cohort in enumerate(cohorts):
        lr, z = at(eta, t), x + gamma * m
        D = []
        for i in cohort:
            y = z
            for _ in range(at(steps, i)):
                y = y - lr * problem.gradient(i, y + rho * unit(problem.gradient(i, y)))
            D.append(y - z)
        m = np.mean(D, 0) if t == 0 else np.mean(D, 0) + gamma * np.mean(D, 0)
        x = x + m
        trace.record(x, {"m": m})
    return trace


def fednsam(
    problem: Quadratics,
    x0: Vector,
    cohorts: Cohorts,
    eta: Rates,
    steps: Steps,
    *,
    lam: float = 0.85,
    rho: float = 0.05,
) -> Trace:
    """lam is the paper's gamma; clients start from x, and their gradients are taken at y + lam m - rho unit(m)."""
    x, m, trace = x0, np.zeros_like(x0), Trace()
    for t, cohort in enumerate(cohorts):
        lr = at(eta, t)
        e = lam * m - rho * unit(m)
        D = []
        for i in cohort:
            y = x
            for _ in range(at(steps, i)):
                y = y - lr * problem.gradient(i, y + e)
            D.append(y - x)
        m = lam * m + np.mean(D, 0)
        x = x + m
        trace.record(x, {"m": m})
    return trace
