"""FedAWA: weights learnt on the server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedflat.algorithms.slot import Slot
from fedflat.algorithms.start import Start
from fedflat.algorithms.state import Fields, State, scalar
from fedflat.algorithms.weights.base import ChosenWeights, ClientRows
from fedflat.text import param


@dataclass(frozen=True)
class Awa(ChosenWeights):
    """The server learns the clients' weights from their displacements (FedAWA; Shi et al. 2025).

        w = softmax(l)
        L = sum_S w_i (||D_i - sum_S w_j D_j|| + 1 - cos(z, z + D_i))
        l <- l - weights_lr Adam(dL/dl)

    - l: one logit per client of the cohort S
    - w: weights of the clients in the mean of their displacements
    - L: loss that the server minimises
    - D_i: displacement y_K - y_0 of client i in the round
    - z: broadcast model
    - sum_S: sum over the cohort

    The server takes ``server_steps`` steps of Adam (betas 0.5 and 0.999) per round, and resets Adam before each round.
    A client's logit starts at p_i |S| / N: p_i is its weight according to ``federation.weighting``, and |S| of the N
    clients are in the cohort. The server remembers how far each logit has moved. With ``weights_from=before``, as in
    the published code, a round uses the weights before its last Adam step; with one step per round, each step thus
    takes effect in the next round.

    >>> from torch import tensor
    >>> z, displacements = tensor([1.0, 0.0]), tensor([[0.0, 2.0], [0.0, 0.0]])
    >>> rows = ClientRows(tensor([0, 1]), tensor([0.5, 0.5]), 1.0, z, displacements, {})
    >>> Awa(weights_lr=0.1).choose(rows, {"moved": tensor(0.0)})  # the first client turns away from z
    (tensor([0.5000, 0.5000]), {'moved': tensor([-0.1000,  0.1000])})
    """

    server_steps: int = param(1, "number of Adam steps per round", low=1, high=10_000)
    weights_lr: float = param(1e-3, "learning rate of Adam", above=0)
    weights_from: Literal["before", "after"] = param(
        "before", "whether the weights are those before or after the last Adam step"
    )

    def on_server(self) -> Fields:
        """Declare one number per client; before the first round, it is the scalar 0."""
        return (scalar("moved", sent=False),)

    def choose(self, rows: ClientRows, state: State) -> tuple[Tensor, State]:
        initial = rows.weights * rows.share
        moved = state["moved"].expand(round(len(initial) / rows.share)).clone()
        logits = initial + moved[rows.clients]
        cosine = torch.nn.functional.cosine_similarity(rows.z, rows.z + rows.displacements, dim=-1)
        m = v = torch.zeros_like(logits)
        for step in range(1, self.server_steps + 1):
            before = logits
            g = logit_gradient(logits, rows.displacements, 1 - cosine)
            m, v = 0.5 * m + 0.5 * g, 0.999 * v + 0.001 * g**2
            logits = logits - self.weights_lr * (m / (1 - 0.5**step)) / ((v / (1 - 0.999**step)).sqrt() + 1e-8)
        moved[rows.clients] = logits - initial
        return (before if self.weights_from == "before" else logits).softmax(0), {"moved": moved}

    def conflict(self, slots: Mapping[str, Slot]) -> str | None:
        if getattr(slots["drift"], "dual_scope", "all") == "active":
            return "FedAWA needs displacements, which dual_scope=active does not upload; use dual_scope=all"
        return None if slots["start"] == Start() else "FedAWA compares models z + D_i, so all clients must start from z"


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
