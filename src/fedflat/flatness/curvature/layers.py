"""Curvature of single parameters: the diagonal blocks of a matrix, one block per parameter of a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fedflat.flatness.curvature.lanczos import TOLERANCE, Ends, lanczos
from fedflat.flatness.curvature.operator import Operator
from fedflat.flatness.curvature.trace import DRAWS, estimate_trace
from fedflat.flatness.estimate import Estimate
from fedflat.models.layout import Layout


@dataclass(frozen=True)
class LayerCurvature:
    """Curvature with respect to one parameter of a model, while the others are fixed."""

    name: str
    """Name of the parameter."""
    size: int
    """Number of weights of the parameter."""
    lambda_max: float
    """Largest eigenvalue of the parameter's diagonal block."""
    residual: float
    """Norm of B v - lambda_max v for the block B, with unit eigenvector v."""
    trace: Estimate
    """Estimated trace of the block. The traces of all blocks sum to that of the matrix."""


def layer_curvatures(
    operator: Operator,
    layout: Layout,
    *,
    tolerance: float = TOLERANCE,
    draws: int = DRAWS,
    seed: int = 0,
    progress: Callable[[str], None] = lambda name: None,
) -> tuple[LayerCurvature, ...]:
    """Compute the largest eigenvalue and the trace of each parameter's diagonal block.

    Args:
        operator: the matrix, e.g. the Hessian.
        layout: names and shapes of the parameters.
        tolerance: relative residual at which Lanczos accepts an eigenvalue.
        draws: random vectors per parameter for the trace.
        seed: seed of all random vectors.
        progress: called with the name of each parameter before it is measured.
    """
    curvatures = []
    for name, block in diagonal_blocks(operator, layout).items():
        progress(name)
        pairs = lanczos(block, Ends(1), tolerance=tolerance, seed=seed)
        trace = estimate_trace(block, draws=draws, seed=seed, values=pairs.values, vectors=pairs.vectors)
        curvatures.append(LayerCurvature(name, block.size, float(pairs.values[0]), float(pairs.residuals[0]), trace))
    return tuple(curvatures)


def diagonal_blocks(operator: Operator, layout: Layout) -> dict[str, Operator]:
    """Return the diagonal block of each parameter by name."""
    sizes = zip(layout.sizes, layout.offsets.items(), strict=True)
    return {name: _diagonal_block(operator, start, size) for size, (name, start) in sizes}


def _diagonal_block(operator: Operator, start: int, size: int) -> Operator:
    """Return the diagonal block of ``size`` rows and columns from index ``start``."""

    def products(rows: Tensor) -> Tensor:
        """Multiply the block by each of ``rows`` [b, size]."""
        embedded = torch.nn.functional.pad(rows, (start, operator.size - start - size))
        return operator(embedded)[:, start : start + size]

    return Operator(products, size, operator.dtype, operator.device)
