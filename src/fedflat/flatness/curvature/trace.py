"""Trace and spectral density of a Hessian, estimated from random vectors.

``estimate_trace`` uses Hutchinson's estimator: for Rademacher vectors z, E[z . H z] = tr H. Known eigenvectors are
deflated first, because they contribute most of the variance. With Q, the orthogonal projection onto the known
eigenvectors v_i,

    tr H = sum_i v_i . H v_i + tr (1 - Q) H (1 - Q).

Hutch++ (Meyer et al. 2021) spends a third of the products on finding a subspace that H stretches most, and
a third on the exact trace within it, in place of known eigenvectors. If few eigenvalues dominate, m products give an
error of order 1/m instead of 1/sqrt(m).

``lanczos_quadrature`` estimates the density, 1/P sum_i delta(x - lambda_i): the Ritz values of a Lanczos basis started
from z are nodes, and the squared first components of the Ritz vectors their weights (Ghorbani et al. 2019).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedflat.errors import UserError, one_of
from fedflat.flatness.curvature.krylov import Krylov
from fedflat.flatness.curvature.operator import Operator
from fedflat.flatness.estimate import Estimate, estimate
from fedflat.flatness.precision import tf32_allowed

DRAWS = 30
"""Default number of random vectors for the trace."""
ESTIMATORS = {"hutchinson": 2, "hutch++": 4}
"""Estimators of the trace, with the fewest draws from which each gives a confidence interval."""


def estimate_trace(
    operator: Operator,
    *,
    draws: int = DRAWS,
    estimator: str = "hutchinson",
    seed: int = 0,
    values: Tensor | None = None,
    vectors: Tensor | None = None,
    progress: Callable[[int], None] = lambda products: None,
) -> Estimate:
    """Estimate the trace of H, with a confidence interval, as the mean of z' H z over random sign vectors z.

    Args:
        operator: the symmetric matrix.
        draws: number of products; with ``hutch++``, a third of them is random, and gives the confidence interval.
        estimator: ``hutchinson`` or ``hutch++``.
        seed: seed of the random vectors.
        values: known eigenvalues [k], which are added exactly; only the rest of the trace is estimated.
        vectors: the eigenvectors [k, P] of these eigenvalues, which are removed from the random vectors.
        progress: called with the number of products so far.
    """
    check_draws(draws, estimator)
    samples, spent = [], 0
    with tf32_allowed(False), torch.no_grad():
        if estimator == "hutch++":
            inside, vectors = _stretched_subspace(operator, draws // 3, seed, vectors)
            values = inside if values is None else torch.cat([values, inside])
            draws, spent = draws - 2 * (draws // 3), 2 * len(inside)
        for number in range(draws):
            probe = operator.rademacher(seed, "trace", number)
            if vectors is not None:  # their part of the trace is added exactly below
                probe -= (vectors @ probe) @ vectors
            samples.append((probe @ operator(probe[None])[0]).double())
            progress(spent + number + 1)
    known_trace = 0.0 if values is None else float(values.sum())
    return estimate(torch.stack(samples).tolist(), offset=known_trace)


def _stretched_subspace(operator: Operator, count: int, seed: int, vectors: Tensor | None) -> tuple[Tensor, Tensor]:
    """Find a subspace that H stretches most, for Hutch++.

    Args:
        operator: the matrix H.
        count: dimension of the subspace, at most the number of dimensions orthogonal to ``vectors``.
        seed: seed of the random vectors from which it is found.
        vectors: known eigenvectors [k, P], to which it is orthogonal.

    Returns:
        The numbers v . H v of its orthonormal basis [count], and the known eigenvectors with this basis [k + count, P].
    """
    eigenvectors = torch.zeros(0, operator.size) if vectors is None else vectors
    eigenvectors = eigenvectors.to(operator.device, operator.dtype)
    count = min(count, operator.size - len(eigenvectors))
    if not count:
        return torch.zeros(0), eigenvectors
    sketch = operator(torch.stack([operator.rademacher(seed, "sketch", number) for number in range(count)]))
    smallest = torch.finfo(sketch.dtype).eps * operator.size**0.5 * sketch.norm(dim=1).max()
    for _ in range(2):  # once leaves rounding errors, twice is orthogonal to working precision
        sketch = sketch - (sketch @ eigenvectors.T) @ eigenvectors
        orthonormal, triangular = torch.linalg.qr(sketch.T)
        # If nothing but rounding errors is left of a vector, QR replaces it by an arbitrary one.
        sketch = orthonormal.T[triangular.diagonal().abs() > smallest]
        smallest = smallest.new_zeros(())
    if not len(sketch):
        return torch.zeros(0, dtype=torch.float64), eigenvectors
    return (sketch * operator(sketch)).sum(1).double().cpu(), torch.cat([eigenvectors, sketch])


def check_draws(draws: int, estimator: str = "hutchinson", name: str = "draws", or_none: str = "") -> None:
    """Raise a ``UserError`` for an unknown estimator, or for too few draws, which give no interval.

    For the message, ``name`` is the name of the argument, and ``or_none`` what else it may be.
    """
    if estimator not in ESTIMATORS:
        raise one_of("trace estimator", estimator, tuple(ESTIMATORS))
    least = ESTIMATORS[estimator]
    if draws < least:
        raise UserError(
            f"{name}={draws} is invalid; expected {or_none}at least {least}, which a confidence interval needs with "
            f"{estimator}"
        )


@dataclass(frozen=True)
class Density:
    """Quadrature nodes and weights of the spectral density, one pair of arrays per random vector."""

    nodes: tuple[np.ndarray, ...]
    """Approximate eigenvalues, one array per random vector."""
    weights: tuple[np.ndarray, ...]
    """Weight of each node; the weights of a random vector sum to 1."""
    products: int
    """Number of Hessian-vector products that were computed."""

    def moment(self, power: int) -> Estimate:
        """Estimate the mean of eigenvalue^power over all P eigenvalues of H, i.e. tr(H^power) / P."""
        return estimate(
            [float(weights @ nodes**power) for nodes, weights in zip(self.nodes, self.weights, strict=True)]
        )

    def at(self, points: np.ndarray, width: float | None = None) -> np.ndarray:
        """Return the spectral density at ``points`` [n]: every eigenvalue is smoothed into a Gaussian.

        Args:
            points: eigenvalues at which to evaluate the density.
            width: standard deviation of the Gaussian, in units of eigenvalues; default: ``default_width``.
        """
        nodes, weights = np.concatenate(self.nodes), np.concatenate(self.weights) / len(self.nodes)
        width = width or self.default_width
        distances = (np.asarray(points)[:, None] - nodes) / width
        return np.asarray(np.exp(-(distances**2) / 2) @ weights / (width * np.sqrt(2 * np.pi)))

    def grid(self, count: int = 500) -> np.ndarray:
        """Return ``count`` evenly spaced points that cover the spectrum and the tails of its Gaussian smoothing."""
        nodes, margin = np.concatenate(self.nodes), 3 * self.default_width
        return np.linspace(nodes.min() - margin, nodes.max() + margin, count)

    @property
    def default_width(self) -> float:
        """Default width of the Gaussians: 1/100 of the spectrum's width, or of max(|eigenvalue|, 1) if that is zero."""
        nodes = np.concatenate(self.nodes)
        return float(np.ptp(nodes)) / 100 or max(abs(float(nodes[0])), 1.0) / 100

    def document(self) -> dict[str, list[list[float]]]:
        """Return nodes and weights as JSON-compatible lists."""
        return {"nodes": [part.tolist() for part in self.nodes], "weights": [part.tolist() for part in self.weights]}


