"""Models of runs as objectives for flatness measurements.

``RUN`` names the primary model of the run in a folder, ``RUN:wima`` one of its models, and ``RUN:server@50`` that
model as saved after round 50.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedflat.algorithms import algorithm
from fedflat.data import Examples, Partition
from fedflat.engines.problem.problem import Problem, move_examples
from fedflat.engines.problem.task import PooledTask
from fedflat.engines.round.contract import ModelState
from fedflat.errors import UserError, one_of
from fedflat.experiment.analysis.reopen import primary_model, reopen, require_model, state_of
from fedflat.experiment.analysis.replay import Moment, Replay, missing_state, moment_at_checkpoint, moment_at_model
from fedflat.experiment.config import Config
from fedflat.experiment.store.checkpoint import CHECKPOINT
from fedflat.experiment.store.run_folder import Record, client_statistics, load_record
from fedflat.flatness import Objective, Sharpness, Spectrum, sharpness_of, spectrum_of
from fedflat.flatness.batches import TensorBatches


def with_statistics(problem: Problem, model: ModelState, positions: np.ndarray) -> ModelState:
    """With SiLoBN, the model with statistics estimated on training examples, so that its loss is well defined."""
    if not problem.batch_statistics or not len(model.buffers):
        return model
    return model._replace(buffers=estimated_on(problem, model, positions))


def estimated_on(problem: Problem, model: ModelState, positions: np.ndarray) -> Tensor:
    """BatchNorm statistics of a model on training examples, as flat buffers.

    Batches have equal sizes: they are weighted equally, and BatchNorm rejects a batch of one example.
    """
    train, whole = problem.data.train, torch.from_numpy(np.ascontiguousarray(positions, dtype=np.int64))
    parts = torch.tensor_split(whole, ceil(len(whole) / problem.evaluation_batch))
    batches = (
        problem.normalised(move_examples(train.take(part.to(train.targets.device)), problem.device).inputs)
        for part in parts
    )
    return problem.estimate_buffers(model.weights, model.integers, batches)


NUMBERS = {"cpu": 300_000, "cuda": 1_500_000}
"""Input values per batch by device, i.e. 97 or 488 CIFAR images; second derivatives need several times a step's
memory.
"""
LARGEST_BATCH = 1000


@dataclass(frozen=True)
class Reference:
    """A reference to a model of a run."""

    run: Path
    model: str | None = None
    rounds: int | None = None

    def __str__(self) -> str:
        return (
            f"{self.run}{f':{self.model}' if self.model else ''}{f'@{self.rounds}' if self.rounds is not None else ''}"
        )


def reference(text: str) -> Reference:
    """Parse a reference.

    >>> reference("runs/a:wima(window=50)@20")
    Reference(run=PosixPath('runs/a'), model='wima(window=50)', rounds=20)
    """
    if Path(text).is_dir():  # a folder name may contain any character
        return Reference(Path(text))
    match = re.fullmatch(r"(?P<run>.+?)(:(?P<model>[A-Za-z][^/\\:@]*))?(@(?P<rounds>\d+))?", text, re.DOTALL)
    assert match is not None  # any text is a valid folder name
    return Reference(Path(match["run"]), match["model"], None if match["rounds"] is None else int(match["rounds"]))


@dataclass(eq=False)
class RunModel:
    """A model of a run with its problem and partition."""

    record: Record
    name: str
    rounds: int | None
    """Round after which it was saved; None for the final model."""
    problem: Problem = field(repr=False)
    partition: Partition = field(repr=False)
    state: ModelState = field(repr=False)
    tf32: bool = False
    """Whether a GPU may use TF32."""

    @property
    def label(self) -> str:
        """The model's reference; for a run without a folder, algorithm and model name."""
        where = str(self.record.folder.path) if self.record.folder else self.record.config.algorithm
        return f"{where}:{self.name}{f'@{self.rounds}' if self.rounds is not None else ''}"

    @cached_property
    def training_positions(self) -> np.ndarray:
        """Sorted positions of the clients' training examples; shared examples are repeated."""
        return np.sort(np.concatenate([np.asarray(indices) for indices in self.partition.described_clients]))

    def objective(
        self, on: str = "train", *, client: int | None = None, batch: int | None = None, state: ModelState | None = None
    ) -> Objective:
        """The loss on all clients' training data, on the test set (``on="test"``), or on one client's data."""
        if client is not None:
            if not 0 <= client < len(self.partition.clients):
                raise UserError(
                    f"unknown client {client}; this run has {len(self.partition.clients)} clients, numbered from 0"
                )
            if on != "train":
                raise UserError(f"clients have only training data; on={on} cannot be combined with a client")
            positions = np.asarray(self.partition.clients[client])
            return self.on_examples(self.problem.data.train, positions, batch, state or self._of_client(client))
        if on == "train":
            return self.on_examples(self.problem.data.train, self.training_positions, batch, state)
        if on == "test":
            return self.on_examples(self.problem.data.test, None, batch, state)
        raise one_of("set", on, ("train", "test"))

    def on_examples(
        self,
        examples: Examples,
        positions: np.ndarray | None = None,
        batch: int | None = None,
        state: ModelState | None = None,
    ) -> Objective:
        """The loss on any examples of the model's input shape."""
        problem, state = self.problem, state or self._with_statistics
        chosen = None if positions is None else torch.from_numpy(np.ascontiguousarray(positions, dtype=np.int64))
        return Objective(
            problem.model,
            problem.task.loss,
            TensorBatches(examples.inputs, examples.targets, batch or _batch(problem), chosen),
            prepare=problem.normalised,
            sums=None if isinstance(problem.task, PooledTask) else problem.task.sums,
            buffers={**problem.buffers.views(state.buffers), **state.integers},
            weights=state.weights,
            tf32=self.tf32,
        )

    @cached_property
    def _with_statistics(self) -> ModelState:
        """The model with fixed BatchNorm statistics."""
        return with_statistics(self.problem, self.state, self.training_positions)

    def _of_client(self, client: int) -> ModelState:
        """With SiLoBN, the model with a client's BatchNorm statistics at the end of the run."""
        statistics = client_statistics(self.record) if self.problem.batch_statistics and self.rounds is None else {}
        return (
            self.state._replace(buffers=statistics[client].to(self.state.buffers))
            if client in statistics
            else self._with_statistics
        )

    def objectives(
        self,
        on: str = "train",
        *,
        client: int | None = None,
        examples: int | None = None,
        subsets: int = 1,
        seed: int = 0,
        batch: int | None = None,
    ) -> list[Objective]:
        """The loss on the data, or on ``subsets`` random subsets of ``examples`` examples (seeds ``seed``, ``seed +
        1``, ...).
        """
        whole = self.objective(on, client=client, batch=batch)
        if examples is None or examples == whole.examples:
            return [whole]
        return [whole.subset(examples, seed + number) for number in range(subsets)]

    def spectrum(
        self,
        count: int | None = None,
        *,
        on: str = "train",
        client: int | None = None,
        examples: int | None = None,
        seed: int = 0,
        batch: int | None = None,
        **options: Any,
    ) -> Spectrum:
        """The Hessian spectrum; ``options`` as in ``spectrum_of``."""
        (objective,) = self.objectives(on, client=client, examples=examples, seed=seed, batch=batch)
        return spectrum_of(objective, count, seed=seed, **options)

    def sharpness(
        self,
        kind: str = "sam",
        *,
        on: str = "train",
        client: int | None = None,
        examples: int | None = None,
        seed: int = 0,
        batch: int | None = None,
        **options: Any,
    ) -> Sharpness:
        """The sharpness; ``options`` as in ``sharpness_of``."""
        (objective,) = self.objectives(on, client=client, examples=examples, seed=seed, batch=batch)
        return sharpness_of(objective, kind, seed=seed, **options)

    def sibling(self, name: str | None = None, rounds: int | None = None) -> RunModel:
        """Another model of the same run."""
        name = require_model(self.record, name or self.name)
        return replace(self, name=name, rounds=rounds, state=state_of(self.record, name, self.problem, rounds))


