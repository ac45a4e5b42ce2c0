"""Differential privacy with Flower's mods, which clip what a site sends and may add noise.

A mod compares each array of an answer with the array of the same name in the message, and treats the difference as the
update. Mods therefore see a displacement of zero in the message, and the site's displacement in the answer. A site may
not send any other array, because the mods would not add noise to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message

from fedflat.deploy.flower.wire import ARRAYS, DISPLACEMENT, MODEL, NUMBERS, refusal_reason
from fedflat.deploy.settings import Deployment
from fedflat.engines.problem.problem import Problem
from fedflat.engines.round.contract import Training
from fedflat.errors import UserError

Mod = Callable[[Message, Context, Callable[[Message, Context], Message]], Message]
CLIPPING_NORM = "clipping_norm"
"""The key that Flower's clipping mods look for in a message."""
OLD_WORKFLOW = "it needs the server of Flower's older workflows; updates cannot be hidden from this server"
UNUSABLE = {
    "secagg_mod": OLD_WORKFLOW,
    "secaggplus_mod": OLD_WORKFLOW,
    "adaptiveclipping_mod": "the adapted norm would be lost when the server restarts; use fixedclipping_mod",
}
"""Mods that cannot be used, and why."""


def apply_mods(mods: Sequence[Mod], message: Message, context: Context, work: Callable[[], Message]) -> Message:
    """Return the answer to a message, after Flower's mods have clipped its displacement or added noise to it.

    A mod treats the difference between the arrays of answer and message as the update. The mods therefore see a message
    with a displacement of zero. The innermost call restores the received arrays and computes the answer with ``work``.
    """
    if not mods:
        return work()
    received = message.content.array_records[ARRAYS]
    answers: list[Message] = []

    def answer_message(message: Message, context: Context) -> Message:
        """Compute the answer; called by the innermost mod.

        The mods saw a message with a displacement of zero, so the arrays that the server sent are restored first.
        """
        message.content[ARRAYS] = received
        answer = work()
        answers.append(answer)
        if NUMBERS in answer.content:
            answer.content.metric_records[NUMBERS]["loss"] = 0.0  # it reveals the data and has no noise
        return answer

    zero = np.zeros_like(received[MODEL].numpy())
    message.content[ARRAYS] = ArrayRecord({DISPLACEMENT: Array(zero)})
    call: Callable[[Message, Context], Message] = answer_message
    for mod in reversed(mods):
        call = partial(mod, call_next=call)
    modified = call(message, context)
    if answers and refusal_reason(answers[0].content) is not None:  # a refusal has no displacement to modify
        return answers[0]
    return modified


def check_mods(mods: Sequence[Mod], problem: Problem, training: Training) -> None:
    """Raise ``UserError`` for mods that cannot be used at all, or not with this model and algorithm."""
    for mod in mods:
        name = getattr(mod, "__name__", type(mod).__name__)
        reason = UNUSABLE.get(name) or privacy_gap(problem, training)
        if reason:
            raise UserError(f"{name} cannot be used here: {reason}")


def check_noise(deployment: Deployment, problem: Problem, training: Training) -> None:
    """Raise ``UserError`` for clipping and noise at the server that would not give differential privacy."""
    if deployment.clipping_norm is None:
        if deployment.noise_multiplier:
            raise UserError("deploy.noise_multiplier is a multiple of deploy.clipping_norm; set that as well")
        return
    reason = privacy_gap(problem, training)
    if reason:
        raise UserError(f"deploy.clipping_norm cannot be used here: {reason}")
    if training.aggregation.weighting != "uniform" or training.aggregation.centre != "mean":
        raise UserError(
            "deploy.clipping_norm bounds a site's share of a uniform mean; "
            "set federation.weighting=uniform and federation.aggregation=mean"
        )


def privacy_gap(problem: Problem, training: Training) -> str:
    """Say why noise on displacements would not cover everything that a site reveals; empty if it does."""
    algorithm = training.algorithm
    additional = [field.name for fields in algorithm.message_fields().values() for field in fields]
    has_buffers = len(problem.initial_state()[1]) > 0
    if algorithm.drift.full_gradient == "common":
        return "clients also send the gradient of their data, which would need its own noise"
    if additional:
        return f"clients also send {' and '.join(additional)}, which would need its own noise"
    if algorithm.weights.are_chosen:
        return "the server chooses the weights of sites, which does not bound a site's share of the mean"
    if algorithm.drift.on_client():
        return "clients keep state without the noise, which would diverge from the server's"
    if has_buffers and not training.own_statistics:
        return "BatchNorm statistics would be sent without noise; keep them at the sites with training.statistics=own"
    return ""


def draw_noise(deployment: Deployment, size: int) -> np.ndarray | None:
    """Draw the noise that the server adds to one of the n displacements of a round [size]; None if not configured.

    The mean of the displacements then has noise of standard deviation noise_multiplier * clipping_norm / n. The noise
    is seeded with the operating system's entropy, not with the run's seed, which every site knows.
    """
    if not deployment.noise_multiplier or deployment.clipping_norm is None:
        return None
    return np.random.default_rng().normal(0.0, deployment.noise_multiplier * deployment.clipping_norm, size)
