"""The density of a Hessian's eigenvalues by stochastic Lanczos quadrature.

For a random unit vector z, ``m`` steps of Lanczos give nodes theta_i (the eigenvalues of T) and weights (the squared first components of
its eigenvectors) with ``sum_i weight_i p(theta_i) = z . p(H) z`` for every polynomial p of degree up to 2m - 1; over random z the mean of
that is tr p(H) / P.
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
    """A distribution of eigenvalues as nodes with weights, for each of several random vectors."""

    nodes: tuple[np.ndarray, ...]
    weights: tuple[np.ndarray, ...]
    products: int

    def moment(self, power: int) -> Estimate:
        """The mean of eigenvalue^power, which is tr H^power / P."""
        return estimate(
            [float(weights @ nodes**power) for nodes, weights in zip(self.nodes, self.weights, strict=True)]
        )

    def at(self, points: np.ndarray, width: float | None = None) -> np.ndarray:
        """The density at some points, each node spread over a Gaussian; by default as wide as a hundredth of the spectrum."""
        nodes, weights = np.concatenate(self.nodes), np.concatenate(self.weights) / len(self.nodes)
        width = width or self.default_width
        apart = (np.asarray(points)[:, None] - nodes) / width
        return np.asarray(np.exp(-(apart**2) / 2) @ weights / (width * np.sqrt(2 * np.pi)))

    def grid(self, count: int = 500) -> np.ndarray:
        """Points from end to end of the spectrum."""
        nodes = np.concatenate(self.nodes)
        return np.linspace(nodes.min() - 3 * self.default_width, nodes.max() + 3 * self.default_width, count)

    @property
    def default_width(self) -> float:
        """A hundredth of the spectrum's width."""
        nodes = np.concatenate(self.nodes)
        return float(np.ptp(nodes)) / 100 or max(abs(float(nodes[0])), 1.0) / 100

    def document(self) -> dict[str, list[list[float]]]:
        """As plain values."""
        return {"nodes": [part.tolist() for part in self.nodes], "weights": [part.tolist() for part in self.weights]}


def quadrature(
    operator: Operator,
    *,
    draws: int = 5,
    steps: int = 80,
    seed: int = 0,
    tell: Callable[[int], None] = lambda done: None,
) -> Density:
    """The density from ``draws`` random vectors and ``steps`` products for each."""
    if draws < 1 or steps < 1:
        raise UserError(f"{draws} vectors with {steps} steps each are not possible; expected at least 1 of each")
    before, nodes, weights = operator.products, [], []
    with rounding(allowed=False), torch.no_grad():
        for number in range(draws):
            space = Krylov(operator, min(steps, operator.size), seed, operator.signs(seed, "density", number))
            while not space.full:
                space.step()
                tell(operator.products - before)
                if space.invariant:
                    break
            ritz = space.ritz()
            nodes.append(ritz.values)
            weights.append(ritz.vectors[0] ** 2)
            del space  # so that two bases are never in memory at once
    return Density(tuple(nodes), tuple(weights), operator.products - before)
