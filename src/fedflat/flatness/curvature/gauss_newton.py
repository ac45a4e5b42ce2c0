"""Products with the Gauss-Newton matrix and the empirical Fisher matrix of a loss.

With the Jacobian J_j of the model's output on example j with respect to the weights, and gradient r_j and Hessian R_j
of that example's loss with respect to the output,

    Hessian              H = G + 1/n sum_j sum_k r_jk (Hessian of output k on example j)
    Gauss-Newton         G = 1/n sum_j J_j' R_j J_j           (Schraudolph 2002)
    empirical Fisher     F = 1/n sum_j (J_j' r_j) (J_j' r_j)'

G is positive semidefinite if the loss is convex in the output. For cross-entropy, G is the Fisher matrix, i.e. F with
labels drawn from the model instead of the observed ones (Martens 2020).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fedflat.errors import UserError


def factored_products(
    output: Any,
    loss: Callable[[Tensor], Tensor],
    parameters: Sequence[Tensor],
    vectors: Sequence[Sequence[Tensor]],
    shares: Tensor | None = None,
) -> list[Sequence[Tensor]]:
    """Return the products of one batch's Gauss-Newton or empirical Fisher matrix with each vector.

    Args:
        output: the model's output on the batch, with its graph; one row per example.
        loss: maps the output to the mean loss over the batch.
        parameters: the leaves of the output's graph.
        vectors: the vectors, each with one tensor per parameter.
        shares: share of each example in the batch's mean loss [examples], for the empirical Fisher matrix; None for the
            Gauss-Newton matrix.

    Returns:
        The products, each with one tensor per parameter.
    """
    if not isinstance(output, Tensor) or (shares is not None and len(output) != len(shares)):
        kind = f"a tensor of shape {tuple(output.shape)}" if isinstance(output, Tensor) else type(output).__name__
        count = "" if shares is None else f" ({len(shares)})"
        raise UserError(f"the model returned {kind}; this matrix needs a tensor with one row per example{count}")
    copy = output.detach().requires_grad_()
    (slope,) = torch.autograd.grad(loss(copy), copy, create_graph=True)
    # J v by reverse mode: the derivative of J'u, which is linear in u, in the direction v.
    u = torch.zeros_like(output, requires_grad=True)
    pulled_back = torch.autograd.grad(output, parameters, u, create_graph=True, materialize_grads=True)
    connected = [index for index, tensor in enumerate(pulled_back) if tensor.requires_grad]
    products: list[Sequence[Tensor]] = []
    for vector in vectors:
        (pushed,) = torch.autograd.grad(  # J v
            [pulled_back[index] for index in connected], u, [vector[index] for index in connected], retain_graph=True
        )
        if shares is not None:
            rows = slope.detach().flatten(1)  # s_j r_j, where s_j is the share of example j
            scale = (1 / shares).nan_to_num(posinf=0.0)[:, None]  # an example without share has gradient 0
            curved = (scale * rows * (rows * pushed.flatten(1)).sum(1, keepdim=True)).view_as(output)
        elif slope.requires_grad:
            (curved,) = torch.autograd.grad(slope, copy, pushed, retain_graph=True)  # R J v / n
        else:  # the loss is linear in the output
            curved = torch.zeros_like(output)
        products.append(torch.autograd.grad(output, parameters, curved, retain_graph=True, materialize_grads=True))
    return products
