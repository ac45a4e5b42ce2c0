"""Similarity of clients' models and the server model."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fedflat.engines.cpu.engine import one_thread
from fedflat.engines.problem.task import finite_or_none
from fedflat.errors import UserError
from fedflat.experiment.analysis.cohort import Measurements
from fedflat.experiment.analysis.run_model import RunModel, replay_after
from fedflat.flatness import Objective
from fedflat.flatness.similarity import features_of, linear_cka, subspace_overlap, top_eigenvectors


def client_similarity(
    server: RunModel,
    clients: Sequence[int] | None = None,
    *,
    eigenvectors: int = 10,
    examples: int | None = None,
    batch: int | None = None,
    seed: int = 0,
    progress: Callable[[str], None] = lambda text: None,
) -> list[Measurements]:
    """Compare clients with the server model from which they train, by replaying the round that follows it.

    Args:
        server: the server model of a run, final or saved.
        clients: client numbers; default: the cohort of the replayed round.
        eigenvectors: dimension of the eigenspaces.
        examples: maximum number of examples of the global loss and of each client's loss; default: all.
        batch: examples per batch; default: at most 1000, fewer if the inputs are large.
        seed: seed of the sampled examples and of Lanczos; ``seed + 1`` is that of Lanczos for clients.
        progress: called with a description of each measurement before it is made.

    Returns:
        One row per client: ``client``, ``overlap_at_server`` and ``overlap``, the overlap of the top eigenspaces of
        the client's loss and of the global loss at the server model. The client's loss is taken at the server model,
        or at the client's own model after local training. ``cka`` is the linear CKA of the features of client's and
        server's model on the examples of the global loss; None if the features are constant.
    """
    if server.name != "server":
        raise UserError(f"clients train from the server model, not from {server.name}; name RUN:server or RUN:server@N")
    replay = replay_after(server, server.rounds)
    cohort = replay.clients(clients)
    progress(f"training {len(cohort)} clients")
    states = replay.local_models(cohort, replay.train(cohort))

    def sampled(objective: Objective) -> Objective:
        return objective if examples is None or examples >= objective.examples else objective.subset(examples, seed)

    rows = []
    with one_thread():
        progress("eigenvectors of the global loss")
        global_loss = sampled(server.objective(batch=batch))
        top = top_eigenvectors(global_loss, eigenvectors, seed=seed)
        features = features_of(global_loss)
        for client, state in zip(cohort, states, strict=True):
            progress(f"client {client.number}")
            at_server = sampled(server.objective(client=client.number, batch=batch))
            # Replays use the run's training precision, which may differ from that of the measurement.
            weights, buffers = state.weights.to(server.state.weights), state.buffers.to(server.state.buffers)
            own = state._replace(weights=weights, buffers=buffers)
            at_client = sampled(server.objective(client=client.number, batch=batch, state=own))
            overlaps = [  # the same seed would make arbitrary eigenvectors of eigenvalue 0 alike
                subspace_overlap(top, top_eigenvectors(loss, eigenvectors, seed=seed + 1))
                for loss in (at_server, at_client)
            ]
            row: Measurements = {"client": client.number, "overlap_at_server": overlaps[0], "overlap": overlaps[1]}
            client_features = features_of(sampled(server.objective(batch=batch, state=own)))
            rows.append(row | {"cka": finite_or_none(linear_cka(features, client_features))})
    return rows
