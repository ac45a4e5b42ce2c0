"""Methods that evaluate the gradient at a perturbed point, with or without a drift correction."""

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from .plain import Cohorts, Rates, Steps
from .problem import Quadratics
from .trace import Trace, Vector, at, unit

Direction = Literal["client", "global"]


def fedsam(problem: Quadratics, x0: Vector, cohorts: Cohorts, eta: Rates, steps: Steps, *, rho: float = 0.05) -> Trace:
    x, trace = x0, Trace()
    for t, cohort in enumerate(cohorts):
        lr = at(eta, t)
        locals_ = []
        for i in cohort:
            y = x
            for _ in range(at(steps, i)):
                e = rho * unit(problem.gradient(i, y))
                y = y - lr * problem.gradient(i, y + e)
            locals_.append(y)
        x = problem.mean(cohort, locals_)
        trace.record(x)
    return trace


def fedasam(
    problem: Quadratics,
    x0: Vector,
    cohorts: Cohorts,
    eta: Rates,
    steps: Steps,
    *,
    rho: float = 0.5,
    asam_eta: float = 0.2,
    weight_mask: NDArray[np.bool_] | None = None,
    scope: Literal["weight", "all"] = "weight",
) -> Trace:
    """T = |w| + asam_eta where the mask says "weight" and 1 elsewhere; scope "all": T = |w| everywhere, no asam_eta."""
    mask = np.ones(len(x0), bool) if weight_mask is None else weight_mask
    x, trace = x0, Trace()
    for t, cohort in enumerate(cohorts):
        lr = at(eta, t)
        locals_ = []
        for i in cohort:
            y = x
            for _ in range(at(steps, i)):
                T = np.abs(y) if scope == "all" else np.where(mask, np.abs(y) + asam_eta, 1.0)
                e = rho * T * unit(T * problem.gradient(i, y))
                y = y - lr * problem.gradient(i, y + e)
            locals_.append(y)
        x = problem.mean(cohort, locals_)
        trace.record(x)
    return trace


def mofedsam(
    problem: Quadratics, x0: Vector, cohorts: Cohorts, eta: Rates, steps: Steps, *, rho: float = 0.1, alpha: float = 0.1
) -> Trace:
    x, Dlt, trace = x0, np.zeros_like(x0), Trace()
    for t, cohort in enumerate(cohorts):
        lr = at(eta, t)
        D, u = [], []
        for i in cohort:
            y, K = x, at(steps, i)
            for _ in range(K):
                e = rho * unit(problem.gradient(i, y))
                y = y - lr * (alpha * problem.gradient(i, y + e) + (1 - alpha) * Dlt)
            D.append(y - x)
            u.append((x - y) / (K * lr))
        Dlt = np.mean(u, 0)
        x = x + np.mean(D, 0)
        trace.record(x, {"Dlt": Dlt})
    return trace


def fedgamma(problem: Quadratics, x0: Vector, cohorts: Cohorts, eta: Rates, steps: Steps, *, rho: float = 0.1) -> Trace:
    x, c, c_i = x0, np.zeros_like(x0), np.zeros((problem.N, len(x0)))
    trace = Trace()
    for t, cohort in enumerate(cohorts):
        lr = at(eta, t)
        D, dc = [], []
        for i in cohort:
            y, K = x, at(steps, i)
            for _ in range(K):
                e = rho * unit(problem.gradient(i, y))
                y = y - lr * (problem.gradient(i, y + e) - c_i[i] + c)
            new = c_i[i] - c + (x - y) / (K * lr)
            D.append(y - x)
            dc.append(new - c_i[i])
            c_i[i] = new
        x = x + np.mean(D, 0)
        c = c + np.sum(dc, 0) / problem.N
        trace.record(x, {"c": c}, {"c": c_i})
    return trace