def lanczos_quadrature(
    operator: Operator,
    *,
    draws: int = 5,
    steps: int = 80,
    seed: int = 0,
    progress: Callable[[int], None] = lambda products: None,
) -> Density:
    """Estimate the spectral density by stochastic Lanczos quadrature.

    For each random vector, the Ritz values of a Lanczos basis started from it are the quadrature's nodes, and the
    squared first components of the Ritz vectors their weights.

    Args:
        operator: the symmetric matrix.
        draws: number of random vectors.
        steps: Hessian-vector products per random vector.
        seed: seed of the random vectors.
        progress: called with the number of products so far.
    """
    if draws < 1 or steps < 1:
        raise UserError(f"draws={draws}, steps={steps} is invalid; expected at least 1 of each")
    products, nodes, weights = 0, [], []
    with tf32_allowed(False), torch.no_grad():
        for number in range(draws):
            space = Krylov(operator, steps, seed, operator.rademacher(seed, "density", number))
            while not space.is_full:
                space.step()
                products += 1
                progress(products)
                if space.is_invariant:  # further steps would not change the nodes
                    break
            ritz = space.ritz()
            nodes.append(ritz.values)
            weights.append(ritz.vectors[0] ** 2)
            del space  # free the basis before the next one is allocated
    return Density(tuple(nodes), tuple(weights), products)
