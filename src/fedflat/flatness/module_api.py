"""Flatness of any torch module, loss and data, in one call each: for users of other frameworks too.

>>> import torch
>>> model, data = torch.nn.Linear(3, 1), (torch.eye(3), torch.zeros(3, 1))
>>> [round(value, 4) for value in spectrum(model, torch.nn.functional.mse_loss, data, 2).eigenvalues]
[2.6667, 0.6667]
"""

from __future__ import annotations

from typing import Any

from torch import nn

from fedflat.errors import UserError
from fedflat.flatness.curvature.density import Density, quadrature
from fedflat.flatness.curvature.operator import Operator
from fedflat.flatness.curvature.spectrum import Spectrum, spectrum_of
from fedflat.flatness.curvature.trace import DRAWS, hutchinson
from fedflat.flatness.estimate import Estimate
from fedflat.flatness.objective import Loss, Objective
from fedflat.flatness.sharpness import Sharpness, sharpness_of


def spectrum(
    model: nn.Module | Objective,
    loss: Loss | None = None,
    data: Any = None,
    count: int | None = None,
    *,
    batch: int = 500,
    **options: Any,
) -> Spectrum:
    """The largest eigenvalues of the Hessian of a mean loss (50 unless said), the smallest one, and the trace.

    ``loss(output, target)`` is the mean over a batch; ``data`` is a DataLoader, a list of batches, or a pair of tensors, which are cut into
    batches of ``batch`` examples. The model is looked at in evaluation mode and left as it was. ``options`` are ``spectrum_of``'s.
    """
    return spectrum_of(_objective(model, loss, data, batch), count, **options)


def trace(
    model: nn.Module | Objective,
    loss: Loss | None = None,
    data: Any = None,
    *,
    draws: int = DRAWS,
    batch: int = 500,
    seed: int = 0,
) -> Estimate:
    """The trace of the Hessian with its confidence interval, from ``draws`` products."""
    return hutchinson(_operator(model, loss, data, batch), draws=draws, seed=seed)


def density(
    model: nn.Module | Objective,
    loss: Loss | None = None,
    data: Any = None,
    *,
    draws: int = 5,
    steps: int = 80,
    batch: int = 500,
    seed: int = 0,
) -> Density:
    """The density of the Hessian's eigenvalues, from ``draws`` times ``steps`` products."""
    return quadrature(_operator(model, loss, data, batch), draws=draws, steps=steps, seed=seed)


def sharpness(
    model: nn.Module | Objective,
    loss: Loss | None = None,
    data: Any = None,
    kind: str = "sam",
    *,
    batch: int = 500,
    **options: Any,
) -> Sharpness:
    """How much the loss rises around the model: ``sam``, ``asam`` or ``average``; ``options`` are ``sharpness_of``'s."""
    return sharpness_of(_objective(model, loss, data, batch), kind, **options)


def _operator(model: nn.Module | Objective, loss: Loss | None, data: Any, batch: int) -> Operator:
    objective = _objective(model, loss, data, batch)
    objective.check()
    return Operator.of_hessian(objective)


def _objective(model: nn.Module | Objective, loss: Loss | None, data: Any, batch: int) -> Objective:
    if isinstance(model, Objective):
        return model
    if not isinstance(model, nn.Module):
        raise UserError(f"{type(model).__name__} is no model; expected a torch module, or an Objective")
    if not callable(loss) or data is None:
        raise UserError(
            "a model alone has no curvature; expected a loss, a function of output and target, and data besides"
        )
    return Objective(model, loss, data, batch=batch)