def fedspeed(
    problem: Quadratics,
    x0: Vector,
    cohorts: Cohorts,
    eta: Rates,
    steps: Steps,
    *,
    rho: float = 0.1,
    share: float = 1.0,
    alpha: float = 0.1,
    dual_scope: Literal["active", "all"] = "all",
    normalise: bool = True,
) -> Trace:
    """share is the paper's alpha, alpha its 1/lambda; dual_scope is "active" in the paper, "all" in FL-Simulator."""
    x, ghat, trace = x0, np.zeros((problem.N, len(x0))), Trace()
    for t, cohort in enumerate(cohorts):
        lr = at(eta, t)
        locals_ = []
        for i in cohort:
            y = x
            for _ in range(at(steps, i)):
                g1 = problem.gradient(i, y)
                g2 = problem.gradient(i, y + rho * (unit(g1) if normalise else g1))
                y = y - lr * ((1 - share) * g1 + share * g2 - ghat[i] + alpha * (y - x))
            ghat[i] = ghat[i] - alpha * (y - x)
            locals_.append(y)
        duals = ghat[cohort] if dual_scope == "active" else ghat
        x = np.mean(locals_, 0) - np.mean(duals, 0) / alpha
        trace.record(x, {}, {"ghat": ghat})
    return trace


def fedsmoo(
    problem: Quadratics,
    x0: Vector,
    cohorts: Cohorts,
    eta: Rates,
    steps: Steps,
    *,
    rho: float = 0.1,
    alpha: float = 0.1,
    s_source: Literal["paper", "dual"] = "paper",
) -> Trace:
    """alpha is lamb (the paper's 1/beta); a_i is FedDyn's dual in displacement units."""
    x, s = x0, np.zeros_like(x0)
    a, mu = np.zeros((problem.N, len(x0))), np.zeros((problem.N, len(x0)))
    trace = Trace()
    for t, cohort in enumerate(cohorts):
        lr = at(eta, t)
        locals_, uploads = [], []
        for i in cohort:
            y = x
            for _ in range(at(steps, i)):
                sh = rho * unit(problem.gradient(i, y) - mu[i] - s)
                mu[i] = mu[i] + sh - s
                y = y - lr * (problem.gradient(i, y + sh) + alpha * (y - x) + alpha * a[i])
            a[i] = a[i] + (y - x)
            locals_.append(y)
            uploads.append(mu[i] - sh if s_source == "paper" else mu[i].copy())
        s = rho * unit(np.mean(uploads, 0))
        x = np.mean(locals_, 0) + np.mean(a, 0)
        trace.record(x, {"s": s, "a": a.mean(0)}, {"a": a, "mu": mu})
    return trace


def fedlesam(
    problem: Quadratics,
    x0: Vector,
    cohorts: Cohorts,
    eta: Rates,
    steps: Steps,
    *,
    rho: float = 0.1,
    direction: Direction = "client",
) -> Trace:
    """Perturb towards the client's previously received model ("client") or the previous server model ("global")."""
    x, before, w_old, trace = x0, x0, {}, Trace()
    for t, cohort in enumerate(cohorts):
        lr = at(eta, t)
        locals_ = []
        for i in cohort:
            e = rho * unit((w_old.get(i, x) if direction == "client" else before) - x)
            w_old[i] = x
            y = x
            for _ in range(at(steps, i)):
                y = y - lr * problem.gradient(i, y + e)
            locals_.append(y)
        x, before = np.mean(locals_, 0), x
        trace.record(x, {"before": before}, {"w_old": w_old})
    return trace