def open_model(
    model: str | Path | Reference | Record,
    *,
    name: str | None = None,
    rounds: int | None = None,
    device: str | None = None,
    precision: str | None = None,
    **own: Any,
) -> RunModel:
    """Open a model of a run for measurements.

    Args:
        model: a reference such as ``RUN:wima@50``, or a record.
        name: name of the model; default: the primary model.
        rounds: round after which the model was saved; default: the final model.
        device: ``auto``, ``cpu`` or ``cuda``.
        precision: ``float32``, ``tf32`` or ``float64``; default: float64 for float64 runs, else float32.
        own: user-supplied ``dataset``, ``network`` and ``task``.
    """
    if isinstance(model, Record):
        record = model
    else:
        source = model if isinstance(model, Reference) else reference(str(model))
        record, name, rounds = (
            load_record(source.run),
            name or source.model,
            source.rounds if rounds is None else rounds,
        )
    if not record.models and not record.evaluated:
        where = record.folder.path if record.folder else "this run"
        raise UserError(f"{where} has no evaluated models yet; continue it with fedflat resume")
    name = require_model(record, name or primary_model(record))
    config = _config(record.config, device, precision)
    problem, partition = reopen(record, config=config, method="flatness", **own)
    state = state_of(record, name, problem, rounds)
    return RunModel(record, name, rounds, problem, partition, state, config.engine.precision == "tf32")


