"""Client models: ``RUN:client3@50`` is client 3's model after local training from the server model of round 50.

The local training is repeated exactly, because all randomness is a function of seed, round and client. Algorithms with
server or client state can be replayed only from the run's last checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from fedflat.algorithms import algorithm
from fedflat.engines.problem.problem import Problem
from fedflat.engines.round.contract import ModelState
from fedflat.errors import UserError
from fedflat.experiment.analysis.measured import Measured, Reference, measured, reference
from fedflat.experiment.analysis.reopen import reopen, state_of
from fedflat.experiment.analysis.replay import Moment, Replay, at_checkpoint, at_model, needs_vectors
from fedflat.experiment.store.checkpoint import CHECKPOINT


def measured_point(text: str, **options: Any) -> Measured:
    """The model that ``text`` names, possibly a client's; ``options`` as in ``measured``."""
    wanted = reference(text)
    client = client_of(wanted)
    if client is None:
        return measured(wanted, **options)
    server = measured(Reference(wanted.run, "server"), **options)
    (state,) = local_models(server, wanted.rounds, [client])
    return replace(server, name=str(wanted.model), rounds=wanted.rounds, state=state)


def client_of(wanted: Reference) -> int | None:
    """The client number of a reference to a client model, else None.

    >>> from pathlib import Path
    >>> client_of(Reference(Path("runs/a"), "client3", 50)), client_of(Reference(Path("runs/a"), "wima"))
    (3, None)
    """
    match = re.fullmatch(r"client(\d+)", wanted.model or "")
    return int(match[1]) if match else None


def local_models(server: Measured, rounds: int | None, clients: Sequence[int] | None = None) -> list[ModelState]:
    """Client models after local training in the round that follows ``rounds``.

    Args:
        server: the server model of the run.
        rounds: round of a saved server model; default: the last checkpoint.
        clients: client numbers; default: the cohort of that round.
    """
    replay = replay_at(server, rounds)
    members = replay.members(clients)
    return replay.local_models(members, replay.train(members))


def replay_at(server: Measured, rounds: int | None = None) -> Replay:
    """A replay of a run after ``rounds``, in the run's precision."""
    record = server.record
    engine = record.config.engine.model_copy(update={"device": server.problem.device.type})
    if engine.precision == "bf16" and engine.device == "cpu":
        engine = engine.model_copy(update={"precision": "float32"})
    config = record.config.model_copy(update={"engine": engine})
    # Initial client state derives from the untrained model, before any saved weights are loaded.
    usable = _same_precision(server, engine.precision) and not needs_vectors(algorithm(config.algorithm), config)
    problem, partition = (
        (server.problem, server.partition) if usable else reopen(record, config=config, call="flatness", as_begun=True)
    )
    return Replay(config, problem, partition, moment_at(server, problem, rounds))


def moment_at(server: Measured, problem: Problem, rounds: int | None = None) -> Moment:
    """The state of a run after ``rounds``, by default at its last checkpoint."""
    record = server.record
    if record.folder is None:
        raise UserError("this run has no folder, so its rounds cannot be replayed; pass out=... to fedflat.run")
    method = algorithm(record.config.algorithm)
    if rounds is None or rounds == record.folder.rounds_of(CHECKPOINT):
        return at_checkpoint(record.folder, method, problem, record.config)
    return at_model(rounds, state_of(record, "server", problem, rounds), method, record.config)


def _same_precision(server: Measured, precision: str) -> bool:
    """Whether the run trained in the precision of the measurement."""
    measured_in = "float64" if server.problem.dtype == torch.float64 else "tf32" if server.tf32 else "float32"
    return precision == measured_in
