"""State of a slot: declared fields, which engines can store, send and count."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

State = dict[str, Tensor]
"""Tensors by field name: vectors of shape (P,) and scalars of shape ()."""
Weighting = Literal["uniform", "samples", "aggregation"]
"""Weights of a mean over clients: equal, by their numbers of samples, or those that the run gives displacements."""


@dataclass(frozen=True)
class Field:
    """The declaration of one vector or scalar that a slot keeps or sends."""

    name: str
    """Name of the vector or scalar: its key in the state or message."""
    vector: bool = True
    """Whether the field is a vector of shape (P,) instead of a scalar."""
    start: float | Literal["model"] = 0.0
    """Initial value of every entry; with ``"model"``, the field starts as a copy of the initial model."""
    sent: bool = True
    """For server state: whether clients receive it."""
    weighting: Weighting = "uniform"
    """For messages: weights of their mean over clients; ``aggregation`` uses the weights of displacements."""
    momentum: Literal["ascent", "descent"] | None = None
    """For server state: marks a momentum, as a mean of gradients (ascent) or of displacements (descent); else None."""

    def new(self, x: Tensor) -> Tensor:
        """Return the initial value: a copy of the initial model ``x`` of shape (P,), or ``start`` in every entry."""
        if self.start == "model":
            return x.clone()
        if self.vector:
            return torch.full_like(x, self.start)
        return torch.full((), self.start, dtype=x.dtype, device=x.device)

    def scalars(self, size: int) -> int:
        """Return the number of values that this field holds for a model of ``size`` parameters."""
        return size if self.vector else 1


def vector(
    name: str,
    *,
    start: float | Literal["model"] = 0.0,
    sent: bool = True,
    weighting: Weighting = "uniform",
    momentum: Literal["ascent", "descent"] | None = None,
) -> Field:
    """Declare a vector of shape (P,) that a slot keeps or sends.

    Args:
        name: key of the vector in the state.
        start: initial value of every entry; with ``"model"``, the vector starts as a copy of the initial model.
        sent: for server state, whether clients receive the vector.
        weighting: for messages, the weights of their mean over clients: equal (``uniform``), by the clients' numbers of
            samples (``samples``), or the weights that the run gives displacements (``aggregation``).
        momentum: for server state, marks a momentum: ``ascent`` for a mean of gradients, which points uphill,
            ``descent`` for a mean of displacements; None for other vectors.
    """
    return Field(name, True, start, sent, weighting, momentum)


def scalar(name: str, *, start: float = 0.0, sent: bool = True, weighting: Weighting = "uniform") -> Field:
    """Declare a scalar that a slot keeps or sends.

    Args:
        name: key of the scalar in the state.
        start: initial value.
        sent: for server state, whether clients receive the scalar.
        weighting: for messages, the weights of their mean over clients: ``uniform``, ``samples`` or ``aggregation``.
    """
    return Field(name, False, start, sent, weighting)


Fields = tuple[Field, ...]


def new_state(fields: Fields, x: Tensor) -> State:
    """Return the initial state of ``fields`` for a model ``x`` of shape (P,)."""
    return {field.name: field.new(x) for field in fields}
