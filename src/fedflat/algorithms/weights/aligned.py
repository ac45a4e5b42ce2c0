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
    """Clients that agree with the last global update gain weight (FedSCAM; Rahil et al. 2026).

        v_i = p_i max(0, 1 + beta c_i) / (1 + gamma h_i)
        w_i = v_i / sum_S v_j

    - w_i: weight of client i in the mean of the displacements
    - p_i: weight of client i according to ``federation.weighting`` (by samples or uniform)
    - c_i: alignment of client i with the last global update
    - h_i: heterogeneity of client i
    - sum_S: sum over the round's cohort S

    The perturbation ``scam`` defines c_i and h_i, which clients send. If all v_i are 0, the weights are p_i.

    >>> from torch import tensor, zeros
    >>> nothing, sent = zeros(2, 1), {"perturbation.h": tensor([0.0, 1.0]), "perturbation.c": tensor([0.5, 0.0])}
    >>> rows = ClientRows(tensor([0, 1]), tensor([0.5, 0.5]), 1.0, nothing[0], nothing, sent)
    >>> Aligned(gamma=1.0, beta=1.0).choose(rows, {})[0]  # v = [0.5 * 1.5, 0.5 / 2]
    tensor([0.7500, 0.2500])
    """

    gamma: float = param(1.0, "how much weight heterogeneous clients lose", low=0)
    beta: float = param(0.8, "how much weight aligned clients gain", low=0)

    def choose(self, rows: ClientRows, state: State) -> tuple[Tensor, State]:
        # A faulty site could send values outside the valid range.
        h, c = rows.sent["perturbation.h"].clamp(min=0), rows.sent["perturbation.c"].clamp(-1, 1)
        return normalised(rows.weights / (1 + self.gamma * h) * (1 + self.beta * c).clamp(min=0), rows.weights), {}

    def conflict(self, slots: Mapping[str, Slot]) -> str | None:
        return None if isinstance(slots["perturbation"], Scam) else "aligned requires the perturbation scam"
