"""Starts of local training: each client may begin at a model of its own instead of the broadcast model z."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from fedflat.algorithms.slot import CohortMeans, Drift, LocalContext, Slot
from fedflat.algorithms.state import Fields, State, vector
from fedflat.registry import Registry
from fedflat.text import param


@dataclass(frozen=True)
class Start(Slot):
    """By default, every client starts local training from the broadcast model z."""

    def personal(self, z: Tensor, client: State) -> Tensor:
        """Return the model z_i from which a client starts, shape (P,), given z and the client's state for this slot.

        Other slots see z_i as ``ctx.z``, so the client's displacement is D_i = y_K - z_i, and z as ``ctx.broadcast``.
        """
        return z

    def finish(self, ctx: LocalContext) -> tuple[State, State]:
        """Return the new client state after the last local step, and this slot's messages to the server.

        ``ctx.z`` is z_i and ``ctx.broadcast`` the broadcast model. ``ctx.client`` holds the drift correction's state.
        """
        return {}, {}

    def mean_start(self, means: CohortMeans) -> Tensor:
        """Return the cohort's mean start, shape (P,), by default z; the server adds the mean displacement to it."""
        return means.z


@dataclass(frozen=True)
class Relaxed(Start):
    """Each client starts beyond the broadcast model, away from its own last model (FedInit; Sun et al. 2023).

        z_i = z + beta (z - last_i)
        last_i <- y_K

    - z: broadcast model
    - z_i: model from which client i starts
    - last_i: the client's model at the end of its previous participation; before its first participation, the initial
      server model
    - y_K: the client's model after its K local steps

    All other parts of the algorithm use z_i in place of z, so the displacement is D_i = y_K - z_i; only GHBM, LocalGHBM
    and LESAM, which compare server models of different rounds, use z itself. By default, the server adds the mean of
    D_i to z. With ``server=average``, it instead moves to the mean of the clients' models y_K; clients then also send
    z_i - z. Both rules are equivalent if all clients participate in every round and the drift correction keeps no
    state.

    >>> from torch import tensor
    >>> from fedflat.testing import local_context
    >>> Relaxed(beta=0.5).personal(tensor([1.0, 2.0]), {"last": tensor([0.0, 4.0])})
    tensor([1.5000, 1.0000])
    >>> ctx = local_context(y=[1.25, 1.5], z=[1.5, 1.0])._replace(received=tensor([1.0, 2.0]))
    >>> Relaxed(beta=0.5, server="average").finish(ctx)
    ({'last': tensor([1.2500, 1.5000])}, {'offset': tensor([ 0.5000, -1.0000])})
    """

    beta: float = param(0.1, "how far beyond z a client starts, as a multiple of z - last_i", low=0)
    server: Literal["displacement", "average"] = param(
        "displacement", "whether the server adds the mean of D_i to z (displacement) or averages y_K (average)"
    )

    def on_client(self) -> Fields:
        return (vector("last", start="model"),)

    def sends(self) -> Fields:
        return (vector("offset", weighting="aggregation"),) if self.server == "average" else ()

    def personal(self, z: Tensor, client: State) -> Tensor:
        return z + self.beta * (z - client["last"])

    def finish(self, ctx: LocalContext) -> tuple[State, State]:
        sent = {"offset": ctx.z - ctx.broadcast} if self.server == "average" else {}
        return {"last": ctx.y}, sent

    def mean_start(self, means: CohortMeans) -> Tensor:
        return means.z + means.mean["offset"] if self.server == "average" else means.z

    def asynchronous_conflict(self) -> str | None:
        return "each client starts from a model of its own, so its model is not the server's plus its displacement"

    def conflict(self, slots: Mapping[str, Slot]) -> str | None:
        drift = slots["drift"]
        if isinstance(drift, Drift) and drift.full_gradient == "common":
            return "MIME corrects gradients at the model that all clients start from; FedInit gives each client its own"
        return None


STARTS: Registry[type[Start]] = Registry("start", see="fedflat algorithms", namespace="algorithm parts")
"""Starts of local training by name."""
STARTS.register("relaxed", Relaxed)
