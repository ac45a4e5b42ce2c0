"""Base class of SCAFFOLD and FedMo: each client keeps a control variate, which corrects its gradients."""

from __future__ import annotations

from typing import ClassVar, Literal

from torch import Tensor

from fedflat.algorithms.slot import Drift, FullGradient, Gradient, LocalContext
from fedflat.algorithms.state import Fields, State, vector


class ControlVariates(Drift):
    """Control variates of clients and a vector s of the server correct each gradient.

        d_k = g - c_i + s
        c_i+ = c_i - s + (z - y_K) / H

    A subclass declares s under the name ``SERVER`` and updates it. With ``option=I``, c_i+ is the client's full-batch
    gradient at z.
    """

    SERVER: ClassVar[str]
    """Name of the server's vector s, shape (P,)."""
    NAME: ClassVar[str]
    """Name of the algorithm in messages."""

    option: Literal["I", "II"]

    @property
    def full_gradient(self) -> FullGradient:
        return "own" if self.option == "I" else "none"

    def on_client(self) -> Fields:
        return (vector("c"),)

    def begin(self, ctx: LocalContext) -> State:
        return {"correction": ctx.server[self.SERVER] - ctx.client["c"]}

    def direction(self, g: Tensor, ctx: LocalContext, gradient: Gradient) -> Tensor:
        return g + ctx.local["correction"]

    def mean_direction(self, ctx: LocalContext) -> Tensor:
        """Return (z - y_K) / H, shape (P,)."""
        return ctx.mean_direction

    def new_variate(self, ctx: LocalContext) -> Tensor:
        """Return c_i+ after the last local step, shape (P,)."""
        if ctx.own_gradient is not None:  # option I
            return ctx.own_gradient
        return ctx.client["c"] - ctx.server[self.SERVER] + self.mean_direction(ctx)

    def sgd_conflict(self, optimiser: str) -> str | None:
        return f"{self.NEEDS_SGD}; use option I: {self.NAME}(option=I)+{optimiser}" if self.option == "II" else None
