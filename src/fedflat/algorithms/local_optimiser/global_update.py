"""The last global update, which FedAdamW and FedMuon add to every local step."""

from __future__ import annotations

from torch import Tensor

from fedflat.algorithms.slot import TINY_LR, CohortMeans, LocalContext
from fedflat.algorithms.state import Fields, State, scalar, vector

GAMMA = "share of the last global update that all local steps of a round together add; 0 disables it"


def on_server(gamma: float) -> Fields:
    """Declare the last mean displacement, and the learning rate of its round; nothing if ``gamma`` is 0."""
    # Before the first update, any learning rate but 0 will do.
    return (vector("last", momentum="descent"), scalar("lr", start=1.0)) if gamma else ()


def sends(gamma: float) -> Fields:
    """Declare the round's learning rate, which the server does not know otherwise; nothing if ``gamma`` is 0."""
    return (scalar("lr"),) if gamma else ()


def begin(gamma: float, ctx: LocalContext) -> State:
    """Return what every step adds, (gamma / K) (eta_t / eta_{t-1}) D, shape (P,), where D is the last global update."""
    if not gamma:
        return {}
    return {"push": gamma / ctx.steps * (ctx.first_lr / ctx.server["lr"].clamp(min=TINY_LR)) * ctx.server["last"]}


def pushed(y: Tensor, ctx: LocalContext) -> Tensor:
    """Return the client's model ``y`` after a step, plus the part of the last global update that the step adds."""
    return y + ctx.local["push"] if "push" in ctx.local else y


def finish(gamma: float, ctx: LocalContext) -> State:
    """Return the message to the server: the learning rate of the round's first step."""
    return {"lr": ctx.first_lr} if gamma else {}


def aggregate(gamma: float, means: CohortMeans) -> State:
    """Return the new server state: the cohort's mean displacement, and the learning rate of its round."""
    return {"last": means.displacement, "lr": means.mean["lr"]} if gamma else {}
