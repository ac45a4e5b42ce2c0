"""Methods that change the server's step or the clients' start: FedExP, FedInit."""

from typing import Literal

import numpy as np

from .plain import Cohorts, Rates, Steps
from .problem import Quadratics
from .trace import Trace, Vector, at


def fedexp(
    problem: Quadratics,
    x0: Vector,
    cohorts: Cohorts,
    eta: Rates,
    steps: Steps,
    *,
    eps: float = 1e-3,
    eps_scale: Literal["one", "cohort"] = "one",
    eps_decay: float = 1.0,
    server_lr: float = 1.0,
) -> Trace:
    """The server's learning rate is recorded as `lr`; server_lr is its lower bound."""
    x, trace = x0, Trace()
    for t, cohort in enumerate(cohorts):
        lr = at(eta, t)
        D = []
        for i in cohort:
            y = x
            for _ in range(at(steps, i)):
                y = y - lr * problem.gradient(i, y)
            D.append(y - x)
        Dbar = problem.mean(cohort, D)
        squares = problem.mean(cohort, [np.array([d @ d]) for d in D])[0]
        guard = eps * eps_decay ** (t + 1) * (len(cohort) if eps_scale == "cohort" else 1)
        server = max(server_lr, squares / (2 * (Dbar @ Dbar + guard)))
        x = x + server * Dbar
        trace.record(x, {"lr": server})
    return trace


def fedinit(
    problem: Quadratics,
    x0: Vector,
    cohorts: Cohorts,
    eta: Rates,
    steps: Steps,
    *,
    beta: float = 0.1,
    server: Literal["displacement", "average"] = "displacement",
) -> Trace:
    x, last, trace = x0, np.tile(x0, (problem.N, 1)), Trace()
    for t, cohort in enumerate(cohorts):
        lr = at(eta, t)
        D, ends = [], []
        for i in cohort:
            start = x + beta * (x - last[i])
            y = start
            for _ in range(at(steps, i)):
                y = y - lr * problem.gradient(i, y)
            D.append(y - start)
            ends.append(y)
            last[i] = y
        x = x + problem.mean(cohort, D) if server == "displacement" else problem.mean(cohort, ends)
        trace.record(x, {}, {"y": last})
    return trace
