"""FedSCAM: weights from the clients' heterogeneity and alignment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from fedflat.algorithms.perturbation import Scam
from fedflat.algorithms.slot import Slot
from fedflat.algorithms.state import State
from fedflat.algorithms.weights.base import ChosenWeights, ClientRows, normalised
from fedflat.text import param


@dataclass(frozen=True)
class Aligned(ChosenWeights):
    """Clients gain weight if they agree with the last global update, and lose it if they differ (FedSCAM; Rahil 2026).

        v_i = p_i max(0, 1 + beta c_i) / (1 + gamma h_i)
        w_i = v_i / sum_S v_j

    p_i is the weight of client i in the run, by samples or uniform, and w_i its new weight; sum_S is the sum over the
    cohort. The perturbation ``scam`` sends the client's heterogeneity h_i and alignment c_i. If all v_i are 0, the
    weights are p_i.

    >>> from torch import tensor, zeros
    >>> nothing, sent = zeros(2, 1), {"perturbation.h": tensor([0.0, 1.0]), "perturbation.c": tensor([0.5, 0.0])}
    >>> rows = ClientRows(tensor([0, 1]), tensor([0.5, 0.5]), 1.0, nothing[0], nothing, sent)
    >>> Aligned(gamma=1.0, beta=1.0).choose(rows, {})[0]  # 0.75 and 0.25
    tensor([0.7500, 0.2500])
    """

    gamma: float = param(1.0, "how much heterogeneous clients lose", low=0)
    beta: float = param(0.8, "how much aligned clients gain", low=0)

    def choose(self, rows: ClientRows, state: State) -> tuple[Tensor, State]:
        # A site could send values that no client computes.
        h, c = rows.sent["perturbation.h"].clamp(min=0), rows.sent["perturbation.c"].clamp(-1, 1)
        return normalised(rows.weights / (1 + self.gamma * h) * (1 + self.beta * c).clamp(min=0), rows.weights), {}

    def conflict(self, slots: Mapping[str, Slot]) -> str | None:
        """Why the weights need FedSCAM's perturbation."""
        return None if isinstance(slots["perturbation"], Scam) else "aligned requires the perturbation scam"
