"""The matrices in a flat vector, and their orthogonalisation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from fedflat.models.layout import Layout

Orthogonalisation = Literal["ns5", "exact"]
GUARD = 1e-7
"""Constant added to the norm by which a matrix is divided, so that a zero matrix stays zero."""


def is_matrix(shape: Sequence[int]) -> bool:
    """Whether a tensor is taken as a matrix, with its first dimension as that of the rows."""
    return len(shape) >= 2


def matrix_names(layout: Layout) -> set[str]:
    """Return the names of the parameter tensors that are taken as matrices."""
    return {name for name, shape in zip(layout.names, layout.shapes, strict=True) if is_matrix(shape)}


def by_rank(vector: Tensor, layout: Layout) -> tuple[list[Tensor], Tensor]:
    """Split a vector of shape (P,) into matrices (rows, columns), and the concatenated entries of all other tensors.

    The columns of a convolution's matrix are in the order in which the vector stores them.

    >>> by_rank(torch.arange(5.0), Layout(("weight", "bias"), ((2, 2), (1,))))
    ([tensor([[0., 1.],
            [2., 3.]])], tensor([4.]))
    """
    pieces = list(zip(torch.split(vector, layout.sizes), layout.shapes, strict=True))
    others = [piece for piece, shape in pieces if not is_matrix(shape)]
    matrices = [piece.reshape(shape[0], -1) for piece, shape in pieces if is_matrix(shape)]
    return matrices, torch.cat(others) if others else vector[:0]


def joined(matrices: Sequence[Tensor], others: Tensor, layout: Layout) -> Tensor:
    """Return the vector of shape (P,) that ``by_rank`` would split into ``matrices`` and ``others``; its inverse."""
    matrix = iter(matrices)
    sizes = [size for size, shape in zip(layout.sizes, layout.shapes, strict=True) if not is_matrix(shape)]
    other = iter(torch.split(others, sizes) if sizes else ())
    return torch.cat([next(matrix if is_matrix(shape) else other).reshape(-1) for shape in layout.shapes])


def orthogonal_steps(
    matrices: Sequence[Tensor], layout: Layout, method: Orthogonalisation, shape_factor: Literal["matrix", "kernel"]
) -> list[Tensor]:
    """Return sqrt(max(1, rows / columns)) times each orthogonalised matrix.

    With ``shape_factor=kernel``, rows and columns are the last two dimensions of the matrix's tensor.
    """
    shapes = [shape for shape in layout.shapes if is_matrix(shape)]
    kernel = shape_factor == "kernel"
    ratios = [shape[-2] / shape[-1] if kernel else shape[0] / math.prod(shape[1:]) for shape in shapes]
    # A GPU orthogonalises small matrices faster in batches; on a CPU, batches would round differently.
    on_gpu = any(matrix.is_cuda for matrix in matrices)
    orthogonal = in_batches(matrices, method) if on_gpu else [orthogonalised(matrix, method) for matrix in matrices]
    return [max(1.0, ratio) ** 0.5 * u for u, ratio in zip(orthogonal, ratios, strict=True)]


def in_batches(matrices: Sequence[Tensor], method: Orthogonalisation) -> list[Tensor]:
    """Return the orthogonalised matrices, in the same order; those of equal shape are computed together."""
    results = list(matrices)
    for shape in dict.fromkeys(matrix.shape for matrix in matrices):
        positions = [position for position, matrix in enumerate(matrices) if matrix.shape == shape]
        batch = orthogonalised(torch.stack([matrices[position] for position in positions]), method)
        for position, matrix in zip(positions, batch.unbind(), strict=True):
            results[position] = matrix
    return results


def orthogonalised(matrix: Tensor, method: Orthogonalisation) -> Tensor:
    """Return the matrix with the same singular vectors, but singular values of about 1 (ns5) or of 1 (exact).

    The matrix is (rows, columns), or (batch, rows, columns) for several.

    ``exact`` continues the iteration until rounding errors dominate. Unlike a singular value decomposition, it can be
    captured on a GPU and maps singular values of 0 to 0.

    >>> orthogonalised(torch.tensor([[2.0, 0.0], [0.0, 0.5]]), "ns5")
    tensor([[0.7374, 0.0000],
            [0.0000, 0.7429]])
    """
    is_tall = matrix.shape[-2] > matrix.shape[-1]
    norm = matrix.norm() if matrix.ndim == 2 else matrix.norm(dim=(-2, -1), keepdim=True)
    X: Tensor = matrix / (norm + GUARD)
    X = X.mT if is_tall else X
    for _ in range(5 if method == "ns5" else 10):
        A = X @ X.mT
        X = 3.4445 * X + (-4.7750 * A + 2.0315 * A @ A) @ X
    for _ in range(0 if method == "ns5" else 7):  # converges quadratically from singular values near 1
        X = 1.5 * X - 0.5 * (X @ X.mT) @ X
    return X.mT if is_tall else X
