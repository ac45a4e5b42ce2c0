"""Local SGD, and the interface of local optimisers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedflat.algorithms.descent import Descent
from fedflat.algorithms.slot import CohortMeans, Drift, LocalContext, Slot
from fedflat.algorithms.state import State
from fedflat.models.layout import Layout
from fedflat.registry import Registry


@dataclass(frozen=True)
class LocalOptimiser(Slot):
    """By default, clients take SGD steps, with heavy-ball momentum if ``training.momentum`` is set.

        b <- momentum b + d_k + weight_decay y_k
        y_{k+1} = y_k - eta_k b

    - d_k: direction of local step k, after the drift correction and clipping
    - b: momentum buffer, which is zero at the start of every round
    - y_k: the client's model after k local steps
    - eta_k: learning rate of local step k
    - momentum, weight_decay: the settings ``training.momentum`` and ``training.weight_decay``

    >>> from torch import tensor
    >>> from fedflat.testing import local_context
    >>> ctx = local_context(y=[1.0, 2.0], z=[1.0, 2.0])
    >>> LocalOptimiser().move(tensor([1.0, -1.0]), tensor(0.1), ctx, Descent(weight_decay=0.5))
    (tensor([0.8500, 2.0000]), {})
    """

    def begin(self, ctx: LocalContext, descent: Descent) -> State:
        """Return the optimiser's state at the start of a client's round, e.g. moments, with tensors of any shape."""
        return {"velocity": torch.zeros_like(ctx.z)} if descent.momentum else {}

    def move(self, d: Tensor, lr: Tensor, ctx: LocalContext, descent: Descent) -> tuple[Tensor, State]:
        """Take one local step.

        Args:
            d: direction after the drift correction and clipping, shape (P,).
            lr: learning rate, shape ().
            ctx: the client's context, with its model ``ctx.y`` and the optimiser's state ``ctx.local``.
            descent: settings of local steps; the optimiser applies the weight decay, ``d`` is already clipped.

        Returns:
            The client's next model, shape (P,), and the fields of the local state that changed.
        """
        y, velocity = descent.move(ctx.y, d, lr, ctx.local.get("velocity"))
        return y, {} if velocity is None else {"velocity": velocity}

    def finish(self, ctx: LocalContext) -> tuple[State, State]:
        """Return the changed client state after the last local step, and this slot's messages to the server."""
        return {}, {}

    def aggregate(self, means: CohortMeans, server: State) -> State:
        """Return the changed server state, from the cohort's means."""
        return {}

    def conflict(self, slots: Mapping[str, Slot]) -> str | None:
        """Return why the drift in ``slots`` requires SGD instead of this optimiser, or None if it does not."""
        name, drift = self._name(), slots["drift"]
        return drift.sgd_conflict(name) if name and isinstance(drift, Drift) else None

    def run_conflict(self, descent: Descent, layout: Layout) -> str | None:
        """Return why this optimiser cannot be used with the settings or the model of a run, or None if it can.

        Args:
            descent: settings of local steps.
            layout: names and shapes of the trained parameters.
        """
        if self._name() and descent.momentum:
            return f"{self._name()} has its own momentum and ignores training.momentum; set training.momentum=0"
        return None

    def _name(self) -> str:
        """Return the name of this optimiser in messages; empty for SGD."""
        if type(self) is LocalOptimiser:
            return ""
        return LOCAL_OPTIMISERS.name_of(type(self)) or type(self).__name__


LOCAL_OPTIMISERS: Registry[type[LocalOptimiser]] = Registry(
    "local optimiser", see="fedflat algorithms", namespace="algorithm parts"
)
"""Local optimisers by name."""
