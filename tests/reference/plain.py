"""Methods without client state: FedAvg and its server optimisers, FedProx, FedACG, FedCM, MIME, FedSWA."""

from collections.abc import Sequence
from typing import Literal

import numpy as np

from .problem import Quadratics
from .trace import Trace, Vector, at, linear_rates

Cohorts = list[list[int]]
Rates = float | Sequence[float]
Steps = int | Sequence[int]


def fedavg(
    problem: Quadratics, x0: Vector, cohorts: Cohorts, eta: Rates, steps: Steps, *, server_lr: float = 1.0
) -> Trace:
    x, trace = x0, Trace()
    for t, cohort in enumerate(cohorts):
        lr = at(eta, t)
        D = []
        for i in cohort:
            y = x
            for _ in range(at(steps, i)):
                y = y - lr * problem.gradient(i, y)
            D.append(y - x)
        x = x + server_lr * problem.mean(cohort, D)
        trace.record(x)
    return trace


def fedavgm(
    problem: Quadratics,
    x0: Vector,
    cohorts: Cohorts,
    eta: Rates,
    steps: Steps,
    *,
    beta: float = 0.9,
    server_lr: float = 1.0,
) -> Trace:
    x, m, trace = x0, np.zeros_like(x0), Trace()
    for t, cohort in enumerate(cohorts):
        lr = at(eta, t)
        D = []
        for i in cohort:
            y = x
            for _ in range(at(steps, i)):
                y = y - lr * problem.gradient(i, y)
            D.append(y - x)
        m = beta * m + problem.mean(cohort, D)
        x = x + server_lr * m
        trace.record(x, {"m": m})
    return trace


def fedprox(problem: Quadratics, x0: Vector, cohorts: Cohorts, eta: Rates, steps: Steps, *, mu: float = 0.1) -> Trace:
    x, trace = x0, Trace()
    for t, cohort in enumerate(cohorts):
        lr = at(eta, t)
        locals_ = []
        for i in cohort:
            y = x
            for _ in range(at(steps, i)):
                y = y - lr * (problem.gradient(i, y) + mu * (y - x))
            locals_.append(y)
        x = problem.mean(cohort, locals_)
        trace.record(x)
    return trace


def _fedopt(
    problem: Quadratics,
    x0: Vector,
    cohorts: Cohorts,
    eta: Rates,
    steps: Steps,
    *,
    kind: str,
    server_lr: float,
    beta1: float,
    beta2: float,
    tau: float,
    v_init: float | Vector | None,
    bias_correction: bool,
    second_moment_of: str,
) -> Trace:
    """Reddi et al.; bias correction divides m and v (not Adagrad's v) as torch does, before tau is added."""
    x, m = x0, np.zeros_like(x0)
    v = np.full_like(x0, (0.0 if bias_correction and kind != "adagrad" else tau**2) if v_init is None else v_init)
    trace = Trace()
    for t, cohort in enumerate(cohorts):
        lr = at(eta, t)
        D = []
        for i in cohort:
            y = x
            for _ in range(at(steps, i)):
                y = y - lr * problem.gradient(i, y)
            D.append(y - x)
        q = problem.mean(cohort, D)
        m = beta1 * m + (1 - beta1) * q
        r = {"displacement": q, "momentum": m}[second_moment_of] ** 2
        if kind == "adagrad":
            v = v + r
        elif kind == "yogi":
            v = v - (1 - beta2) * r * np.sign(v - r)
        else:
            v = beta2 * v + (1 - beta2) * r
        m_hat, v_hat = m, v
        if bias_correction:
            m_hat = m / (1 - beta1 ** (t + 1))
            v_hat = v if kind == "adagrad" else v / (1 - beta2 ** (t + 1))
        x = x + server_lr * m_hat / (np.sqrt(v_hat) + tau)
        trace.record(x, {"m": m, "v": v})
    return trace


Moment = Literal["displacement", "momentum"]


def fedadam(
    problem: Quadratics,
    x0: Vector,
    cohorts: Cohorts,
    eta: Rates,
    steps: Steps,
    *,
    server_lr: float = 0.1,
    beta1: float = 0.9,
    beta2: float = 0.99,
    tau: float = 1e-3,
    v_init: float | Vector | None = None,
    bias_correction: bool = False,
    second_moment_of: Moment = "displacement",
) -> Trace:
    return _fedopt(**locals(), kind="adam")


def fedyogi(
    problem: Quadratics,
    x0: Vector,
    cohorts: Cohorts,
    eta: Rates,
    steps: Steps,
    *,
    server_lr: float = 0.1,
    beta1: float = 0.9,
    beta2: float = 0.99,
    tau: float = 1e-3,
    v_init: float | Vector | None = None,
    bias_correction: bool = False,
    second_moment_of: Moment = "displacement",
) -> Trace:
    return _fedopt(**locals(), kind="yogi")


