"""Sharpness: the rise of the loss within a radius, in the worst direction or averaged over random directions.

With a diagonal scale T and the Euclidean norm ``|.|``,

    worst case:    max over |T^-1 e| <= rho of f(w + e) - f(w)
    average case:  mean over |e| = rho of f(w + e) - f(w)

where f is the loss, w the weights and e a perturbation. SAM uses T = 1 (Foret et al. 2021). ASAM uses T = |w| + eta for
weights and 1 for biases, or T = |w| + eta everywhere (scope ``all``). Only with scope ``all`` and eta = 0 is ASAM
invariant to all rescalings of parameters that leave the model's function unchanged (Kwon et al. 2021): a rescaling that
includes a bias changes the result with the default scope. With the gradient g, the worst perturbation to first order is

    e = rho T^2 g / |T g|,

and several steps of projected ascent find a worse one. m-sharpness (Foret et al. 2021) is the mean worst case of the
losses of groups of m examples, each with its own perturbation, as in training with batches of m examples.

The average uses antithetic pairs e and -e, so the gradient term cancels. On a quadratic with Hessian H and P weights,
the mean is rho^2 tr H / 2P.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedflat.errors import UserError, one_of
from fedflat.flatness.batches import normal, select_examples
from fedflat.flatness.estimate import Estimate, estimate
from fedflat.flatness.objective import Objective
from fedflat.randomness import generator

KINDS = ("sam", "asam", "average")
SCOPES = ("weight", "all")


@dataclass(frozen=True)
class Sharpness:
    """The rise of the loss around a model, within a ball of radius ``rho``."""

    kind: str
    """Definition of sharpness: ``sam`` or ``asam`` (largest rise), or ``average`` (mean rise)."""
    rho: float
    """Radius of the ball around the model's weights."""
    loss: float
    """Loss of the model itself, at the centre of the ball."""
    value: float
    """The largest rise that was found (``sam``, ``asam``), or the mean rise (``average``)."""
    interval: Estimate | None = None
    """Confidence interval of the mean rise over directions or groups of examples; None if there is no such mean."""
    steps: int = 1
    """Number of gradient ascent steps that searched for the largest rise; 0 for ``average``."""
    examples: int = 0
    """Number of examples over which the loss is averaged."""
    m: int | None = None
    """Maximum number of examples per group of m-sharpness; None if all examples share one perturbation."""

    def document(self) -> dict[str, Any]:
        """Return all values as a dictionary."""
        return asdict(self)


def describe_kind(kind: str, scope: str = "weight", eta: float = 0.0) -> str:
    """Return the name of a kind of sharpness, with settings of ASAM that are not the default.

    >>> describe_kind("asam", "all", 0.2), describe_kind("sam", "all")
    ('asam (scope all, eta 0.2)', 'sam')
    """
    settings = [f"scope {scope}"] * (scope != "weight") + [f"eta {eta:g}"] * (eta != 0)
    return f"{kind} ({', '.join(settings)})" if kind == "asam" and settings else kind


def sharpness_of(
    objective: Objective,
    kind: str = "sam",
    *,
    rho: float = 0.05,
    steps: int = 1,
    eta: float = 0.0,
    scope: str = "weight",
    m: int | None = None,
    directions: int = 20,
    seed: int = 0,
) -> Sharpness:
    """Measure the sharpness of an objective at its weights: how much the loss rises around them.

    Args:
        objective: the loss as a function of the weights.
        kind: ``sam`` or ``asam`` for the largest rise of the loss within a radius, ``average`` for the mean rise over
            random directions.
        rho: radius, in units of the weights; for ASAM, relative to the weights' magnitudes.
        steps: gradient ascent steps towards the worst case; 1 moves by rho along the gradient.
        eta: added to the weights' magnitudes in ASAM's scale |w| + eta.
        scope: tensors that ASAM scales: ``weight`` (not biases), or ``all``, which with eta = 0 makes ASAM invariant
            to rescaling.
        m: maximum size of the groups of m-sharpness (``sam``, ``asam``), into which the examples are drawn with
            nearly equal sizes; default: one group of all examples.
        directions: number of random directions of the average, each taken forwards and backwards.
        seed: seed of the random directions and groups.
    """
    if kind not in KINDS:
        raise one_of("sharpness kind", kind, KINDS)
    rho = _radius(rho)
    if m is not None and (m < 1 or kind == "average"):
        raise UserError(f"m={m} with kind {kind} is invalid; expected at least 1 example per group, and sam or asam")
    objective.check()
    if kind == "average":
        return _average(objective, rho, directions, seed)
    if steps < 1:
        raise UserError(f"steps={steps} is invalid; expected at least 1 ascent step")
    scale = adaptive_scale(objective, eta, scope) if kind == "asam" else torch.ones_like(objective.weights)
    if m is None:
        loss, largest_rise = _ascend(objective, scale, rho, steps, seed)
        return Sharpness(kind, rho, loss, value=largest_rise, steps=steps, examples=objective.examples)
    rises = [_ascend(group, scale, rho, steps, seed)[1] for group in _groups(objective, m, seed)]
    mean = estimate(rises)
    interval = mean if len(rises) > 1 else None
    return Sharpness(kind, rho, float(objective.loss()), mean.value, interval, steps, objective.examples, m)


