"""The loss by which FedAWA learns the clients' weights."""

import torch
from torch import Tensor


def logit_gradient(logits: Tensor, displacements: Tensor, turn: Tensor) -> Tensor:
    """Return the gradient of the loss L with respect to the logits l of the weights w = softmax(l), shape (n,).

        L = sum_i w_i (||D_i - sum_j w_j D_j|| + turn_i)

    Args:
        logits: one per client of the cohort, shape (n,).
        displacements: D_i, shape (n, P).
        turn: 1 - cos(z, z + D_i), shape (n,); how far each client's model turned away from z.

    >>> logit_gradient(torch.zeros(2), torch.zeros(2, 3), turn=torch.tensor([1.0, 0.0]))
    tensor([ 0.2500, -0.2500])
    """
    w = logits.softmax(0)
    spread = displacements - w @ displacements
    distance = spread.norm(dim=1)
    # The mean sum_j w_j D_j depends on the weights, too. The clamp avoids 0 / 0 for a client at the mean.
    mean_direction = (w / distance.clamp(min=torch.finfo(w.dtype).tiny)) @ spread
    weight_gradient = distance + turn - displacements @ mean_direction  # dL / dw
    gradient: Tensor = w * (weight_gradient - w @ weight_gradient)
    return gradient
