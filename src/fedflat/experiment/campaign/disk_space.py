"""Estimates of the disk space of runs and sweeps, from the sizes of models and states."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fedflat import data as datasets
from fedflat.algorithms import Algorithm, algorithm
from fedflat.algorithms.algorithm import flat_fields
from fedflat.algorithms.state import Fields
from fedflat.averaging import RunInfo
from fedflat.experiment.config import Config
from fedflat.experiment.setup.problem import build_network, build_partition, load_data
from fedflat.experiment.store.cleanup import Keep
from fedflat.experiment.store.client_states import RowStore


@dataclass(frozen=True)
class RunDisk:
    """Size of a run's folder in bytes, by purpose; small files such as logs are left out."""

    checkpoint: int
    """All server and client vectors; rows that change are stored twice."""
    snapshots: int
    """Models saved during the run."""
    models: int
    """Final models."""

    @property
    def total(self) -> int:
        """Size of all three together."""
        return self.checkpoint + self.snapshots + self.models


@dataclass(frozen=True)
class SweepDisk:
    """Disk space of several runs in bytes."""

    most: int
    """At the peak, when as many runs as possible are in progress and all others are finished."""
    kept: int
    """At the end, when all runs are finished."""


def run_disk(config: Config, size: int, buffers: int, clients: int) -> RunDisk:
    """Estimate the bytes that a run writes.

    Args:
        config: the experiment.
        size: number of trained parameters.
        buffers: number of BatchNorm statistics.
        clients: number of clients in the partition.
    """
    run_algorithm = algorithm(config.algorithm)
    bytes_per_scalar = 8 if config.engine.precision == "float64" else 4
    rounds, save_every = config.training.rounds, config.evaluation.save_every
    saved_rounds = 0
    if save_every is not None:  # the multiples of ``save_every`` from the initial to the last round
        saved_rounds = rounds // save_every - (config.init_rounds - 1) // save_every
    model = size + buffers
    all_models = (1 + len(run_algorithm.averages)) * model  # the server's and its averages
    server_state = state_scalars(run_algorithm.server_fields(), size)
    client_states = participants(config, clients) * client_scalars(run_algorithm, config, size, buffers)
    past_models = sum(min(length, rounds) for length in _past_model_counts(run_algorithm, rounds)) * model
    # Row stores hold two copies of every client state and past model; runs without rows keep two checkpoints.
    rows = client_states + past_models
    checkpoint = (1 if rows else 2) * (all_models + server_state) + 2 * rows
    return RunDisk(
        checkpoint=checkpoint * bytes_per_scalar,
        snapshots=saved_rounds * all_models * bytes_per_scalar,
        models=all_models * bytes_per_scalar,
    )


def sweep_disk(configs: Sequence[Config], keep: Keep, at_once: int) -> SweepDisk:
    """Estimate the bytes that several runs write, at the peak and in the end.

    Args:
        configs: the runs.
        keep: the parts that finished runs keep.
        at_once: number of concurrent runs.
    """
    sizes: dict[tuple[str, ...], tuple[int, int, int]] = {}
    final_bytes = 0
    removed_at_end = []  # bytes of each run that are deleted once it is finished
    for config in configs:
        key = _size_key(config)
        if key not in sizes:
            sizes[key] = _sizes(config)
        disk = run_disk(config, *sizes[key])
        removed = sum(getattr(disk, part) for part in keep.removed)
        final_bytes += disk.total - removed
        removed_at_end.append(removed)
    # At the peak, the runs with the most to delete are unfinished together.
    return SweepDisk(final_bytes + sum(heapq.nlargest(at_once, removed_at_end)), final_bytes)


def participants(config: Config, clients: int) -> int:
    """Upper bound on the number of distinct clients in a run; with Bernoulli sampling, on the expected number."""
    return min(clients, config.federation.clients_per_round * (config.training.rounds - config.init_rounds))


def state_scalars(fields: dict[str, Fields], size: int) -> int:
    """The number of scalars in the given state fields of a model with ``size`` parameters."""
    return sum(field.scalars(size) for field in flat_fields(fields).values())


def client_scalars(algorithm: Algorithm, config: Config, size: int, buffers: int) -> int:
    """The number of scalars that a client keeps between rounds."""
    return state_scalars(algorithm.client_fields(), size) + (buffers if config.training.statistics == "own" else 0)


def _past_model_counts(algorithm: Algorithm, rounds: int) -> list[int]:
    """The number of past models that each average stores during a run of ``rounds`` rounds.

    An average requests a store for its past models when it begins. To learn how many it needs, this function begins
    every average with an empty model.
    """
    counts: list[int] = []

    def record_count(name: str, count: int) -> RowStore:
        counts.append(count)
        return RowStore()

    no_weights = torch.zeros(0)
    for average in algorithm.averages:
        run = RunInfo(rounds, algorithm.lr_schedule.cycle, classifier=no_weights.bool(), ring=record_count)
        average.begin(run, no_weights)
    return counts


def _size_key(config: Config) -> tuple[str, ...]:
    """The settings that determine ``_sizes``; configs with equal keys build their model and data only once.

    The partition and its seeds are part of the key only if they determine the number of clients.
    """
    data, training = config.data, config.training
    settings = (config.model, training.train, training.task, data.dataset, str(data.dir), str(data.clients))
    fixes_clients = datasets.fixes_clients(data.partition)
    return (*settings, data.partition, str(data.partition_seed), str(config.seed)) if fixes_clients else settings


def _sizes(config: Config) -> tuple[int, int, int]:
    """The numbers of trained parameters, of BatchNorm statistics and of clients."""
    data = load_data(config)
    random_weights = config.changed(init=None, init_head="given")  # need no file of weights
    network = build_network(random_weights, data.input_shape, data.num_outputs)
    trained = sum(parameter.numel() for parameter in network.parameters() if parameter.requires_grad)
    statistics = sum(buffer.numel() for buffer in network.buffers() if buffer.is_floating_point())
    clients = config.data.clients
    if clients is None or datasets.fixes_clients(config.data.partition):
        clients = len(build_partition(config, data).clients)
    return trained, statistics, clients
