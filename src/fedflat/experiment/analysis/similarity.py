"""Similarity of clients' models and the server model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fedflat.engines.cpu.engine import one_thread
from fedflat.engines.problem.task import finite_or_none
from fedflat.errors import UserError
from fedflat.experiment.analysis.cohort import Measurements
from fedflat.experiment.analysis.run_model import RunModel, replay_after
from fedflat.flatness import Objective
from fedflat.flatness.similarity import features_of, linear_cka, subspace_overlap, top_eigenvectors


class ServerReference:
    """The server model's top eigenspace and features, with which those of clients are compared.

    Args:
        global_loss: the loss on the data of all clients, at the server model.
        eigenvectors: dimension of the eigenspaces.
        seed: seed of Lanczos; ``seed + 1`` is that of Lanczos for clients.
        options: further keyword arguments of Lanczos.
    """

    def __init__(self, global_loss: Objective, eigenvectors: int, seed: int, **options: Any) -> None:
        # The same seed would make arbitrary eigenvectors of eigenvalue 0 alike.
        self._client_options: dict[str, Any] = {"count": eigenvectors, "seed": seed + 1, **options}
        self._top = top_eigenvectors(global_loss, eigenvectors, seed=seed, **options)
        self._features = features_of(global_loss)

    def overlap(self, client_loss: Objective) -> float:
        """Return the overlap of the top eigenspaces of a client's loss and of the global loss, from 0 to 1."""
        return subspace_overlap(self._top, top_eigenvectors(client_loss, **self._client_options))

    def cka(self, client_model: Objective) -> float | None:
        """Return the linear CKA of features; None if they are constant.

        Args:
            client_model: the global loss at the client's model, on the same examples as at the server model.
        """
        return finite_or_none(linear_cka(self._features, features_of(client_model)))


def client_similarity(
    server: RunModel,
    clients: Sequence[int] | None = None,
    *,
    eigenvectors: int = 10,
    examples: int | None = None,
    batch_size: int | None = None,
    seed: int,
    progress: Callable[[str], None] = lambda text: None,
) -> list[Measurements]:
    """Compare clients with the server model from which they train, by replaying the round that follows it.

    Args:
        server: the server model of a run, final or saved.
        clients: client numbers; default: the cohort of the replayed round.
        eigenvectors: dimension of the eigenspaces.
        examples: maximum number of examples of the global loss and of each client's loss; default: all.
        batch_size: examples per batch; default: at most 1000, fewer if the inputs are large.
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
        global_loss = sampled(server.objective(batch_size=batch_size))
        reference = ServerReference(global_loss, eigenvectors, seed)
        for client, state in zip(cohort, states, strict=True):
            progress(f"client {client.number}")
            at_server = sampled(server.objective(client=client.number, batch_size=batch_size))
            # Replays use the run's training precision, which may differ from that of the measurement.
            weights, buffers = state.weights.to(server.state.weights), state.buffers.to(server.state.buffers)
            client_model = state._replace(weights=weights, buffers=buffers)
            at_client = sampled(server.objective(client=client.number, batch_size=batch_size, state=client_model))
            row: Measurements = {"client": client.number, "overlap_at_server": reference.overlap(at_server)}
            row |= {"overlap": reference.overlap(at_client)}
            rows.append(
                row | {"cka": reference.cka(sampled(server.objective(batch_size=batch_size, state=client_model)))}
            )
    return rows
