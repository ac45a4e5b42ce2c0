"""Flatness relative to the size of the weights: relative flatness, Fisher-Rao norm and PAC-Bayes sharpness.

Rescaling the weights of consecutive ReLU layers can change the Hessian without changing the function. These measures
take the weights into account:

    relative flatness   sum over s, s' of <w_s, w_s'> tr H_ss'       (Petzka et al. 2021)
    Fisher-Rao norm     sqrt(w' F w)                                 (Liang et al. 2019)
    PAC-Bayes sigma     the largest sigma with E f(w + sigma u) - f(w) <= rise   (Jiang et al. 2020)

w_s are the rows of one layer's weights, i.e. the weights of its output s, and H_ss' the second derivatives with respect
to w_s and w_s'. F is the empirical Fisher matrix of all weights. u is standard normal; in the magnitude-aware variant,
entry i of the perturbation has the variance sigma^2 w_i^2 + 1e-6. The relative flatness, the Fisher-Rao norm and, up to
the constant 1e-6, the magnitude-aware sigma are invariant to layer-wise rescaling.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from fedflat.errors import UserError, one_of
from fedflat.flatness.curvature.operator import Operator
from fedflat.flatness.curvature.trace import DRAWS, check_draws
from fedflat.flatness.estimate import Estimate, estimate
from fedflat.flatness.objective import Objective

EPSILON = 1e-3
"""Standard deviation that the magnitude-aware perturbation adds to every weight (Jiang et al. 2020)."""
BISECTIONS = 8
"""Halvings of the interval that contains log2 sigma; the error of sigma is 2^(1/256) - 1 = 0.3 %."""
FIRST_SIGMA = 2.0**-9
"""Standard deviation from which the search for that interval starts."""
MAX_DOUBLINGS = 20
"""Largest number of doublings or halvings of sigma in this search."""


@dataclass(frozen=True)
class Norms:
    """Measures of flatness that take the size of the weights into account."""

    relative_flatness: Estimate
    """Relative flatness of one layer; smaller is flatter."""
    layer: str
    """Name of that layer's weights."""
    fisher_rao: float
    """Fisher-Rao norm of all weights."""
    sigma: float
    """Largest standard deviation of normal noise at which the expected rise of the loss is at most ``rise``.

    NaN if it was not found; likewise ``magnitude_sigma``.
    """
    magnitude_sigma: float
    """The same for noise proportional to each weight's magnitude; larger is flatter."""
    rise: float
    """The accepted rise of the loss."""
    loss: float
    """Mean loss at the weights."""
    examples: int
    """Number of examples over which the loss is averaged."""

    def document(self) -> dict[str, Any]:
        """Return all values as a dictionary, with None for NaN."""
        sigmas = {"sigma": self.sigma, "magnitude_sigma": self.magnitude_sigma}
        return asdict(self) | {name: None if math.isnan(value) else value for name, value in sigmas.items()}


def norms_of(
    objective: Objective,
    *,
    layer: str | None = None,
    rise: float = 0.1,
    draws: int = DRAWS,
    directions: int = 10,
    seed: int = 0,
) -> Norms:
    """Measure relative flatness, Fisher-Rao norm and PAC-Bayes sharpness of an objective at its weights.

    Args:
        objective: the loss as a function of the weights.
        layer: name of the weights whose relative flatness is measured; default: the last tensor with two or more
            dimensions, i.e. the classifier on top of the features.
        rise: accepted rise of the loss of PAC-Bayes sharpness.
        draws: random vectors for relative flatness, each of which costs a Hessian-vector product.
        directions: random directions of PAC-Bayes sharpness, each taken forwards and backwards.
        seed: seed of the random vectors.
    """
    if not 0 < rise < math.inf:
        raise UserError(f"rise={rise:g} is invalid; expected a finite rise of the loss above 0")
    if directions < 1:
        raise UserError(f"directions={directions} is invalid; expected at least 1")
    check_draws(draws)
    objective.check()
    w = objective.weights
    layer = layer or _last_matrix(objective)
    fisher = Operator.of_objective(objective, "empirical-fisher")
    return Norms(
        relative_flatness(objective, layer, draws, seed),
        layer,
        fisher_rao=math.sqrt(max(0.0, float(w @ fisher(w[None])[0]))),  # rounding can give a negative square
        sigma=_pac_bayes_sigma(objective, torch.zeros_like(w), rise, directions, seed),
        magnitude_sigma=_pac_bayes_sigma(objective, w.abs(), rise, directions, seed),
        rise=rise,
        loss=float(objective.loss()),
        examples=objective.examples,
    )


