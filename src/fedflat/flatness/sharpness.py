"""How much the loss rises around a point: in the worst direction, or in a random one.

With T a diagonal scale, and ``|.|`` the Euclidean norm,

    worst case:    max over |T^-1 e| <= rho of f(w + e) - f(w)
    average case:  mean over |e| = rho of f(w + e) - f(w)

SAM's sharpness has T = 1 (Foret et al. 2021); ASAM's has T = |w| + eta for weights and 1 for biases, so that at eta = 0 it does not change
where weights are rescaled without changing the function (Kwon et al. 2021). To first order, as training takes it, the worst direction is

    e = rho T^2 g / |T g|,

and several steps of projected ascent find a worse one. For the average, directions come in pairs e and -e, so that the slope cancels:
on a quadratic, the mean is rho^2 tr H / 2P.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from fedflat.errors import UserError, one_of
from fedflat.flatness.batches import generator
from fedflat.flatness.estimate import Estimate, estimate
from fedflat.flatness.objective import Objective

KINDS = ("sam", "asam", "average")
SCOPES = ("weight", "all")


@dataclass(frozen=True)
class Sharpness:
    """By how much the loss rises within a radius."""

    kind: str
    rho: float
    loss: float
    """The loss at the point itself."""
    value: float
    """The rise: the largest that was found, or the mean."""
    interval: Estimate | None = None
    """Where it is a mean: how well it is known."""
    steps: int = 1
    """Where it is a worst case: steps of ascent."""
    examples: int = 0

    def document(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)


def sharpness_of(
    objective: Objective,
    kind: str = "sam",
    *,
    rho: float = 0.05,
    steps: int = 1,
    eta: float = 0.0,
    scope: str = "weight",
    directions: int = 20,
    seed: int = 0,
) -> Sharpness:
    """The sharpness of an objective at its model's weights.

    ``steps`` of ascent are for the worst cases, 1 being the first-order direction; ``eta`` and ``scope`` (``weight``, or ``all`` tensors)
    for ASAM's scale; ``directions`` are the pairs of random directions of the average.
    """
    if kind not in KINDS:
        raise one_of("kind of sharpness", kind, KINDS)
    if not 0 < rho < float("inf"):
        raise UserError(f"a radius of rho={rho:g} is not possible; expected a number above 0")
    objective.check()
    if kind == "average":
        return _average(objective, rho, directions, seed)
    if steps < 1:
        raise UserError(f"{steps} steps of ascent are not possible; expected at least 1")
    scale = adaptive_scale(objective, eta, scope) if kind == "asam" else torch.ones_like(objective.weights)
    loss, worst = _ascent(objective, scale, rho, steps, seed)
    return Sharpness(kind, rho, loss, worst, None, steps, objective.examples)


def adaptive_scale(objective: Objective, eta: float = 0.0, scope: str = "weight") -> Tensor:
    """ASAM's T: |w| + eta on tensors named weight (or on all), 1 elsewhere."""
    if scope not in SCOPES:
        raise one_of("scope of ASAM's scale", scope, SCOPES)
    if eta < 0:
        raise UserError(f"eta={eta:g} is not possible; expected a number of at least 0")
    w = objective.weights
    scaled = objective.layout.indicator(lambda name: scope == "all" or "weight" in name, w)
    return torch.where(scaled, w.abs() + eta, torch.ones_like(w))


def _ascent(objective: Objective, scale: Tensor, rho: float, steps: int, seed: int) -> tuple[float, float]:
    """The loss, and the largest rise found by normalised ascent in u = T^-1 e, projected onto the ball |u| <= rho."""
    w = objective.weights
    base, slope = objective.loss_and_gradient()
    u, worst = torch.zeros_like(w), torch.zeros_like(base)
    # One step reaches the sphere; of several, each may cross half the ball at first and ever less towards the end.
    lengths = [rho] if steps == 1 else [rho * (steps - number) / steps for number in range(steps)]
    for number, length in enumerate(lengths):
        uphill = scale * slope
        norm = uphill.norm()
        if not number and float(norm) == 0.0:  # at a stationary point no direction is uphill, so any is taken
            uphill = torch.as_tensor(generator(seed, "ascent").standard_normal(len(w)), dtype=w.dtype).to(w.device)
            norm = uphill.norm()
        u = u + length * uphill / norm.clamp_min(torch.finfo(w.dtype).tiny)
        u = u * (rho / u.norm()).clamp_max(1.0)
        at = w + scale * u
        if number + 1 < steps:
            here, slope = objective.loss_and_gradient(at)
        else:
            here = objective.loss(at)
        worst = here - base if not number else torch.maximum(worst, here - base)
    return _finite(base, "loss"), _finite(worst, "rise of the loss")


def _average(objective: Objective, rho: float, directions: int, seed: int) -> Sharpness:
    if directions < 2:
        raise UserError(f"an average over {directions} directions has no interval; expected at least 2")
    w, base, rises = objective.weights, objective.loss(), []
    for number in range(directions):
        drawn = generator(seed, "directions", number).standard_normal(len(w))
        e = torch.as_tensor(drawn, dtype=w.dtype).to(w.device)
        e *= rho / e.norm()
        rises.append((objective.loss(w + e) + objective.loss(w - e)) / 2 - base)
    found = estimate([_finite(rise, "rise of the loss") for rise in rises])
    return Sharpness("average", rho, float(base), found.value, found, 0, objective.examples)


def _finite(value: Tensor, what: str) -> float:
    number = float(value)
    if number != number or abs(number) == float("inf"):
        raise UserError(
            f"the {what} is {number}, so that there is no sharpness; take a smaller radius, or a model that did not diverge"
        )
    return number
