"""Drift of a trained cohort: client updates relative to the mean, and norms of server and client state."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedflat.algorithms import Algorithm
from fedflat.algorithms.algorithm import States, flat_fields, flat_state
from fedflat.algorithms.drift import Drift
from fedflat.engines.problem.task import finite_or_none, finite_values
from fedflat.engines.round.aggregation import weights_by_samples
from fedflat.engines.round.contract import Client, Outcome
from fedflat.experiment.analysis.replay import rows_of
from fedflat.flatness.clients import cosine, disagreement, update_drift

Measurements = dict[str, Any]
"""JSON-compatible values by name, possibly nested."""


def measure_cohort(algorithm: Algorithm, clients: list[Client], outcome: Outcome, states: States) -> Measurements:
    """Measure how far the clients of a cohort moved during local training and how much they disagree.

    Displacements start at the broadcast model, or with ``relaxed`` at the model from which each client starts.

    Args:
        algorithm: the algorithm that trained the cohort.
        clients: the cohort before the round.
        outcome: the result of local training, with one row per client.
        states: the server states that the cohort received.

    Returns:
        For each client: the ``length`` of its displacement, its ``distance`` to the cohort's mean update and the
        ``cosine`` with it. For the cohort: the norm of the mean ``update`` and the ``disagreement``. If the algorithm
        has a momentum: its ``norm``, and the ``agreement`` (cosine) of each displacement with it. Also the norms of
        state vectors. Numbers that are not finite become None.
    """
    displacements = local_displacements(algorithm, clients, outcome)
    update = outcome.cohort_means.displacement
    drift = update_drift(displacements, update)
    spread = disagreement(displacements, weights_by_samples([len(client.indices) for client in clients]))
    measurements: Measurements = {
        "clients": [client.number for client in clients],
        "length": finite_values(drift.lengths),
        "distance": finite_values(drift.distances),
        "cosine": finite_values(drift.cosines),
        "update": finite_or_none(update.norm()),
        "disagreement": {name: finite_or_none(value) for name, value in spread._asdict().items()},
    }
    momentum = algorithm.momentum(states)
    if momentum is not None:
        vector, sign = momentum  # the sign turns a momentum of gradients into a descent direction
        agreement = torch.stack([sign * cosine(displacement, vector) for displacement in displacements])
        measurements["momentum"] = {"norm": finite_or_none(vector.norm()), "agreement": finite_values(agreement)}
    return measurements | _state_norms(algorithm, outcome.clients, states)


def local_displacements(algorithm: Algorithm, clients: list[Client], outcome: Outcome) -> Tensor:
    """Return each client's model after local training minus the model it started from, [clients, parameters]."""
    uploads = rows_of(outcome).displacements
    if type(algorithm.drift).local_displacement is Drift.local_displacement:
        return uploads  # most drifts upload the displacement itself; stacking would only copy all rows
    rows = [
        algorithm.drift.local_displacement(upload, client.state["drift"])
        for upload, client in zip(uploads, clients, strict=True)
    ]
    return torch.stack(rows)


def _state_norms(algorithm: Algorithm, clients: list[Client], states: States) -> Measurements:
    """Return the norm of each vector in the server's and the clients' state, such as a control variate, by name."""
    server_names = [name for name, field in flat_fields(algorithm.server_fields()).items() if field.vector]
    client_names = [name for name, field in flat_fields(algorithm.client_fields()).items() if field.vector]
    norms: Measurements = {}
    if server_names:
        vectors = flat_state(states)  # its order may change when a run is resumed, so use the order of the fields
        norms["server_vectors"] = {name: finite_or_none(vectors[name].norm()) for name in server_names}
    if client_names:
        by_client = [flat_state(client.state) for client in clients]
        norms["client_vectors"] = {
            name: finite_values(torch.stack([vectors[name].norm() for vectors in by_client])) for name in client_names
        }
    return norms
