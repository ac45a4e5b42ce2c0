"""Trace of a Hessian by Hutchinson's estimator: for Rademacher vectors z, E[z . H z] = tr H.

Known eigenvectors are deflated first, because they contribute most of the variance. With their projector Q,

    tr H = sum_i v_i . H v_i + tr (1 - Q) H (1 - Q).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedflat.errors import UserError
from fedflat.flatness.curvature.lanczos import Krylov
from fedflat.flatness.curvature.operator import Operator
from fedflat.flatness.estimate import Estimate, estimate
from fedflat.flatness.precision import rounding

DRAWS = 30


def hutchinson(
    operator: Operator,
    *,
    draws: int = DRAWS,
    seed: int = 0,
    values: Tensor | None = None,
    vectors: Tensor | None = None,
    progress: Callable[[int], None] = lambda done: None,
) -> Estimate:
    """The trace with its confidence interval from ``draws`` products; ``values`` [k] and ``vectors`` [k, P] are
    deflated.
    """
    check_draws(draws)
    samples = []
    with rounding(allowed=False), torch.no_grad():
        for number in range(draws):
            probe = operator.signs(seed, "trace", number)
            if vectors is not None:
                probe -= (vectors @ probe) @ vectors
            samples.append((probe @ operator(probe[None])[0]).double())
            progress(number + 1)
    known = 0.0 if values is None else float(values.sum())
    return estimate(torch.stack(samples).tolist(), known)


def check_draws(draws: int) -> None:
    """Reject fewer than two draws, which give no interval."""
    if draws < 2:
        raise UserError(f"draws={draws} is invalid; a confidence interval needs at least 2")


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
