"""Methods with local optimisers: Local AdamW, FedAdamW, Local Muon and FedMuon."""

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from .plain import Cohorts, Rates, Steps
from .problem import Quadratics
from .trace import Trace, Vector, at

Matrix = NDArray[np.float64]


def local_adamw(
    problem: Quadratics,
    x0: Vector,
    cohorts: Cohorts,
    eta: Rates,
    steps: Steps,
    *,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
) -> Trace:
    x, trace = x0, Trace()
    for t, cohort in enumerate(cohorts):
        lr = at(eta, t)
        D = []
        for i in cohort:
            y, m, v = x, np.zeros_like(x), np.zeros_like(x)
            for k in range(at(steps, i)):
                g = problem.gradient(i, y)
                m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g**2
                m_hat, v_hat = m / (1 - beta1 ** (k + 1)), v / (1 - beta2 ** (k + 1))
                y = (1 - lr * weight_decay) * y - lr * m_hat / (np.sqrt(v_hat) + eps)
            D.append(y - x)
        x = x + problem.mean(cohort, D)
        trace.record(x)
    return trace


def fedadamw(
    problem: Quadratics,
    x0: Vector,
    cohorts: Cohorts,
    eta: Rates,
    steps: Steps,
    *,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    gamma: float = 0.5,
    second_moment: Literal["tensor", "weight"] = "tensor",
    m_steps: Literal["round", "run"] = "round",
    weight_decay: float = 0.0,
) -> Trace:
    """The second moment starts from the clients' mean, optionally averaged over each tensor."""
    x, v_server, last, trace = x0, np.zeros_like(x0), np.zeros_like(x0), Trace()
    for t, cohort in enumerate(cohorts):
        lr = at(eta, t)
        ratio = lr / at(eta, t - 1) if t else 1.0
        D, seconds = [], []
        for i in cohort:
            y, m, v, K = x, np.zeros_like(x), v_server, at(steps, i)
            for k in range(K):
                g = problem.gradient(i, y)
                m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g**2
                s = t * K + k + 1
                j = k + 1 if m_steps == "round" else s
                step = m / (1 - beta1**j) / (np.sqrt(v / (1 - beta2**s)) + eps)
                y = (1 - lr * weight_decay) * y - lr * step + gamma / K * ratio * last
            D.append(y - x)
            seconds.append(v)
        last = problem.mean(cohort, D)
        x, v_server = x + last, np.mean(seconds, 0)
        if second_moment == "tensor":
            v_server = np.concatenate([np.full(len(p), p.mean()) for p in _pieces(problem, v_server)])
        trace.record(x, {"v": v_server, "last": last, "lr": lr})
    return trace


def local_muon(
    problem: Quadratics,
    x0: Vector,
    cohorts: Cohorts,
    eta: Rates,
    steps: Steps,
    *,
    beta: float = 0.95,
    alpha: float = 0.5,
    orthogonalise: Literal["ns5", "exact"] = "ns5",
    weight_decay: float = 0.0,
) -> Trace:
    x, trace = x0, Trace()
    for t, cohort in enumerate(cohorts):
        D = []
        for i in cohort:
            y, M, moments = x, np.zeros_like(x), np.zeros((2, len(x)))
            for k in range(at(steps, i)):
                step, M, moments = _muon_step(problem, i, y, M, moments, k, beta, alpha, orthogonalise, weight_decay)
                y = y - at(eta, t) * step
            D.append(y - x)
        x = x + problem.mean(cohort, D)
        trace.record(x)
    return trace


def fedmuon(
    problem: Quadratics,
    x0: Vector,
    cohorts: Cohorts,
    eta: Rates,
    steps: Steps,
    *,
    beta: float = 0.98,
    alpha: float = 0.5,
    gamma: float = 0.5,
    orthogonalise: Literal["ns5", "exact"] = "ns5",
    weight_decay: float = 0.0,
) -> Trace:
    """The momentum of matrices starts from the clients' mean; Adam's moments of other tensors start at zero."""
    x, M_server, last, trace = x0, np.zeros_like(x0), np.zeros_like(x0), Trace()
    for t, cohort in enumerate(cohorts):
        lr = at(eta, t)
        ratio = lr / at(eta, t - 1) if t else 1.0
        D, momenta = [], []
        for i in cohort:
            y, M, moments, K = x, M_server, np.zeros((2, len(x))), at(steps, i)
            for k in range(K):
                step, M, moments = _muon_step(problem, i, y, M, moments, k, beta, alpha, orthogonalise, weight_decay)
                y = y - lr * (1 - gamma) * step + gamma / K * ratio * last
            D.append(y - x)
            momenta.append(M)
        last = problem.mean(cohort, D)
        x, M_server = x + last, np.mean(momenta, 0)
        trace.record(x, {"M": M_server, "last": last, "lr": lr})
    return trace


def _muon_step(
    problem: Quadratics,
    i: int,
    y: Vector,
    M: Vector,
    moments: Matrix,
    k: int,
    beta: float,
    alpha: float,
    orthogonalise: str,
    weight_decay: float,
) -> tuple[Vector, Vector, Matrix]:
    """The step of learning rate 1 with its weight decay, the momentum of matrices (0 elsewhere), and Adam's moments."""
    g = problem.gradient(i, y)
    moments = np.array([0.9 * moments[0] + 0.1 * g, 0.95 * moments[1] + 0.05 * g**2])
    adam = moments[0] / (1 - 0.9 ** (k + 1)) / (np.sqrt(moments[1] / (1 - 0.95 ** (k + 1))) + 1e-10)
    step, new_M = adam + weight_decay * y, np.zeros_like(M)
    start = 0
    for shape in problem.shapes:
        piece = slice(start, start + int(np.prod(shape)))
        start = piece.stop
        if len(shape) < 2:
            continue
        rows, columns = shape[0], int(np.prod(shape[1:]))
        new_M[piece] = beta * M[piece] + (1 - beta) * g[piece]
        u = ((1 - beta) * g[piece] + beta * new_M[piece]).reshape(rows, columns)
        O = ns5(u) if orthogonalise == "ns5" else polar(u)  # noqa: E741
        step[piece] = alpha * (max(1.0, rows / columns) ** 0.5 * O.ravel() + weight_decay * y[piece])
    return step, new_M, moments


def ns5(u: Matrix) -> Matrix:
    """Five Newton-Schulz steps of Muon's quintic polynomial."""
    if u.shape[0] > u.shape[1]:
        return ns5(u.T).T
    X = u / (np.linalg.norm(u) + 1e-7)
    for _ in range(5):
        A = X @ X.T
        X = 3.4445 * X + (-4.7750 * A + 2.0315 * A @ A) @ X
    return X


def polar(u: Matrix) -> Matrix:
    """U V' of the singular value decomposition."""
    U, _, V = np.linalg.svd(u, full_matrices=False)
    return U @ V


def _pieces(problem: Quadratics, x: Vector) -> list[Vector]:
    """The entries of every tensor."""
    return np.split(x, np.cumsum([int(np.prod(shape)) for shape in problem.shapes])[:-1])
