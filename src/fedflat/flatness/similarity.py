"""Similarity of two models: overlap of the eigenspaces of largest curvature.

With orthonormal bases V and W [k, P] of two subspaces and the projections V'V and W'W onto them, the overlap is

    tr(V'V W'W) / k = |V W'|^2 / k        (Gur-Ari et al. 2018)

which is 1 for equal and 0 for orthogonal subspaces, and k/P on average for random ones.
"""

from __future__ import annotations

from torch import Tensor

from fedflat.errors import UserError
from fedflat.flatness.curvature.lanczos import Ends, lanczos
from fedflat.flatness.curvature.operator import Operator
from fedflat.flatness.objective import Objective
from fedflat.flatness.precision import tf32_allowed


def top_eigenvectors(objective: Objective, count: int, *, matrix: str = "hessian", seed: int = 0) -> Tensor:
    """Return orthonormal eigenvectors [count, P] of the largest eigenvalues of a curvature matrix.

    Args:
        objective: the loss as a function of the weights.
        count: number of eigenvectors.
        matrix: ``hessian``, ``gauss-newton`` or ``empirical-fisher``.
        seed: seed of the start vector.
    """
    if not 1 <= count <= objective.size:
        raise UserError(f"cannot compute {count} eigenvectors of a model with {objective.size} parameters")
    return lanczos(Operator.of_objective(objective, matrix), Ends(count), seed=seed).vectors


def subspace_overlap(first: Tensor, second: Tensor) -> float:
    """Return the overlap of two subspaces, from 0 (orthogonal) to 1 (equal), given orthonormal bases as rows [k, P].

    >>> import torch
    >>> axes = torch.eye(3)
    >>> subspace_overlap(axes[:2], axes[1:])
    0.5
    """
    if first.shape != second.shape:
        raise UserError(f"the bases have shapes {tuple(first.shape)} and {tuple(second.shape)}; expected equal shapes")
    with tf32_allowed(False):
        return float((first @ second.T).square().sum() / len(first))