def fedadagrad(
    problem: Quadratics,
    x0: Vector,
    cohorts: Cohorts,
    eta: Rates,
    steps: Steps,
    *,
    server_lr: float = 0.1,
    beta1: float = 0.0,
    tau: float = 1e-3,
    v_init: float | Vector | None = None,
    bias_correction: bool = False,
    second_moment_of: Moment = "displacement",
) -> Trace:
    return _fedopt(**locals(), kind="adagrad", beta2=0.0)


def fedacg(
    problem: Quadratics,
    x0: Vector,
    cohorts: Cohorts,
    eta: Rates,
    steps: Steps,
    *,
    lam: float = 0.85,
    beta: float = 0.002,
) -> Trace:
    """Clients start from the look-ahead z = x + lam m."""
    x, m, trace = x0, np.zeros_like(x0), Trace()
    for t, cohort in enumerate(cohorts):
        lr = at(eta, t)
        z = x + lam * m
        D = []
        for i in cohort:
            y = z
            for _ in range(at(steps, i)):
                y = y - lr * (problem.gradient(i, y) + beta * (y - z))
            D.append(y - z)
        m = lam * m + np.mean(D, 0)
        x = x + m
        trace.record(x, {"m": m, "z": z})
    return trace


def fedcm(
    problem: Quadratics,
    x0: Vector,
    cohorts: Cohorts,
    eta: Rates,
    steps: Steps,
    *,
    alpha: float = 0.1,
    server_lr: float = 1.0,
) -> Trace:
    """Dlt is the mean of (z - y_K)/H_i, a gradient."""
    x, Dlt, trace = x0, np.zeros_like(x0), Trace()
    for t, cohort in enumerate(cohorts):
        lr = at(eta, t)
        D, u = [], []
        for i in cohort:
            y, K = x, at(steps, i)
            for _ in range(K):
                y = y - lr * (alpha * problem.gradient(i, y) + (1 - alpha) * Dlt)
            D.append(y - x)
            u.append((x - y) / (K * lr))
        Dlt = np.mean(u, 0)
        x = x + server_lr * np.mean(D, 0)
        trace.record(x, {"Dlt": Dlt})
    return trace


def mime(
    problem: Quadratics,
    x0: Vector,
    cohorts: Cohorts,
    eta: Rates,
    steps: Steps,
    *,
    beta: float = 0.0,
    form: Literal["fedjax", "ema"] = "fedjax",
    server_lr: float = 1.0,
) -> Trace:
    """beta = 0 is MIME with plain SGD; the momentum is frozen within a round."""
    x, m, trace = x0, np.zeros_like(x0), Trace()
    fresh = 1.0 if form == "fedjax" else 1 - beta
    for t, cohort in enumerate(cohorts):
        lr = at(eta, t)
        G = problem.mean(cohort, [problem.gradient(i, x) for i in cohort])
        D = []
        for i in cohort:
            y = x
            for _ in range(at(steps, i)):
                q = problem.gradient(i, y) - problem.gradient(i, x) + G
                y = y - lr * (fresh * q + beta * m)
            D.append(y - x)
        m = fresh * G + beta * m
        x = x + server_lr * problem.mean(cohort, D)
        trace.record(x, {"m": m})
    return trace


def mimelite(
    problem: Quadratics,
    x0: Vector,
    cohorts: Cohorts,
    eta: Rates,
    steps: Steps,
    *,
    beta: float = 0.0,
    form: Literal["fedjax", "ema"] = "fedjax",
    server_lr: float = 1.0,
) -> Trace:
    x, m, trace = x0, np.zeros_like(x0), Trace()
    fresh = 1.0 if form == "fedjax" else 1 - beta
    for t, cohort in enumerate(cohorts):
        lr = at(eta, t)
        G = problem.mean(cohort, [problem.gradient(i, x) for i in cohort])
        D = []
        for i in cohort:
            y = x
            for _ in range(at(steps, i)):
                y = y - lr * (fresh * problem.gradient(i, y) + beta * m)
            D.append(y - x)
        m = fresh * G + beta * m
        x = x + server_lr * problem.mean(cohort, D)
        trace.record(x, {"m": m})
    return trace


def fedswa(
    problem: Quadratics,
    x0: Vector,
    cohorts: Cohorts,
    eta: Rates,
    steps: Steps,
    *,
    final_lr: float = 0.1,
    server_lr: float = 1.5,
) -> Trace:
    """final_lr is the paper's rho, server_lr its alpha."""
    x, trace = x0, Trace()
    for t, cohort in enumerate(cohorts):
        D = []
        for i in cohort:
            y = x
            for lr in linear_rates(at(eta, t), at(steps, i), final_lr):
                y = y - lr * problem.gradient(i, y)
            D.append(y - x)
        x = x + server_lr * np.mean(D, 0)
        trace.record(x)
    return trace
