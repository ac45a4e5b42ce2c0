"""Spectral density of a Hessian by stochastic Lanczos quadrature.

For a random unit vector z, ``m`` Lanczos steps give nodes theta_i (the eigenvalues of T) and weights (the squared first
components of its eigenvectors) with ``sum_i weight_i p(theta_i) = z . p(H) z`` for every polynomial p of degree at most
2m - 1. The mean over random z is tr p(H) / P.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from fedflat.errors import UserError
from fedflat.flatness.curvature.krylov import Krylov
from fedflat.flatness.curvature.operator import Operator
from fedflat.flatness.estimate import Estimate, estimate
from fedflat.flatness.precision import rounding


@dataclass(frozen=True)
class Density:
    """Quadrature nodes and weights of the spectral density, one pair of arrays per random vector."""

    nodes: tuple[np.ndarray, ...]
    weights: tuple[np.ndarray, ...]
    products: int

    def moment(self, power: int) -> Estimate:
        """The mean of eigenvalue^power, i.e. tr H^power / P."""
        return estimate(
            [float(weights @ nodes**power) for nodes, weights in zip(self.nodes, self.weights, strict=True)]
        )

    def at(self, points: np.ndarray, width: float | None = None) -> np.ndarray:
        """The density at ``points``, smoothed by a Gaussian of standard deviation ``width``."""
        nodes, weights = np.concatenate(self.nodes), np.concatenate(self.weights) / len(self.nodes)
        width = width or self.default_width
        z = (np.asarray(points)[:, None] - nodes) / width
        return np.asarray(np.exp(-(z**2) / 2) @ weights / (width * np.sqrt(2 * np.pi)))

    def grid(self, count: int = 500) -> np.ndarray:
        """``count`` evenly spaced points that cover the spectrum."""
        nodes = np.concatenate(self.nodes)
        return np.linspace(nodes.min() - 3 * self.default_width, nodes.max() + 3 * self.default_width, count)

    @property
    def default_width(self) -> float:
        """One hundredth of the spectrum's width."""
        nodes = np.concatenate(self.nodes)
        return float(np.ptp(nodes)) / 100 or max(abs(float(nodes[0])), 1.0) / 100

    def document(self) -> dict[str, list[list[float]]]:
        """All values as JSON-compatible lists."""
        return {"nodes": [part.tolist() for part in self.nodes], "weights": [part.tolist() for part in self.weights]}


def quadrature(
    operator: Operator,
    *,
    draws: int = 5,
    steps: int = 80,
    seed: int = 0,
    progress: Callable[[int], None] = lambda done: None,
) -> Density:
    """The density from ``draws`` random vectors with ``steps`` Hessian-vector products each."""
    if draws < 1 or steps < 1:
        raise UserError(f"draws={draws}, steps={steps} is invalid; expected at least 1 of each")
    before, nodes, weights = operator.products, [], []
    with rounding(allowed=False), torch.no_grad():
        for number in range(draws):
            space = Krylov(operator, min(steps, operator.size), seed, operator.signs(seed, "density", number))
            while not space.full:
                space.step()
                progress(operator.products - before)
                if space.invariant:
                    break
            ritz = space.ritz()
            nodes.append(ritz.values)
            weights.append(ritz.vectors[0] ** 2)
            del space  # free the basis before the next one is allocated
    return Density(tuple(nodes), tuple(weights), operator.products - before)
