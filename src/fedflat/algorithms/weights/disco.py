"""FedDisco: weights from the clients' label distributions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedflat.algorithms.state import Fields, State, scalar
from fedflat.algorithms.weights.base import ChosenWeights, ClientRows, normalised
from fedflat.text import param


@dataclass(frozen=True)
class Disco(ChosenWeights):
    """Clients whose labels are far from uniformly distributed lose weight (FedDisco; Ye et al. 2023).

        v_i = max(0, p_i - a d_i + b)
        w_i = v_i / sum_S v_j

    - w_i: weight of client i in the mean of the displacements
    - p_i: weight of client i according to ``federation.weighting`` (by samples or uniform)
    - d_i: divergence of the client's label distribution from the uniform one
    - sum_S: sum over the round's cohort S

    With ``metric=kl``, d_i is the Kullback-Leibler divergence, divided by its sum over the cohort; with ``metric=l2``,
    it is the l2 distance. Each client sends its divergence. If all v_i are 0, the weights are p_i.

    >>> from torch import tensor
    >>> [float(Disco(metric="l2").measure(tensor(n))["divergence"]) for n in ([4.0, 0.0], [3.0, 3.0])]
    [0.7071067690849304, 0.0]
    >>> nothing, sent = torch.zeros(2, 1), {"weights.divergence": tensor([0.5, 0.0])}
    >>> rows = ClientRows(tensor([0, 1]), tensor([0.4, 0.6]), 1.0, nothing[0], nothing, sent)
    >>> Disco(a=0.4, b=0.0, metric="l2").choose(rows, {})[0]  # v = [0.4 - 0.4 * 0.5, 0.6]
    tensor([0.2500, 0.7500])
    """

    a: float = param(0.5, "weight of the divergence d_i", low=0)
    b: float = param(0.1, "constant added to every weight", low=0)
    metric: Literal["kl", "l2"] = param("kl", "divergence of a label distribution from the uniform one")

    @property
    def needs_labels(self) -> bool:
        return True

    def sends(self) -> Fields:
        return (scalar("divergence"),)

    def message_ranges(self, classes: int) -> dict[str, tuple[float, float]]:
        """The divergence is largest for a client that has one class only."""
        largest = math.log(classes) if self.metric == "kl" else math.sqrt(1 - 1 / classes)
        return {"divergence": (0.0, largest)}

    def measure(self, label_counts: Tensor) -> State:
        """Return the divergence of a client's label distribution from the uniform one, before it is normalised."""
        share, uniform = label_counts / label_counts.sum(), 1 / len(label_counts)
        if self.metric == "l2":
            return {"divergence": (share - uniform).norm()}
        return {"divergence": torch.special.xlogy(share, share / uniform).sum()}

    def choose(self, rows: ClientRows, state: State) -> tuple[Tensor, State]:
        d = rows.sent["weights.divergence"].clamp(min=0)  # rounding may give a divergence just below 0
        if self.metric == "kl":
            d = normalised(d, torch.zeros_like(d))
        return normalised((rows.weights - self.a * d + self.b).clamp(min=0), rows.weights), {}
