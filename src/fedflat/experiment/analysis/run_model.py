"""Models of runs, opened for measurements: as objectives for flatness measures, and as starting points of replays."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedflat.algorithms import algorithm
from fedflat.data import Examples, Partition
from fedflat.display import shown_count
from fedflat.engines.problem.problem import Problem
from fedflat.engines.problem.task import PooledTask
from fedflat.engines.round.contract import ModelState
from fedflat.errors import UserError, one_of
from fedflat.experiment.analysis.reopen import (
    Reference,
    at_round,
    client_of,
    config_for_measurement,
    on_device,
    parse_reference,
    primary_model,
    reopen,
    require_model,
    state_of,
)
from fedflat.experiment.analysis.replay import (
    Moment,
    Replay,
    check_client,
    missing_state,
    moment_at_checkpoint,
    moment_at_model,
)
from fedflat.experiment.analysis.scoring import take_on_device
from fedflat.experiment.store.checkpoint import checkpoint_rounds
from fedflat.experiment.store.run_folder import Record, client_statistics, load_record, saved_rounds
from fedflat.flatness import Landscape, Objective, Sharpness, Spectrum, sharpness_of, spectrum_of
from fedflat.flatness.batches import TensorBatches

MAX_INPUT_VALUES_PER_BATCH = {"cpu": 300_000, "cuda": 1_500_000}
"""Input values per batch by device, i.e. 97 or 488 CIFAR images; second derivatives need much memory."""
MAX_BATCH = 1000
"""Largest number of examples per batch."""


def with_statistics(problem: Problem, model: ModelState, positions: np.ndarray) -> ModelState:
    """Give a model BatchNorm statistics if it has none of its own; otherwise return it unchanged.

    A server model has none if clients keep their own (SiLoBN); its loss would then depend on the batches. The
    statistics are estimated on the training examples at ``positions`` [count].
    """
    if not problem.batch_statistics or not len(model.buffers):
        return model
    return model._replace(buffers=estimated_statistics(problem, model, positions))


def estimated_statistics(problem: Problem, model: ModelState, positions: np.ndarray) -> Tensor:
    """Estimate BatchNorm statistics [buffers] of a model on the training examples at ``positions`` [count]."""
    # Batch sizes differ by at most one, because the estimate weights batches equally, and because a short last batch
    # might have a single example, which BatchNorm rejects.
    batch_count = math.ceil(len(positions) / problem.evaluation_batch)
    batches = torch.tensor_split(_as_indices(positions), batch_count)
    inputs = (problem.normalised(take_on_device(problem, problem.data.train, indices).inputs) for indices in batches)
    return problem.estimate_buffers(model.weights, model.integer_buffers, inputs)


def objective_on(
    problem: Problem,
    model: ModelState,
    examples: Examples,
    positions: np.ndarray | None,
    batch_size: int,
    tf32: bool = False,
) -> Objective:
    """Return the mean loss over examples, as a function of the weights.

    Args:
        problem: model and task.
        model: weights at which the objective is evaluated by default, and buffers.
        examples: raw examples, e.g. the training set.
        positions: positions of the examples to use, [count]; default: all.
        batch_size: examples per batch; it does not affect the value.
        tf32: whether a GPU may use TF32.
    """

    def prepare(raw: Tensor) -> Tensor:
        """Normalise a batch of raw inputs and convert it to the precision of the measurement."""
        inputs = problem.normalised(raw)
        # Runs in bf16 are measured in float32; tokens stay integers.
        return inputs.to(problem.dtype) if inputs.is_floating_point() else inputs

    return Objective(
        problem.model,
        problem.task.loss,
        TensorBatches(
            examples.inputs, examples.targets, batch_size, None if positions is None else _as_indices(positions)
        ),
        prepare=prepare,
        # Pooled metrics, such as mIoU, are not means over examples; then only the loss is reported.
        sums=None if isinstance(problem.task, PooledTask) else problem.task.sums,
        buffers={**problem.buffer_layout.views(model.buffers), **model.integer_buffers},
        weights=model.weights,
        weight=getattr(problem.task, "weight", None),
        tf32=tf32,
    )


def _as_indices(positions: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(positions, dtype=np.int64))


@dataclass(eq=False, repr=False)
class RunModel:
    """A model of a run with its problem and partition."""

    record: Record
    """The run that trained the model."""
    name: str
    """Name of the model: ``server`` or an average."""
    rounds: int | None
    """Round after which the model was saved; None for the final model."""
    problem: Problem
    """Network, task and data of the run."""
    partition: Partition
    """The partition, which lists the examples of each client."""
    state: ModelState
    """Weights and buffers of the model."""
    tf32: bool = False
    """Whether a GPU may round matrix products to TF32."""
    user_objects: dict[str, Any] = field(default_factory=dict)
    """User-supplied ``dataset``, ``network`` and ``task`` with which the run was opened."""

    def __repr__(self) -> str:
        network = f"{self.record.config.model} with {shown_count(self.problem.layout.size)} parameters"
        return f"{type(self).__name__}({self.label}: {network}, on {self.problem.data.name})"

    @property
    def label(self) -> str:
        """How the command line names the model, e.g. ``FOLDER:wima@50``; a run without a folder shows its algorithm."""
        run = str(self.record.folder.path) if self.record.folder else self.record.config.algorithm
        return f"{run}:{self.name}{at_round(self.rounds)}"

    @property
    def description(self) -> str:
        """Model, seed and round for captions, e.g. ``wima model, seed 0, round 50``."""
        rounds = self.record.rounds if self.rounds is None else self.rounds
        return f"{self.name} model, seed {self.record.config.seed}, round {rounds}"

    @cached_property
    def training_positions(self) -> np.ndarray:
        """Sorted positions of the clients' training examples; shared examples are repeated."""
        return np.sort(np.concatenate([np.asarray(indices) for indices in self.partition.summarised_clients]))

    def objective(
        self,
        on: str = "train",
        *,
        client: int | None = None,
        batch_size: int | None = None,
        state: ModelState | None = None,
    ) -> Objective:
        """Return the loss on the run's data as a function of the weights.

        Args:
            on: ``train`` (the training data of all clients) or ``test``.
            client: use only the training data of this client.
            batch_size: examples per batch; default: at most 1000, fewer if the inputs are large.
            state: weights and buffers that replace the model's.
        """
        train, test = self.problem.data.train, self.problem.data.test
        if client is not None:
            check_client(client, len(self.partition.clients))
            if on != "train":
                raise UserError(f"clients have only training data; on={on} cannot be combined with a client")
            positions = np.asarray(self.partition.clients[client])
            return self.on_examples(train, positions, batch_size, state or self._client_state(client))
        if on == "train":
            return self.on_examples(train, self.training_positions, batch_size, state)
        if on == "test":
            return self.on_examples(test, None, batch_size, state)
        raise one_of("set", on, ("train", "test"))

    def on_examples(
        self,
        examples: Examples,
        positions: np.ndarray | None = None,
        batch_size: int | None = None,
        state: ModelState | None = None,
    ) -> Objective:
        """Return the loss on any examples of the model's input shape, as a function of the weights.

        Args:
            examples: raw examples.
            positions: positions of the examples to use; default: all.
            batch_size: examples per batch; default: at most 1000, fewer if the inputs are large.
            state: weights and buffers that replace the model's.
        """
        if not batch_size:
            values = math.prod(self.problem.data.input_shape)
            batch_size = max(1, min(MAX_BATCH, MAX_INPUT_VALUES_PER_BATCH[self.problem.device.type] // values))
        return objective_on(
            self.problem, state or self._with_fixed_batchnorm, examples, positions, batch_size, self.tf32
        )

    @cached_property
    def _with_fixed_batchnorm(self) -> ModelState:
        """The model, with BatchNorm statistics estimated on the training data if it has none of its own (SiLoBN)."""
        return with_statistics(self.problem, self.state, self.training_positions)

    def _client_state(self, client: int) -> ModelState:
        """The model with a client's own BatchNorm statistics if clients have them (SiLoBN), else the server's model.

        Clients' statistics are saved only at the end of the run.
        """
        if self.problem.batch_statistics and self.rounds is None:
            statistics = client_statistics(self.record)
            if client in statistics:
                return self.state._replace(buffers=statistics[client].to(self.state.buffers))
        return self._with_fixed_batchnorm

    def objectives(
        self,
        on: str = "train",
        *,
        client: int | None = None,
        examples: int | None = None,
        subsets: int = 1,
        seed: int = 0,
        batch_size: int | None = None,
    ) -> list[Objective]:
        """Return the loss on the run's data, or one loss for each of several random subsets of them.

        Args:
            on: ``train`` (the training data of all clients) or ``test``.
            client: use only the training data of this client.
            examples: number of examples per subset; default: all examples, in one objective.
            subsets: number of subsets, drawn with the seeds ``seed``, ``seed + 1``, ...
            seed: seed of the first subset.
            batch_size: examples per batch; default: at most 1000, fewer if the inputs are large.
        """
        objective = self.objective(on, client=client, batch_size=batch_size)
        if examples is None or examples == objective.examples:
            return [objective]
        return [objective.subset(examples, seed + index) for index in range(subsets)]

    def spectrum(
        self,
        count: int | None = None,
        *,
        on: str = "train",
        client: int | None = None,
        examples: int | None = None,
        seed: int = 0,
        batch_size: int | None = None,
        **options: Any,
    ) -> Spectrum:
        """Compute the spectrum of the Hessian of the loss at the model.

        Args:
            count: number of eigenvalues; default: that of ``spectrum_of``.
            on: ``train`` (the training data of all clients) or ``test``.
            client: use only the training data of this client.
            examples: number of examples, drawn at random; default: all.
            seed: seed of the sampled examples and of the start vector.
            batch_size: examples per batch; default: at most 1000, fewer if the inputs are large.
            **options: further arguments of ``spectrum_of``.
        """
        (objective,) = self.objectives(on, client=client, examples=examples, seed=seed, batch_size=batch_size)
        return spectrum_of(objective, count, seed=seed, **options)

    def sharpness(
        self,
        kind: str = "sam",
        *,
        on: str = "train",
        client: int | None = None,
        examples: int | None = None,
        seed: int = 0,
        batch_size: int | None = None,
        **options: Any,
    ) -> Sharpness:
        """Compute the sharpness of the loss at the model.

        Args:
            kind: definition of sharpness: a name that ``sharpness_of`` accepts, e.g. ``sam``.
            on: ``train`` (the training data of all clients) or ``test``.
            client: use only the training data of this client.
            examples: number of examples, drawn at random; default: all.
            seed: seed of the sampled examples and of random directions.
            batch_size: examples per batch; default: at most 1000, fewer if the inputs are large.
            **options: further arguments of ``sharpness_of``.
        """
        (objective,) = self.objectives(on, client=client, examples=examples, seed=seed, batch_size=batch_size)
        return sharpness_of(objective, kind, seed=seed, **options)

    def landscape(self, **options: Any) -> Landscape:
        """Evaluate training and test loss around the model; ``options`` are those of ``landscapes``."""
        from fedflat.experiment.analysis.landscapes import landscapes  # which imports this module

        (landscape,) = landscapes([self], **options).values()
        return landscape

    def sibling(self, name: str | None = None, rounds: int | None = None) -> RunModel:
        """Return the run's model ``name`` (default: this model's name) after round ``rounds`` (default: final)."""
        name = require_model(self.record, name or self.name)
        return replace(self, name=name, rounds=rounds, state=state_of(self.record, name, self.problem, rounds))


def open_model(
    model: str | Path | Reference | Record,
    *,
    name: str | None = None,
    rounds: int | None = None,
    device: str | None = None,
    precision: str | None = None,
    **user_objects: Any,
) -> RunModel:
    """Open a model of a run for measurements.

    Args:
        model: a reference such as ``RUN:wima@50``, or a record.
        name: name of the model; default: the primary model.
        rounds: round after which the model was saved; default: the final model.
        device: ``auto``, ``cpu`` or ``cuda``.
        precision: ``float32``, ``tf32`` or ``float64``; default: float64 for float64 runs, else float32.
        **user_objects: user-supplied ``dataset``, ``network`` and ``task``.
    """
    if isinstance(model, Record):
        record = model
    else:
        source = model if isinstance(model, Reference) else parse_reference(str(model))
        record, name = load_record(source.run), name or source.model
        rounds = source.rounds if rounds is None else rounds
    if not record.models and not record.evaluated:
        run = record.display_name
        raise UserError(f"{run} has no evaluated models yet; continue it with fedflat resume {run}")
    name = require_model(record, name or primary_model(record))
    config = config_for_measurement(record.config, device, precision)
    problem, partition = reopen(record, config=config, method="flatness", **user_objects)
    state = state_of(record, name, problem, rounds)
    tf32 = config.engine.precision == "tf32"
    return RunModel(record, name, rounds, problem, partition, state, tf32, user_objects)


def open_model_or_client(text: str, **options: Any) -> RunModel:
    """Open the model that a reference names, possibly a client's; ``options`` are passed on to ``open_model``."""
    source = parse_reference(text)
    client = client_of(source)
    if client is None:
        return open_model(source, **options)
    server = open_model(Reference(source.run, "server"), **options)
    (state,) = local_models(server, source.rounds, [client])
    return replace(server, name=str(source.model), rounds=source.rounds, state=state)


def local_models(
    server: RunModel, after_round: int | None, client_numbers: Sequence[int] | None = None
) -> list[ModelState]:
    """Replay the round that follows ``after_round``; return the clients' models at the end of local training.

    Args:
        server: the server model of the run.
        after_round: round of a saved server model; None: that of the last checkpoint.
        client_numbers: clients to train; default: the cohort of the replayed round.
    """
    for number in client_numbers or ():
        check_client(number, len(server.partition.clients))
    replay = replay_after(server, after_round)
    clients = replay.clients(client_numbers)
    return replay.local_models(clients, replay.train(clients))


def replay_after(server: RunModel, after_round: int | None = None) -> Replay:
    """Return a replay of the round after ``after_round`` (default: the last checkpoint), in the run's precision."""
    record = server.record
    config = on_device(record.config, server.problem.device.type)
    problem, partition = server.problem, server.partition
    measured_in = "float64" if problem.dtype == torch.float64 else "tf32" if server.tf32 else "float32"
    if missing_state(algorithm(config.algorithm), config) or config.engine.precision != measured_in:
        # The opened model has the wrong precision, or has lost the initial weights, which define initial client state.
        problem, partition = reopen(
            record, config=config, method="flatness", with_initial_weights=True, **server.user_objects
        )
    return Replay(config, problem, partition, moment_after(server, problem, after_round))


def moment_after(server: RunModel, problem: Problem, after_round: int | None) -> Moment:
    """Return what is needed to replay the round after ``after_round``, or after the run's last checkpoint."""
    record = server.record
    if record.folder is None:
        raise UserError("this run has no folder, so its rounds cannot be replayed; pass out=... to fedflat.run")
    run_algorithm = algorithm(record.config.algorithm)
    try:
        if after_round is None or after_round == checkpoint_rounds(record.folder):
            return moment_at_checkpoint(record.folder, run_algorithm, problem, record.config)
    except UserError:  # the checkpoint cannot be used, but a saved model may be all that is needed
        if after_round is None or after_round not in saved_rounds(record.folder.path):
            raise
    return moment_at_model(after_round, state_of(record, "server", problem, after_round), run_algorithm, record.config)