def _batch(problem: Problem) -> int:
    return max(1, min(LARGEST_BATCH, NUMBERS[problem.device.type] // math.prod(problem.data.input_shape)))


def _config(config: Config, device: str | None, precision: str | None) -> Config:
    wanted = precision or ("float64" if config.engine.precision == "float64" else "float32")
    if wanted not in ("float32", "tf32", "float64"):
        raise one_of("precision", wanted, ("float32", "tf32", "float64"))
    if device is not None and device not in ("auto", "cpu", "cuda"):
        raise one_of("device", device, ("auto", "cpu", "cuda"))
    # The run's device may not be available here.
    engine = config.engine.model_copy(update={"device": device or "auto", "precision": wanted})
    return config.model_copy(update={"engine": engine})


def open_model_or_client(text: str, **options: Any) -> RunModel:
    """The model that ``text`` names, possibly a client's; ``options`` as in ``open_model``."""
    wanted = reference(text)
    client = client_of(wanted)
    if client is None:
        return open_model(wanted, **options)
    server = open_model(Reference(wanted.run, "server"), **options)
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


def local_models(server: RunModel, rounds: int | None, clients: Sequence[int] | None = None) -> list[ModelState]:
    """Client models after local training in the round that follows ``rounds``.

    Args:
        server: the server model of the run.
        rounds: round of a saved server model; default: the last checkpoint.
        clients: client numbers; default: the cohort of that round.
    """
    replay = replay_after(server, rounds)
    members = replay.members(clients)
    return replay.local_models(members, replay.train(members))


def replay_after(server: RunModel, rounds: int | None = None) -> Replay:
    """A replay of a run after ``rounds``, in the run's precision."""
    record = server.record
    engine = record.config.engine.model_copy(update={"device": server.problem.device.type})
    if engine.precision == "bf16" and engine.device == "cpu":
        engine = engine.model_copy(update={"precision": "float32"})
    config = record.config.model_copy(update={"engine": engine})
    # Initial client state derives from the untrained model, before any saved weights are loaded.
    usable = _same_precision(server, engine.precision) and not missing_state(algorithm(config.algorithm), config)
    problem, partition = (
        (server.problem, server.partition)
        if usable
        else reopen(record, config=config, method="flatness", with_initial_weights=True)
    )
    return Replay(config, problem, partition, moment_after(server, problem, rounds))


def moment_after(server: RunModel, problem: Problem, rounds: int | None = None) -> Moment:
    """The state of a run after ``rounds``, by default at its last checkpoint."""
    record = server.record
    if record.folder is None:
        raise UserError("this run has no folder, so its rounds cannot be replayed; pass out=... to fedflat.run")
    method = algorithm(record.config.algorithm)
    if rounds is None or rounds == record.folder.rounds_of(CHECKPOINT):
        return moment_at_checkpoint(record.folder, method, problem, record.config)
    return moment_at_model(rounds, state_of(record, "server", problem, rounds), method, record.config)


def _same_precision(server: RunModel, precision: str) -> bool:
    """Whether the run trained in the precision of the measurement."""
    measured_in = "float64" if server.problem.dtype == torch.float64 else "tf32" if server.tf32 else "float32"
    return precision == measured_in
