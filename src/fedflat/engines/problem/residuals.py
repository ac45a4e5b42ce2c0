"""Exact averages of low-rank adapters (FedEx-LoRA; Singhal et al. 2025).

The mean of products B_i A_i is not the product of the means of A_i and B_i. Adapted layers therefore have a buffer R,
the residual, and compute (W + R + s B A) x. Clients add s B_i A_i to R before they send it; the server averages R like
BatchNorm statistics, and then subtracts s B A of its new model. W + R + s B A is then the mean of the clients' weights.
"""

from __future__ import annotations

from torch import Tensor

from fedflat.engines.problem.problem import Problem
from fedflat.models.low_rank import RESIDUAL, LowRankLinear


def has_residuals(problem: Problem) -> bool:
    """Whether adapters of the model have residuals."""
    return bool(_layers(problem))


def add_products(problem: Problem, buffers: Tensor, weights: Tensor, factor: float = 1.0) -> None:
    """Add ``factor`` times the products s B A of all adapters to their residuals, in place.

    Args:
        problem: the model; without residuals, nothing changes.
        buffers: floating-point buffers [buffers], which contain the residuals.
        weights: flat weights [parameters], which contain A and B.
        factor: 1 on clients, -1 on the server.
    """
    layers = _layers(problem)
    if not layers:
        return
    matrices, residuals = problem.layout.views(weights), problem.buffer_layout.views(buffers)
    for name in layers:
        layer = problem.model.get_submodule(name)
        assert isinstance(layer, LowRankLinear)
        product = layer.product(matrices[f"{name}.lora_a_weight"], matrices[f"{name}.lora_b_weight"])
        residuals[f"{name}.{RESIDUAL}"].add_(product, alpha=factor)


def _layers(problem: Problem) -> list[str]:
    """Names of the layers with a residual."""
    names = problem.buffer_layout.names
    return [name.removesuffix(f".{RESIDUAL}") for name in names if name.endswith(f".{RESIDUAL}")]