def fedlesam_s(
    problem: Quadratics,
    x0: Vector,
    cohorts: Cohorts,
    eta: Rates,
    steps: Steps,
    *,
    rho: float = 0.1,
    direction: Direction = "client",
    cv_weight: float = 1.0,
) -> Trace:
    x, before, w_old = x0, x0, {}
    c, c_i = np.zeros_like(x0), np.zeros((problem.N, len(x0)))
    trace = Trace()
    for t, cohort in enumerate(cohorts):
        lr = at(eta, t)
        D, dc = [], []
        for i in cohort:
            e = rho * unit((w_old.get(i, x) if direction == "client" else before) - x)
            w_old[i] = x
            y, K = x, at(steps, i)
            for _ in range(K):
                y = y - lr * (problem.gradient(i, y + e) + cv_weight * (c - c_i[i]))
            new = c_i[i] - c + (x - y) / (K * lr)
            D.append(y - x)
            dc.append(new - c_i[i])
            c_i[i] = new
        x, before = x + np.mean(D, 0), x
        c = c + np.sum(dc, 0) / problem.N
        trace.record(x, {"c": c, "before": before}, {"c": c_i, "w_old": w_old})
    return trace


def fedlesam_d(
    problem: Quadratics,
    x0: Vector,
    cohorts: Cohorts,
    eta: Rates,
    steps: Steps,
    *,
    rho: float = 0.1,
    alpha: float = 0.1,
    direction: Direction = "client",
) -> Trace:
    x, before, w_old, a, trace = x0, x0, {}, np.zeros((problem.N, len(x0))), Trace()
    for t, cohort in enumerate(cohorts):
        lr = at(eta, t)
        locals_ = []
        for i in cohort:
            e = rho * unit((w_old.get(i, x) if direction == "client" else before) - x)
            w_old[i] = x
            y = x
            for _ in range(at(steps, i)):
                y = y - lr * (problem.gradient(i, y + e) + alpha * (y - x) + alpha * a[i])
            a[i] = a[i] + (y - x)
            locals_.append(y)
        x, before = np.mean(locals_, 0) + np.mean(a, 0), x
        trace.record(x, {"before": before, "a": a.mean(0)}, {"a": a, "w_old": w_old})
    return trace


def fedwmsam(
    problem: Quadratics,
    x0: Vector,
    cohorts: Cohorts,
    eta: Rates,
    steps: Steps,
    *,
    rho: float = 0.01,
    alpha0: float = 0.1,
    lam: float = 0.01,
    personal: bool = True,
    sign: float = 1.0,
    signal: Literal["agreement", "disagreement"] = "disagreement",
    server_lr: float = 1.0,
) -> Trace:
    """personal is the ablation's Mom (C2); sign +1 is the slide's perturbation, -1 the released one."""
    x, Dlt, c, c_i, alpha = x0, np.zeros_like(x0), np.zeros_like(x0), np.zeros((problem.N, len(x0))), alpha0
    trace = Trace()
    for t, cohort in enumerate(cohorts):
        lr = at(eta, t)
        D, u, dc, similarity = [], [], [], []
        for i in cohort:
            r = c - c_i[i] if personal else np.zeros_like(x0)
            y, K = x, at(steps, i)
            for b in range(K):
                e = sign * rho * unit(x + b * (Dlt + alpha / (1 - alpha) * r) - y) if rho else 0.0
                y = y - lr * (alpha * (problem.gradient(i, y + e) + r) + (1 - alpha) * Dlt)
            new = c_i[i] - c + (x - y) / (K * lr)
            D.append(y - x)
            u.append((x - y) / (K * lr))
            dc.append(new - c_i[i])
            c_i[i] = new
            scale = np.linalg.norm(y - x) * np.linalg.norm(Dlt)
            cosine = (y - x) @ Dlt / scale if scale else None
            similarity.append(0.0 if cosine is None else 1 + cosine if signal == "disagreement" else -cosine)
        alpha = (1 - lam) * alpha + lam * np.clip(np.mean(similarity), 0.1, 0.9)
        c = c + np.sum(dc, 0) / problem.N
        Dlt = np.mean(u, 0)
        x = x + server_lr * np.mean(D, 0)
        trace.record(x, {"Dlt": Dlt, "c": c, "alpha": alpha, "signal": np.mean(similarity)}, {"c": c_i})
    return trace
