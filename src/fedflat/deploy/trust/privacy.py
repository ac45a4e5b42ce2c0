"""Differential privacy by Flower's own mods, which clip what a site sends and may add noise before it leaves.

A mod compares the arrays of an answer with those of the same names in the message. So it is shown displacements: zero in the message, the
site's own in the answer. All that is sent must then be the displacement; whatever else an algorithm sends would leave without noise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message

from fedflat.deploy.flower.wire import ARRAYS, DISPLACEMENT, MODEL, NUMBERS, why_not
from fedflat.deploy.server.settings import Deployment
from fedflat.engines.problem.problem import Problem
from fedflat.engines.round.contract import Training
from fedflat.errors import UserError

Mod = Callable[[Message, Context, Callable[[Message, Context], Message]], Message]
CLIPPING_NORM = "clipping_norm"
"""What Flower's clipping mods look for in a message."""
OF_OLD_MESSAGES = "it works on the messages of Flower's older workflows, with a server of its own; a site's update cannot be hidden from this one"
UNUSABLE = {
    "secagg_mod": OF_OLD_MESSAGES,
    "secaggplus_mod": OF_OLD_MESSAGES,
    "adaptiveclipping_mod": "the norm that it asks the server to adapt would be lost when a server restarts; use fixedclipping_mod",
}


def through(mods: Sequence[Mod], message: Message, context: Context, work: Callable[[], Message]) -> Message:
    """The answer to a message, after some mods have had their way with its displacement."""
    if not mods:
        return work()
    received, answers = message.content.array_records[ARRAYS], []

    def site(message: Message, context: Context) -> Message:
        message.content[ARRAYS] = received
        answers.append(work())
        if NUMBERS in answers[0].content:
            answers[0].content.metric_records[NUMBERS]["loss"] = 0.0  # it tells of the data, and has no noise
        return answers[0]

    zero = np.zeros_like(received[MODEL].numpy())
    message.content[ARRAYS] = ArrayRecord({DISPLACEMENT: Array(zero)})
    call: Callable[[Message, Context], Message] = site
    for mod in reversed(mods):
        call = partial(mod, call_next=call)
    modified = call(message, context)
    refused = bool(answers) and why_not(answers[0].content) is not None
    return answers[0] if refused else modified


def refuse_mods(mods: Sequence[Mod], problem: Problem, training: Training) -> None:
    """Refuse mods that do not fit what is sent."""
    for mod in mods:
        name = getattr(mod, "__name__", type(mod).__name__)
        why = UNUSABLE.get(name) or shows_more(problem, training)
        if why:
            raise UserError(f"{name} cannot be used here: {why}")


def refuse_noise(wanted: Deployment, problem: Problem, training: Training) -> None:
    """Refuse clipping and noise at the server where they would not be what they are meant to be."""
    if wanted.clipping_norm is None:
        if wanted.noise_multiplier:
            raise UserError("deploy.noise_multiplier counts in clipping norms; set deploy.clipping_norm as well")
        return
    why = shows_more(problem, training)
    if why:
        raise UserError(f"deploy.clipping_norm cannot be used here: {why}")
    if training.aggregation.weighting != "uniform" or training.aggregation.centre != "mean":
        raise UserError(
            "deploy.clipping_norm bounds a site's share of a uniform mean; set federation.weighting=uniform, aggregation=mean"
        )


def shows_more(problem: Problem, training: Training) -> str:
    """Why noise on displacements would not cover all that a site shows; empty where it does."""
    algorithm = training.algorithm
    sent = [field.name for fields in algorithm.message_fields().values() for field in fields]
    if algorithm.drift.whole_gradient == "common":
        return "clients also send the gradient of their data, which would need noise of its own"
    if sent:
        return f"clients also send {' and '.join(sent)}, which would need noise of its own"
    if algorithm.drift.on_client():
        return "clients keep vectors that know nothing of the noise, and would part from the server's"
    if len(problem.initial()[1]) and not training.own_statistics:
        return "statistics of normalisations would be sent without noise; keep them at the sites with training.statistics=own"
    return ""


def noise(wanted: Deployment, size: int) -> np.ndarray | None:
    """What the server adds to one of n rows, so that their mean has noise of deviation multiplier * norm / n; none where none is wanted.

    Drawn from the operating system's entropy, never from the run's seed, which every site knows.
    """
    if not wanted.noise_multiplier or wanted.clipping_norm is None:
        return None
    return np.random.default_rng().normal(0.0, wanted.noise_multiplier * wanted.clipping_norm, size)
