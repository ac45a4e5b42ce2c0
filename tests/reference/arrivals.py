"""Asynchronous training of quadratics, written as one loop over arrivals: every client restarts when it arrives."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from .trace import Vector


class Arrival(NamedTuple):
    """One arrival, as in section 6.3 of the specification."""

    time: float
    client: int
    started: int
    staleness: int
    version: int


def arrivals(durations: list[float], buffer: int, count: int) -> list[Arrival]:
    """The first ``count`` arrivals of clients that train all the time, each for its own duration."""
    due, started = list(durations), [0] * len(durations)
    waiting: list[int] = []  # arrived at this instant, not restarted yet
    version = filled = 0
    result: list[Arrival] = []
    while len(result) < count:
        client = min((i for i in range(len(due)) if i not in waiting), key=lambda i: (due[i], i))
        now, staleness = due[client], version - started[client]
        filled += 1
        if filled == buffer:
            version, filled = version + 1, 0
        result.append(Arrival(now, client, started[client], staleness, version))
        waiting.append(client)
        if all(due[i] > now for i in range(len(due)) if i not in waiting):
            for i in waiting:
                due[i], started[i] = now + durations[i], version
            waiting = []
    return result


def iterates(
    train: Callable[[int, Vector], Vector],
    x: Vector,
    events: list[Arrival],
    buffer: int,
    scale: Callable[[int], float],
    mixes_models: bool,
) -> list[Vector]:
    """The server models x^0, x^1, ... of FedAsync (``mixes_models``) or FedBuff with uniform weights.

    Args:
        train: returns a client's model after local training, given its number and the model it starts from.
        x: initial model.
        events: the arrivals.
        buffer: arrivals per update.
        scale: factor of an update as a function of its staleness; of FedBuff, before division by the buffer size.
        mixes_models: move towards the client's model instead of adding its displacement.
    """
    models, total = [x], np.zeros_like(x)
    for event in events:
        start = models[event.started]
        y = train(event.client, start)
        total = total + scale(event.staleness) * ((y - models[-1]) if mixes_models else (y - start)) / buffer
        if event.version == len(models):
            models.append(models[-1] + total)
            total = np.zeros_like(x)
    return models
