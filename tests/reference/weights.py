"""Methods that choose the clients' weights: FedDisco, FedSCAM, FedAWA."""

from collections.abc import Callable
from typing import Literal

import numpy as np

from .plain import Cohorts, Rates, Steps
from .problem import Quadratics
from .trace import Trace, Vector, at, unit


def feddisco(
    problem: Quadratics,
    x0: Vector,
    cohorts: Cohorts,
    eta: Rates,
    steps: Steps,
    *,
    a: float = 0.5,
    b: float = 0.1,
    metric: Literal["kl", "l2"] = "kl",
) -> Trace:
    """The target is uniform over the classes; the weights of a round are recorded as `w`."""
    x, trace = x0, Trace()
    labels = problem.labels(problem.n)
    share, wanted = labels / labels.sum(1, keepdims=True), np.full(labels.shape[1], 1 / labels.shape[1])
    for t, cohort in enumerate(cohorts):
        D = [_descend(problem, i, x, at(eta, t), at(steps, i)) for i in cohort]
        d = []
        for i in cohort:
            if metric == "l2":
                d.append(np.linalg.norm(share[i] - wanted))
            else:
                d.append(sum(p * np.log(p / q) for p, q in zip(share[i], wanted, strict=True) if p > 0))
        if metric == "kl" and sum(d) > 0:
            d = np.array(d) / sum(d)
        p = problem.n[cohort] / problem.n[cohort].sum()
        w = np.maximum(0, p - a * np.array(d) + b)
        w = p if w.sum() == 0 else w / w.sum()
        x = x + w @ np.array(D)
        trace.record(x, {"w": w})
    return trace


def fedscam(
    problem: Quadratics,
    x0: Vector,
    cohorts: Cohorts,
    eta: Rates,
    steps: Steps,
    *,
    rho: float = 0.05,
    alpha: float = 1.0,
    gamma: float = 1.0,
    beta: float = 0.8,
    kappa: float = 1.0,
    pilot: Literal["step", "gradient"] = "step",
) -> Trace:
    """The pilot gradient is the client's full gradient; rho is the largest radius."""
    x, u, trace = x0, np.zeros_like(x0), Trace()
    for t, cohort in enumerate(cohorts):
        D, w = [], []
        for i in cohort:
            g = problem.gradient(i, x)
            c = unit(-g if pilot == "step" else g) @ u
            h = np.linalg.norm(g) * max(0, 1 - kappa * c)
            y = x
            for _ in range(at(steps, i)):
                ascent = rho / (1 + alpha * h) * unit(problem.gradient(i, y))
                y = y - at(eta, t) * problem.gradient(i, y + ascent)
            D.append(y - x)
            w.append(problem.n[i] / (1 + gamma * h) * max(0, 1 + beta * c))
        w = np.array(w) if sum(w) > 0 else problem.n[cohort]
        w = w / w.sum()
        step = w @ np.array(D)
        x, u = x + step, unit(step)
        trace.record(x, {"w": w, "u": u})
    return trace


def fedawa(
    problem: Quadratics,
    x0: Vector,
    cohorts: Cohorts,
    eta: Rates,
    steps: Steps,
    *,
    server_steps: int = 1,
    weights_lr: float = 1e-3,
    weights_from: Literal["before", "after"] = "before",
) -> Trace:
    """Adam with betas 0.5 and 0.999 on one logit per client; gradients by complex steps.

    A logit starts at the client's share of the samples of all clients, estimated from those of its cohort.
    """
    x, moved, trace = x0, np.zeros(problem.N), Trace()
    for t, cohort in enumerate(cohorts):
        D = np.array([_descend(problem, i, x, at(eta, t), at(steps, i)) for i in cohort])
        turn = np.array([1 - unit(x) @ unit(x + d) for d in D])

        def loss(logits: np.ndarray, D: np.ndarray = D, turn: np.ndarray = turn) -> complex:
            q = softmax(logits)
            spread = D - q @ D
            return q @ (np.sqrt((spread**2).sum(1)) + turn)

        initial = problem.n[cohort] / (problem.n[cohort].mean() * problem.N)
        logits, m, v = initial + moved[cohort], 0.0, 0.0
        for k in range(server_steps):
            before = softmax(logits)
            g = complex_step(loss, logits)
            m, v = 0.5 * m + 0.5 * g, 0.999 * v + 0.001 * g**2
            step = weights_lr * (m / (1 - 0.5 ** (k + 1))) / (np.sqrt(v / (1 - 0.999 ** (k + 1))) + 1e-8)
            logits = logits - step
        moved[cohort] = logits - initial
        w = before if weights_from == "before" else softmax(logits)
        x = w @ (x + D)
        trace.record(x, {"w": w, "moved": moved})
    return trace


def softmax(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits)
    return powers / powers.sum()


def complex_step(function: Callable[[np.ndarray], complex], at: np.ndarray) -> np.ndarray:
    """The gradient of a real analytic function, exact to rounding; zero where the function is not smooth."""
    return np.array([function(at + 1e-30j * e).imag / 1e-30 for e in np.eye(len(at))])


def _descend(problem: Quadratics, i: int, x: Vector, lr: float, steps: int) -> Vector:
    y = x
    for _ in range(steps):
        y = y - lr * problem.gradient(i, y)
    return y - x