def _radius(rho: Any) -> float:
    """Return ``rho`` as a float; raises a ``UserError`` unless it is a finite number above 0."""
    try:
        radius = float(rho)
    except (TypeError, ValueError, RuntimeError):  # RuntimeError: a tensor of several elements
        raise UserError(
            f"rho={rho!r} is invalid; expected one number; for several radii, measure each of them"
        ) from None
    if not 0 < radius < math.inf:
        raise UserError(f"rho={radius:g} is invalid; expected a finite radius above 0")
    return radius


def adaptive_scale(objective: Objective, eta: float = 0.0, scope: str = "weight") -> Tensor:
    """Return the diagonal of ASAM's scaling matrix T, [P]: |w| + eta in scaled tensors, 1 elsewhere.

    ``scope`` selects the scaled tensors: those with ``weight`` in their names (or, if there are none, with at least two
    dimensions), or ``all``.
    """
    if scope not in SCOPES:
        raise one_of("ASAM scope", scope, SCOPES)
    if not 0 <= eta < math.inf:
        raise UserError(f"eta={eta:g} is invalid; expected a finite number of at least 0")
    w = objective.weights
    if scope == "all":
        return w.abs() + eta
    return torch.where(objective.layout.weight_indicator(w), w.abs() + eta, torch.ones_like(w))


def _ascend(objective: Objective, scale: Tensor, rho: float, steps: int, seed: int) -> tuple[float, float]:
    """Find the largest rise of the loss by projected gradient ascent within the radius.

    The ascent is in scaled coordinates u = T^-1 e, where e is the perturbation of the weights. Every step is projected
    onto |u| <= rho.

    Args:
        objective: the loss as a function of the weights.
        scale: the diagonal of T, [P].
        rho: radius in scaled coordinates.
        steps: number of ascent steps.
        seed: seed of the direction taken if the gradient is zero.

    Returns:
        The loss at the objective's weights, and the largest rise above it.
    """
    w = objective.weights
    loss, gradient = objective.loss_and_gradient()
    u = torch.zeros_like(w)
    rises = []
    for step in range(steps):
        ascent = scale * gradient
        if step == 0 and float(ascent.norm()) == 0.0:  # stationary point: start in a random direction
            ascent = normal(w, seed, "ascent")
        # A single step reaches the sphere; several steps shrink linearly so that the ascent settles.
        length = rho * (steps - step) / steps
        u = u + length * ascent / ascent.norm().clamp_min(torch.finfo(w.dtype).tiny)
        u = u * (rho / u.norm()).clamp_max(1.0)
        perturbed = w + scale * u
        if step + 1 < steps:
            perturbed_loss, gradient = objective.loss_and_gradient(perturbed)
        else:
            perturbed_loss = objective.loss(perturbed)
        rises.append(perturbed_loss - loss)
    return _finite(loss, "loss"), _finite(torch.stack(rises).max(), "rise of the loss")


def _groups(objective: Objective, m: int, seed: int) -> Iterator[Objective]:
    """Yield the objective on disjoint random groups of at most m examples, whose sizes differ by at most one."""
    positions = generator(seed, "m-sharpness").permutation(objective.examples)
    for group in np.array_split(positions, math.ceil(objective.examples / m)):
        yield objective.with_data(select_examples(objective.batches, torch.from_numpy(np.sort(group))))


def _average(objective: Objective, rho: float, directions: int, seed: int) -> Sharpness:
    """Average the rise of the loss over random directions e, each taken forwards and backwards to reduce the variance.

    Args:
        objective: the loss as a function of the weights.
        rho: length of every direction.
        directions: number of directions.
        seed: seed of the directions.
    """
    if directions < 2:
        raise UserError(f"directions={directions} is invalid; a confidence interval needs at least 2")
    w, loss = objective.weights, objective.loss()
    rises = []
    for number in range(directions):
        e = normal(w, seed, "directions", number)
        e *= rho / e.norm()
        rises.append((objective.loss(w + e) + objective.loss(w - e)) / 2 - loss)
    mean = estimate([_finite(rise, "rise of the loss") for rise in rises])
    return Sharpness("average", rho, float(loss), mean.value, interval=mean, steps=0, examples=objective.examples)


def _finite(value: Tensor, name: str) -> float:
    """Return a scalar tensor as a float; raise a ``UserError`` that calls it ``name`` if it is NaN or infinite."""
    if not value.isfinite():
        raise UserError(
            f"the {name} is {float(value)}, so sharpness is undefined; "
            "use a smaller radius or a model that did not diverge"
        )
    return float(value)
