"""Drift of a trained cohort: client updates relative to the mean, and norms of server and client state."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fedflat.algorithms import Algorithm
from fedflat.algorithms.algorithm import States, flat_fields, flat_state
from fedflat.algorithms.drift import Drift
from fedflat.engines.round.contract import Client, Outcome, by_samples
from fedflat.experiment.analysis.replay import rows_of
from fedflat.flatness.clients.drift import cosine, disagreement, update_drift

Figures = dict[str, Any]


def measure_cohort(algorithm: Algorithm, members: list[Client], outcome: Outcome, states: States) -> Figures:
    """Drift, disagreement, agreement with the momentum, and state norms; ``states`` are the server states received."""
    moved = moves(algorithm, members, outcome)
    update = outcome.returned.displacement
    drift = update_drift(moved, update)
    spread = disagreement(moved, by_samples([len(client.indices) for client in members]))
    figures: Figures = {
        "clients": [client.number for client in members],
        "length": numbers(drift.lengths),
        "distance": numbers(drift.distances),
        "cosine": numbers(drift.cosines),
        "update": number(update.norm()),
        "disagreement": {name: number(value) for name, value in spread._asdict().items()},
    }
    momentum = algorithm.momentum(states)
    if momentum is not None:
        vector, sign = momentum
        agreement = numbers(torch.stack([sign * cosine(row, vector) for row in moved]))
        figures["momentum"] = {"norm": number(vector.norm()), "agreement": agreement}
    return figures | vector_norms(algorithm, outcome.clients, states)


def moves(algorithm: Algorithm, members: list[Client], outcome: Outcome) -> Tensor:
    """y_K - z of each client, [clients, P]."""
    rows = rows_of(outcome).displacements
    if type(algorithm.drift).local_displacement is Drift.local_displacement:
        return rows
    return torch.stack(
        [
            algorithm.drift.local_displacement(row, client.state["drift"])
            for row, client in zip(rows, members, strict=True)
        ]
    )


def vector_norms(algorithm: Algorithm, clients: list[Client], states: States) -> Figures:
    """Norms of server and client state vectors (control variates, duals, momenta), by full name."""
    of_server = {name for name, field in flat_fields(algorithm.server_fields()).items() if field.vector}
    of_client = [name for name, field in flat_fields(algorithm.client_fields()).items() if field.vector]
    figures: Figures = {}
    if of_server:
        figures["server_vectors"] = {
            name: number(value.norm()) for name, value in flat_state(states).items() if name in of_server
        }
    if of_client:
        states_of_clients = [flat_state(client.state) for client in clients]
        figures["client_vectors"] = {
            name: numbers(torch.stack([state[name].norm() for state in states_of_clients])) for name in of_client
        }
    return figures


def number(value: Tensor | float) -> float | None:
    """A JSON-compatible number; None if not finite."""
    plain = float(value)
    return plain if math.isfinite(plain) else None


def numbers(values: Tensor) -> list[float | None]:
    """JSON-compatible numbers; None where not finite."""
    return [value if math.isfinite(value) else None for value in values.tolist()]
