"""The base class of client weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fedflat.algorithms.slot import Slot
from fedflat.algorithms.state import State


class ClientRows(NamedTuple):
    """What the server knows about the clients of a cohort when it chooses their weights; n is the cohort's size."""

    clients: Tensor
    """Numbers of the clients in the federation, int64, shape (n,)."""
    weights: Tensor
    """Weights p_i of the run, by samples or uniform, which sum to 1, shape (n,)."""
    share: float
    """Cohort size divided by the number N of clients."""
    z: Tensor
    """Broadcast model, shape (P,)."""
    displacements: Tensor
    """Displacements D_i of the clients, shape (n, P)."""
    sent: dict[str, Tensor]
    """Messages by full name, ``slot.field``, one row per client."""


@dataclass(frozen=True)
class Weights(Slot):
    """By default, displacements have the weights of the run: by samples or uniform (federation.weighting)."""

    @property
    def are_chosen(self) -> bool:
        """Whether ``choose`` replaces the weights of the run; the server then needs the row of every client."""
        return False

    @property
    def needs_labels(self) -> bool:
        """Whether clients send what ``measure`` computes from the labels of their examples."""
        return False

    def measure(self, label_counts: Tensor) -> State:
        """Return the scalars that ``sends`` declares, from a client's number of examples per class, shape (C,)."""
        return {}

    def choose(self, rows: ClientRows, state: State) -> tuple[Tensor, State]:
        """Return the weights of a cohort, which sum to 1, shape (n,), and the changed fields of this slot's state."""
        return rows.weights, {}

    def robust_aggregation_conflict(self) -> str | None:
        return "clients are averaged with weights that the algorithm chooses" if self.are_chosen else None

    def privacy_conflict(self, equal_steps: bool) -> str | None:
        return "the algorithm chooses the weights of clients from their messages" if self.are_chosen else None

    def asynchronous_conflict(self) -> str | None:
        return "the algorithm chooses the weights of a cohort that arrives together" if self.are_chosen else None


def normalised(weights: Tensor, otherwise: Tensor) -> Tensor:
    """Return nonnegative ``weights`` of shape (n,), scaled to sum to 1; if all of them are 0, return ``otherwise``.

    >>> from torch import tensor
    >>> normalised(tensor([1.0, 3.0]), tensor([0.5, 0.5])), normalised(tensor([0.0, 0.0]), tensor([0.5, 0.5]))
    (tensor([0.2500, 0.7500]), tensor([0.5000, 0.5000]))
    """
    total = weights.sum()
    return torch.where(total > 0, weights / total, otherwise)


@dataclass(frozen=True)
class ChosenWeights(Weights):
    """Base class of client weights that replace those of the run."""

    @property
    def are_chosen(self) -> bool:
        return True
