"""Base class of FedAdamW and FedMuon: clients share a moment, and add the last global update to every local step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedflat.algorithms.descent import Descent
from fedflat.algorithms.local_optimiser.base import LocalOptimiser
from fedflat.algorithms.slot import TINY_LR, CohortMeans, LocalContext, Slot
from fedflat.algorithms.state import Fields, State, scalar, vector
from fedflat.text import param


@dataclass(frozen=True)
class GlobalUpdate(LocalOptimiser):
    """Steps of another local optimiser, from which a subclass derives as well, plus the last global update.

        y_{k+1} = step(y_k) + (gamma / K) (eta_t / eta_{t-1}) D

    The server averages the clients' moment ``SHARED``, from which clients start the next round. With gamma = 0, no
    update is added, and the server neither keeps it nor receives learning rates.
    """

    SHARED: ClassVar[str]
    """Name of the moment that the server averages, shape (P,)."""

    gamma: float = param(
        0.5, "share of the last global update that a round's local steps together add; 0 disables it", low=0, high=1
    )

    def on_server(self) -> Fields:
        """Declare the mean moment, the last mean displacement D, and the learning rate of its round."""
        # Before the first update, any learning rate but 0 will do.
        update = (vector("last", momentum="descent"), scalar("lr", start=1.0)) if self.gamma else ()
        return (vector(self.SHARED), *update)

    def sends(self) -> Fields:
        """Declare the moment, and the round's learning rate, which the server does not know otherwise."""
        return (vector(self.SHARED), scalar("lr")) if self.gamma else (vector(self.SHARED),)

    def begin(self, ctx: LocalContext, descent: Descent) -> State:
        """Return the optimiser's state with the server's moment, and ``push``, which every step adds, shape (P,)."""
        state = super().begin(ctx, descent) | {self.SHARED: ctx.server[self.SHARED]}
        if not self.gamma:
            return state
        lr_ratio = ctx.first_lr / ctx.server["lr"].clamp(min=TINY_LR)
        return state | {"push": self.gamma / ctx.steps * lr_ratio * ctx.server["last"]}

    def move(self, d: Tensor, lr: Tensor, ctx: LocalContext, descent: Descent) -> tuple[Tensor, State]:
        y, moments = super().move(d, lr, ctx, descent)
        return y + ctx.local["push"] if self.gamma else y, moments

    def finish(self, ctx: LocalContext) -> tuple[State, State]:
        return {}, {self.SHARED: self.shared(ctx)} | ({"lr": ctx.first_lr} if self.gamma else {})

    def shared(self, ctx: LocalContext) -> Tensor:
        """Return the moment to send after the last local step, shape (P,)."""
        return ctx.local[self.SHARED]

    def aggregate(self, means: CohortMeans, server: State) -> State:
        update = {"last": means.displacement, "lr": means.mean["lr"]} if self.gamma else {}
        return {self.SHARED: means.mean[self.SHARED]} | update

    def conflict(self, slots: Mapping[str, Slot]) -> str | None:
        if self.gamma and getattr(slots["drift"], "dual_scope", "all") == "active":
            name = self._name()
            return f"{name} needs the mean displacement, which dual_scope=active does not upload; use dual_scope=all"
        return super().conflict(slots)
