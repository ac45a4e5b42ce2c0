"""Similarity of two models: overlap of the eigenspaces of largest curvature, and CKA of features.

With orthonormal bases V and W [k, P] of two subspaces and the projections V'V and W'W onto them, the overlap is

    tr(V'V W'W) / k = |V W'|^2 / k        (Gur-Ari et al. 2018)

which is 1 for equal and 0 for orthogonal subspaces, and k/P on average for random ones.

Linear centred kernel alignment (CKA; Kornblith et al. 2019) compares features X [n, p] and Y [n, q] of the same n
examples, after subtracting the mean of each column:

    |Y'X|^2 / (|X'X| |Y'Y|)        with Frobenius norms

It is 1 if one is the other times an orthogonal matrix and a scale, and 0 if all features are uncorrelated.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from fedflat.errors import UserError, one_of
from fedflat.flatness.curvature.lanczos import Ends, lanczos
from fedflat.flatness.curvature.operator import Operator
from fedflat.flatness.objective import Objective
from fedflat.flatness.precision import tf32_allowed


def top_eigenvectors(
    objective: Objective, count: int, *, matrix: str = "hessian", seed: int = 0, **options: Any
) -> Tensor:
    """Return orthonormal eigenvectors [count, P] of the largest eigenvalues of a curvature matrix.

    Eigenvectors of eigenvalues that are 0 up to rounding are arbitrary and depend on the seed; a warning says so. To
    compare two matrices, use different seeds: with the same seed, arbitrary eigenvectors of both are alike.

    Args:
        objective: the loss as a function of the weights.
        count: number of eigenvectors.
        matrix: ``hessian``, ``gauss-newton`` or ``empirical-fisher``.
        seed: seed of the start vector.
        options: further keyword arguments of ``lanczos``, e.g. ``tolerance``.
    """
    if not 1 <= count <= objective.size:
        raise UserError(f"cannot compute {count} eigenvectors of a model with {objective.size} parameters")
    pairs = lanczos(Operator.of_objective(objective, matrix), Ends(count), seed=seed, **options)
    nonzero = int((pairs.values.abs() > 10 * pairs.residuals).sum())  # rounding errors are known approximately
    if nonzero < count:
        message = f"only {nonzero} of the {count} largest eigenvalues are distinguishable from 0, so the other"
        warnings.warn(f"{message} eigenvectors are arbitrary; request at most {nonzero}", stacklevel=2)
    elif not pairs.converged:
        message = f"the {count} largest eigenvalues have not all converged, so the overlap of eigenspaces is inaccurate"
        warnings.warn(f"{message}; request fewer eigenvectors or use float64", stacklevel=2)
    return pairs.vectors


def subspace_overlap(first: Tensor, second: Tensor) -> float:
    """Return the overlap of two subspaces, from 0 (orthogonal) to 1 (equal), given orthonormal bases as rows [k, P].

    >>> axes = torch.eye(3)
    >>> subspace_overlap(axes[:2], axes[1:])
    0.5
    """
    if first.shape != second.shape:
        raise UserError(f"the bases have shapes {tuple(first.shape)} and {tuple(second.shape)}; expected equal shapes")
    with tf32_allowed(False):
        return float((first @ second.T).square().sum() / len(first))


def features_of(objective: Objective, layer: str | None = None) -> Tensor:
    """Return the inputs of a layer on all examples of an objective, in order, as rows [examples, features].

    Args:
        objective: model, weights and data.
        layer: name of the layer, as in ``module.named_modules()``; default: the last one with a weight matrix, so that
            the features are those which the classifier receives.
    """
    layers = {
        name: part
        for name, part in objective.module.named_modules()
        if any(tensor.ndim > 1 for tensor in part.parameters(recurse=False))
    }
    if not layers:
        raise UserError("this model has no layer with a weight matrix, so its features are undefined")
    name = list(layers)[-1] if layer is None else layer
    if name not in layers:
        raise one_of("layer", name, list(layers))
    batches: list[Tensor] = []

    def keep_input(part: nn.Module, arguments: tuple[Tensor, ...], keywords: dict[str, Tensor]) -> None:
        inputs = (*arguments, *keywords.values())
        batches.append(inputs[0].detach().flatten(1))

    hook = layers[name].register_forward_pre_hook(keep_input, with_kwargs=True)
    try:
        objective.loss()
    finally:
        hook.remove()
    if sum(map(len, batches)) != objective.examples:
        raise UserError(f"layer '{name}' is not called once per example, so its features are undefined; name another")
    return torch.cat(batches)


def linear_cka(first: Tensor, second: Tensor) -> float:
    """Return the linear CKA of two feature matrices [n, p] and [n, q] of the same examples; NaN if one is constant.

    >>> features = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]])
    >>> round(linear_cka(features, 3 * features.flip(1) + 1), 6)
    1.0
    """
    if len(first) != len(second):
        raise UserError(f"the features have {len(first)} and {len(second)} rows; expected the same examples")
    with tf32_allowed(False):
        x, y = (features.double() - features.double().mean(0) for features in (first, second))
        if len(x) < max(x.shape[1], y.shape[1]):  # the same number from smaller matrices
            gram_x, gram_y = x @ x.T, y @ y.T
            return float((gram_x * gram_y).sum() / (gram_x.norm() * gram_y.norm()))
        return float((y.T @ x).square().sum() / ((x.T @ x).norm() * (y.T @ y).norm()))
