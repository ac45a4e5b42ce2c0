"""Methods with control variates or duals on the clients: SCAFFOLD, FedDyn, AdaBest, FedMo, FedMoSWA."""

from typing import Literal

import numpy as np

from .plain import Cohorts, Rates, Steps
from .problem import Quadratics
from .trace import Trace, Vector, at, linear_rates

Option = Literal["I", "II"]


def scaffold(
    problem: Quadratics,
    x0: Vector,
    cohorts: Cohorts,
    eta: Rates,
    steps: Steps,
    *,
    option: Option = "II",
    server_lr: float = 1.0,
    cv_weight: float = 1.0,
) -> Trace:
    x, c, c_i = x0, np.zeros_like(x0), np.zeros((problem.N, len(x0)))
    trace = Trace()
    for t, cohort in enumerate(cohorts):
        lr = at(eta, t)
        D, dc = [], []
        for i in cohort:
            y, K = x, at(steps, i)
            for _ in range(K):
                y = y - lr * (problem.gradient(i, y) + cv_weight * (c - c_i[i]))
            new = problem.gradient(i, x) if option == "I" else c_i[i] - c + (x - y) / (K * lr)
            D.append(y - x)
            dc.append(new - c_i[i])
            c_i[i] = new
        x = x + server_lr * np.mean(D, 0)
        c = c + np.sum(dc, 0) / problem.N
        trace.record(x, {"c": c}, {"c": c_i})
    return trace


def feddyn(
    problem: Quadratics, x0: Vector, cohorts: Cohorts, eta: Rates, steps: Steps, *, alpha: float = 0.01
) -> Trace:
    x, h, ghat = x0, np.zeros_like(x0), np.zeros((problem.N, len(x0)))
    last = np.tile(x0, (problem.N, 1))
    trace = Trace()
    for t, cohort in enumerate(cohorts):
        lr = at(eta, t)
        D = []
        for i in cohort:
            y = x
            for _ in range(at(steps, i)):
                y = y - lr * (problem.gradient(i, y) - ghat[i] + alpha * (y - x))
            ghat[i] = ghat[i] - alpha * (y - x)
            last[i] = y
            D.append(y - x)
        h = h - alpha / problem.N * np.sum(D, 0)
        active = np.mean(last[cohort], 0)
        x = active - h / alpha
        trace.record(x, {"h": h}, {"ghat": ghat, "y": last}, cloud=x, active_mean=active, all_mean=last.mean(0))
    return trace


def adabest(
    problem: Quadratics, x0: Vector, cohorts: Cohorts, eta: Rates, steps: Steps, *, mu: float = 0.02, beta: float = 0.9
) -> Trace:
    x, xbar, h_i, last = x0, x0, np.zeros((problem.N, len(x0))), np.zeros(problem.N)
    trace = Trace()
    for t, cohort in enumerate(cohorts, start=1):
        lr = at(eta, t - 1)
        locals_ = []
        for i in cohort:
            y = x
            for _ in range(at(steps, i)):
                y = y - lr * (problem.gradient(i, y) - h_i[i])
            h_i[i] = h_i[i] / (t - last[i]) + mu * (x - y)
            last[i] = t
            locals_.append(y)
        a = np.mean(locals_, 0)
        h = beta * (xbar - a)
        x, xbar = a - h, a
        trace.record(x, {"xbar": xbar, "h": h}, {"h": h_i, "last": last}, cloud=x, avg=a)
    return trace


def fedmo(
    problem: Quadratics,
    x0: Vector,
    cohorts: Cohorts,
    eta: Rates,
    steps: Steps,
    *,
    gamma: float = 0.2,
    option: Option = "II",
) -> Trace:
    x, m, c_i = x0, np.zeros_like(x0), np.zeros((problem.N, len(x0)))
    trace = Trace()
    for t, cohort in enumerate(cohorts):
        lr = at(eta, t)
        D = []
        for i in cohort:
            y, K = x, at(steps, i)
            for _ in range(K):
                y = y - lr * (problem.gradient(i, y) - c_i[i] + m)
            c_i[i] = problem.gradient(i, x) if option == "I" else c_i[i] - m + (x - y) / (K * lr)
            D.append(y - x)
        m = m + gamma * np.mean(c_i[cohort] - m, 0)
        x = x + np.mean(D, 0)
        trace.record(x, {"m": m}, {"c": c_i})
    return trace


def fedmoswa(
    problem: Quadratics,
    x0: Vector,
    cohorts: Cohorts,
    eta: Rates,
    steps: Steps,
    *,
    gamma: float = 0.2,
    final_lr: float = 0.1,
    server_lr: float = 1.5,
    option: Option = "II",
    gamma_first_round: float | None = None,
    normaliser: Literal["sum", "trapezoid"] = "sum",
) -> Trace:
    x, m, c_i = x0, np.zeros_like(x0), np.zeros((problem.N, len(x0)))
    trace = Trace()
    for t, cohort in enumerate(cohorts):
        D, upload = [], []
        for i in cohort:
            y, K = x, at(steps, i)
            rates = linear_rates(at(eta, t), K, final_lr)
            for lr in rates:
                y = y - lr * (problem.gradient(i, y) - c_i[i] + m)
            H = sum(rates) if normaliser == "sum" else K * (at(eta, t) + final_lr * at(eta, t)) / 2
            c_i[i] = problem.gradient(i, x) if option == "I" else c_i[i] - m + (x - y) / H
            D.append(y - x)
            upload.append(c_i[i] - m)
        m = m + (gamma_first_round if t == 0 and gamma_first_round is not None else gamma) * np.mean(upload, 0)
        x = x + server_lr * np.mean(D, 0)
        trace.record(x, {"m": m}, {"c": c_i})
    return trace
