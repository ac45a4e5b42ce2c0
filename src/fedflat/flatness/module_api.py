"""Flatness of any torch module, loss and data, in one call per measure.

>>> import torch
>>> model, data = torch.nn.Linear(3, 1), (torch.eye(3), torch.zeros(3, 1))
>>> [round(value, 4) for value in spectrum(model, torch.nn.functional.mse_loss, data, 2).eigenvalues]
[2.6667, 0.6667]
"""

from __future__ import annotations

from typing import Any

from torch import nn

from fedflat.errors import UserError
from fedflat.flatness.curvature.operator import Operator
from fedflat.flatness.curvature.spectrum import Spectrum, spectrum_of
from fedflat.flatness.curvature.trace import DRAWS, Density, estimate_trace, lanczos_quadrature
from fedflat.flatness.estimate import Estimate
from fedflat.flatness.landscapes.grid import Landscape
from fedflat.flatness.landscapes.landscape import landscape_of
from fedflat.flatness.norms import Norms, norms_of
from fedflat.flatness.objective import Loss, Objective
from fedflat.flatness.sharpness import Sharpness, sharpness_of


def spectrum(
    model: nn.Module | Objective,
    loss: Loss | None = None,
    data: Any = None,
    count: int | None = None,
    *,
    batch_size: int = 500,
    **options: Any,
) -> Spectrum:
    """Compute the largest eigenvalues of the Hessian of the mean loss, the smallest one, and the trace.

    Args:
        model: evaluated in evaluation mode and left unchanged; an ``Objective`` includes loss and data.
        loss: ``loss(output, target)``, the mean over a batch.
        data: a DataLoader, a list of batches, or a pair of tensors (inputs, targets).
        count: number of eigenvalues; default: 50, or all if there are fewer.
        batch_size: for a pair of tensors.
        options: further arguments of ``spectrum_of``.
    """
    return spectrum_of(_objective(model, loss, data, batch_size), count, **options)


def trace(
    model: nn.Module | Objective,
    loss: Loss | None = None,
    data: Any = None,
    *,
    draws: int = DRAWS,
    estimator: str = "hutchinson",
    batch_size: int = 500,
    seed: int = 0,
) -> Estimate:
    """Estimate the trace of the Hessian of the mean loss, with its confidence interval.

    Args:
        model: evaluated in evaluation mode and left unchanged; an ``Objective`` includes loss and data.
        loss: ``loss(output, target)``, the mean over a batch.
        data: a DataLoader, a list of batches, or a pair of tensors (inputs, targets).
        draws: number of Hessian-vector products.
        estimator: ``hutchinson`` or ``hutch++``, which needs fewer products if few eigenvalues dominate.
        batch_size: for a pair of tensors.
        seed: seed of the random vectors.
    """
    return estimate_trace(_hessian(model, loss, data, batch_size), draws=draws, estimator=estimator, seed=seed)


def density(
    model: nn.Module | Objective,
    loss: Loss | None = None,
    data: Any = None,
    *,
    draws: int = 5,
    steps: int = 80,
    batch_size: int = 500,
    seed: int = 0,
) -> Density:
    """Estimate the spectral density of the Hessian of the mean loss by stochastic Lanczos quadrature.

    Args:
        model: evaluated in evaluation mode and left unchanged; an ``Objective`` includes loss and data.
        loss: ``loss(output, target)``, the mean over a batch.
        data: a DataLoader, a list of batches, or a pair of tensors (inputs, targets).
        draws: number of random vectors.
        steps: Hessian-vector products per random vector.
        batch_size: for a pair of tensors.
        seed: seed of the random vectors.
    """
    return lanczos_quadrature(_hessian(model, loss, data, batch_size), draws=draws, steps=steps, seed=seed)


def sharpness(
    model: nn.Module | Objective,
    loss: Loss | None = None,
    data: Any = None,
    kind: str = "sam",
    *,
    batch_size: int = 500,
    **options: Any,
) -> Sharpness:
    """Measure how much the mean loss rises around the model.

    Args:
        model: evaluated in evaluation mode and left unchanged; an ``Objective`` includes loss and data.
        loss: ``loss(output, target)``, the mean over a batch.
        data: a DataLoader, a list of batches, or a pair of tensors (inputs, targets).
        kind: ``sam`` or ``asam`` for the largest rise within a radius, ``average`` for the mean over random directions.
        batch_size: for a pair of tensors.
        options: further arguments of ``sharpness_of``, e.g. the radius ``rho``.
    """
    return sharpness_of(_objective(model, loss, data, batch_size), kind, **options)


def norms(
    model: nn.Module | Objective, loss: Loss | None = None, data: Any = None, *, batch_size: int = 500, **options: Any
) -> Norms:
    """Measure flatness relative to the size of the weights: relative flatness, Fisher-Rao norm, PAC-Bayes sharpness.

    Args:
        model: evaluated in evaluation mode and left unchanged; an ``Objective`` includes loss and data.
        loss: ``loss(output, target)``, the mean over a batch.
        data: a DataLoader, a list of batches, or a pair of tensors (inputs, targets).
        batch_size: for a pair of tensors.
        options: further arguments of ``norms_of``, e.g. the ``layer`` of relative flatness.
    """
    return norms_of(_objective(model, loss, data, batch_size), **options)


def landscape(
    model: nn.Module | Objective, loss: Loss | None = None, data: Any = None, *, batch_size: int = 500, **options: Any
) -> Landscape:
    """Evaluate the loss around the model along filter-normalised random directions; draw it with ``.plot()``.

    Args:
        model: evaluated in evaluation mode and left unchanged; an ``Objective`` includes loss and data.
        loss: ``loss(output, target)``, the mean over a batch.
        data: a DataLoader, a list of batches, or a pair of tensors (inputs, targets).
        batch_size: for a pair of tensors.
        options: keyword arguments of ``landscape_around``: ``radius``, ``points``, ``dimensions`` and ``seed``.
    """
    return landscape_of(_objective(model, loss, data, batch_size), **options)


def _hessian(model: nn.Module | Objective, loss: Loss | None, data: Any, batch_size: int) -> Operator:
    """Return the Hessian of the mean loss as an operator; raises a ``UserError`` if the loss is not finite.

    Also raises one if the loss is not deterministic. ``batch_size`` is used if ``data`` is a pair of tensors.
    """
    objective = _objective(model, loss, data, batch_size)
    objective.check()
    return Operator.of_hessian(objective)


def _objective(model: nn.Module | Objective, loss: Loss | None, data: Any, batch_size: int) -> Objective:
    """Return ``model`` if it is an objective; otherwise build one from the module, loss, data and batch size."""
    if isinstance(model, Objective):
        return model
    if not isinstance(model, nn.Module):
        raise UserError(f"model is a {type(model).__name__}; expected a torch module or an Objective")
    if not callable(loss) or data is None:
        raise UserError("loss and data are required with a torch module: flatness.spectrum(model, loss, data)")
    return Objective(model, loss, data, batch_size=batch_size)
