"""Methods that extend FedDyn: FedGloSS and FedDC."""

from typing import Literal

import numpy as np

from .plain import Cohorts, Rates, Steps
from .problem import Quadratics
from .trace import Trace, Vector, at, unit


def fedgloss(
    problem: Quadratics,
    x0: Vector,
    cohorts: Cohorts,
    eta: Rates,
    steps: Steps,
    *,
    alpha: float = 0.1,
    server_rho: float = 0.15,
    rho: float = 0.15,
    ramp: int = 0,
    start_rho: float = 0.001,
    ramp_rho: float | None = None,
    dual_divisor: Literal["clients", "cohort"] = "clients",
) -> Trace:
    """In the units of the published code: sigma and the clients' states are gradients, and beta is 1 / alpha."""
    beta, N = 1 / alpha, problem.N
    x, q, sigma, state = x0, np.zeros_like(x0), np.zeros_like(x0), np.zeros((N, len(x0)))
    trace = Trace()
    for t, cohort in enumerate(cohorts):
        lr, radius, server_radius = at(eta, t), rho, server_rho
        if t < ramp:
            rise = t / ramp
            radius = (1 - rise) * start_rho + rise * rho
            server_radius = (1 - rise) * start_rho + rise * server_rho
        if t <= ramp and ramp and ramp_rho is not None:
            server_radius = ramp_rho
        z = x - server_radius * unit(q)
        D = []
        for i in cohort:
            y = z
            for _ in range(at(steps, i)):
                g = problem.gradient(i, y + radius * unit(problem.gradient(i, y)) if rho else y)
                y = y - lr * (g - state[i] + (y - z) / beta)
            state[i] = state[i] - (y - z) / beta
            D.append(y - z)
        sigma = sigma - np.sum(D, 0) / (beta * N * (len(cohort) if dual_divisor == "cohort" else 1))
        q = np.mean(D, 0)
        x = x + q - beta * sigma
        trace.record(x, {"sigma": sigma, "q": q, "round": t + 1.0}, {"state": state})
    return trace


def feddc(problem: Quadratics, x0: Vector, cohorts: Cohorts, eta: Rates, steps: Steps, *, alpha: float = 0.01) -> Trace:
    x, s = x0, np.zeros_like(x0)
    h, s_i = np.zeros((problem.N, len(x0))), np.zeros((problem.N, len(x0)))
    trace = Trace()
    for t, cohort in enumerate(cohorts):
        lr = at(eta, t)
        ends, change = [], []
        for i in cohort:
            y, K = x, at(steps, i)
            for _ in range(K):
                y = y - lr * (problem.gradient(i, y) + alpha * (y - x + h[i]) - s_i[i] + s)
            h[i] = h[i] + (y - x)
            new = s_i[i] - s - (y - x) / (K * lr)
            change.append(new - s_i[i])
            s_i[i] = new
            ends.append(y)
        s = s + np.sum(change, 0) / problem.N
        x = np.mean(ends, 0) + h.mean(0)
        trace.record(x, {"a": h.mean(0), "s": s}, {"a": h, "s": s_i})
    return trace