def relative_flatness(objective: Objective, layer: str, draws: int = DRAWS, seed: int = 0) -> Estimate:
    """Estimate the relative flatness of a layer, sum over s, s' of <w_s, w_s'> tr H_ss' (Petzka et al. 2021).

    With the layer's weights W [outputs, inputs] and a matrix Z of random signs, it is the mean of v' H v over
    v = (W W')^(1/2) Z. Filters of a convolution are rows of W.

    Args:
        objective: the loss as a function of the weights.
        layer: name of the layer's weights, a tensor with two or more dimensions.
        draws: number of random matrices Z, each of which costs a Hessian-vector product.
        seed: seed of the random matrices.
    """
    tensors = objective.layout.views(objective.weights)
    matrices = [name for name, tensor in tensors.items() if tensor.ndim > 1]
    if layer not in matrices:
        raise one_of("layer", layer, matrices)
    rows = tensors[layer].flatten(1)
    values, vectors = torch.linalg.eigh(rows @ rows.T)
    root = (vectors * values.clamp_min(0).sqrt()) @ vectors.T
    hessian, samples = Operator.of_hessian(objective), []
    zeros = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    for number in range(draws):
        signs = objective.layout.views(hessian.rademacher(seed, "relative flatness", number))[layer]
        mixed = (root @ signs.flatten(1)).view(signs.shape)
        v = objective.layout.flatten({**zeros, layer: mixed})
        samples.append(float(v @ hessian(v[None])[0]))
    return estimate(samples)


def _last_matrix(objective: Objective) -> str:
    """Return the name of the last tensor with at least two dimensions."""
    names = [
        name for name, shape in zip(objective.layout.names, objective.layout.shapes, strict=True) if len(shape) > 1
    ]
    if not names:
        raise UserError("relative flatness needs a weight matrix, and no parameter of this model has two dimensions")
    return names[-1]


def _pac_bayes_sigma(objective: Objective, scale: Tensor, rise: float, directions: int, seed: int) -> float:
    """Return the largest sigma at which the expected rise of the loss is at most ``rise``, by bisection.

    All sigmas share the same random directions, so the rise changes smoothly with sigma. NaN if none is found.

    Args:
        objective: the loss as a function of the weights.
        scale: magnitudes of the weights [P] for the magnitude-aware variant; zeros for equal noise on all weights.
        rise: the accepted rise.
        directions: number of random directions, each taken forwards and backwards.
        seed: seed of the directions.
    """
    w, loss = objective.weights, float(objective.loss())
    source, equal_noise = Operator.of_hessian(objective), not bool(scale.any())

    def is_accepted(sigma: float) -> bool:
        """Whether the mean rise over all directions is at most ``rise``; not if the loss overflows."""
        deviation = sigma * torch.ones_like(w) if equal_noise else (sigma**2 * scale**2 + EPSILON**2).sqrt()
        total = 0.0
        for number in range(directions):
            noise = deviation * source.normal(seed, "pac-bayes", number)
            total += float(objective.loss(w + noise)) + float(objective.loss(w - noise)) - 2 * loss
        return total / (2 * directions) <= rise  # False for NaN

    sigma = FIRST_SIGMA
    accepted = is_accepted(sigma)
    for _ in range(MAX_DOUBLINGS):  # double sigma until it is too large, or halve it until it is not
        previous, sigma = sigma, 2 * sigma if accepted else sigma / 2
        if is_accepted(sigma) != accepted:
            break
    else:
        message = f"the search for the noise that raises the loss by {rise:g} ended at sigma={sigma:.1g}"
        warnings.warn(f"{message}; choose another rise", stacklevel=3)
        return math.nan
    low, high = sorted((previous, sigma))
    for _ in range(BISECTIONS):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if is_accepted(middle) else (low, middle)
    return low
