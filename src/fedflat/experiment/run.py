"""A run: training rounds, averaging, evaluation and checkpoints, from the start or from the last checkpoint."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedflat.algorithms import algorithm
from fedflat.averaging import AverageState, RunInfo, average_name
from fedflat.data import Dataset
from fedflat.engines.problem.task import Task
from fedflat.engines.round.contract import Client, Cost, Engine, ModelState
from fedflat.engines.round.plan import isolated_rng
from fedflat.errors import UserError
from fedflat.experiment.analysis.observer import Observer
from fedflat.experiment.analysis.run_model import estimated_on
from fedflat.experiment.callback import Callback
from fedflat.experiment.config import Config
from fedflat.experiment.setup.engine import engine_for, explain_out_of_memory, sampler_of, training_of
from fedflat.experiment.setup.problem import build_problem
from fedflat.experiment.stopping import Verdict, check_stopping_rules, check_target, describe_divergence
from fedflat.experiment.store.checkpoint import (
    CHECKPOINT,
    CheckpointInterval,
    ServerState,
    last_checkpoint,
    require_rows,
    under,
    write_checkpoint,
)
from fedflat.experiment.store.client_states import CachedRowStore, ClientStateStore, RowStore, cache_size
from fedflat.experiment.store.files import create_folder
from fedflat.experiment.store.provenance import fingerprints, provenance, require_same_inputs
from fedflat.experiment.store.run_folder import (
    SNAPSHOTS,
    STATISTICS_FILE,
    Record,
    RunFolder,
    model_file,
    remove_snapshots_after,
    snapshot_file,
)
from fedflat.models import classifier_parameters

CHECKS_EVERY = 10
"""Rounds between checks for divergence on a GPU, in addition to those at evaluations."""


class Run:
    """One experiment.

    Args:
        config: the experiment.
        folder: the run folder; without one, nothing is written.
        data: a dataset that replaces ``config.data.dataset``.
        model: a network that replaces ``config.model``.
        task: a task that replaces the dataset's.
        callbacks: observers of the run.
        resume: continue from the last checkpoint in ``folder``.
        engine: builds the engine; default: the one of the config.
    """

    def __init__(
        self,
        config: Config,
        folder: Path | None = None,
        *,
        data: Dataset | None = None,
        model: nn.Module | None = None,
        task: Task | None = None,
        callbacks: tuple[Callback, ...] = (),
        resume: bool = False,
        engine: Callable[[Run], Engine] | None = None,
    ) -> None:
        self.config, self.callbacks, self._resume = config, callbacks, resume
        self._own = {"data": data, "model": model, "task": task}
        with explain_out_of_memory(config):
            self.problem, self.partition = build_problem(config, data, model, task)
        if config.stop.target is not None and not resume:
            check_target(config.stop.target, self.metric)
        self.algorithm = algorithm(config.algorithm)
        self.folder = RunFolder(folder) if folder else None
        self._data_are_local = engine is None
        self.history: list[dict[str, Any]] = []
        self.record: Record | None = None  # set when the run ends or pauses
        self._loss = torch.tensor(math.nan)
        self.training = training_of(config, self.algorithm, len(self.partition.clients))
        self._sampler = sampler_of(config, len(self.partition.clients))
        initial = ModelState(*self.problem.initial())
        self.server = ServerState(config.init_rounds, initial, self.algorithm.new_server(initial.weights), Cost())
        self._observer = Observer(config.flatness, self.problem, self.partition, self.algorithm, config.training.rounds)
        self._stores: dict[str, RowStore] = {}
        self._statistics: dict[int, Tensor] = {}
        self._frozen = self.problem.frozen.fingerprint() if self.folder else ""
        self._interval = CheckpointInterval(config.engine.checkpoint_every)
        self._begun = self._session = time.monotonic()
        self.engine: Engine = engine(self) if engine else engine_for(config, self.problem, self._own)

    def go(self) -> Record:
        """Run to the end, from the last checkpoint if there is one."""
        for _ in self.steps():
            pass
        assert self.record is not None
        return self.record

    @isolated_rng
    def steps(self) -> Generator[int, None, None]:
        """Run one round at a time, yielding the number of completed rounds; closing the generator pauses the run."""
        try:
            earlier = self._open()
            self._session = time.monotonic()
            self._begun = self._session - earlier
            self._notify("began")
            with explain_out_of_memory(self.config):
                verdict = self._start()
                while verdict is None:
                    self._round()
                    verdict = self._after_round()
                    try:
                        yield self.rounds
                    except GeneratorExit:
                        verdict = verdict or self._pause(f"left after round {self.rounds}")
                self._close(verdict)
        finally:
            for store in self._stores.values():
                store.close()
            if self.folder:
                self.folder.release()
        self.record = Record(
            self.config,
            self.history,
            *verdict,
            self.seconds,
            self.models(),
            self.folder,
            self._own,
            self._statistics,
            self.rounds,
            self.metric,
        )
        for callback in self.callbacks:
            callback.ended(self, self.record)

    @property
    def rounds(self) -> int:
        """Number of completed rounds."""
        return self.server.rounds

    @property
    def metric(self) -> str:
        """The primary metric: the one that the task compares models by."""
        return self.problem.task.metric

    @property
    def loss(self) -> float:
        """Mean training loss of the last round; NaN before the first."""
        return float(self._loss)

    @property
    def seconds(self) -> float:
        """Duration of the run, without the time between pause and resume."""
        return time.monotonic() - self._begun

    def _start(self) -> Verdict | None:
        """Evaluate the initial model; a run that was killed just before its end has nothing left to do."""
        if self.rounds == self.config.init_rounds and not self.history:
            self._evaluate()
            self._save_models()
        return Verdict("finished") if self.rounds == self.config.training.rounds else None

    def _after_round(self) -> Verdict | None:
        """Evaluate and save what is due; returns how the run has ended, if it has."""
        done = self.rounds == self.config.training.rounds
        evaluating = self.config.is_evaluated(self.rounds)
        # Reading values synchronises with a GPU, so there the check is not made every round.
        if evaluating or self.problem.device.type == "cpu" or self.rounds % CHECKS_EVERY == 0:
            problem = describe_divergence(self.server.model.weights, self.loss, self.algorithm, self.config)
            if problem:
                return Verdict("diverged", f"round {self.rounds}: {problem}")
        self._save_models()
        if evaluating:
            self._evaluate()
            verdict = check_stopping_rules(self.history, self.config.stop, self.primary, self.metric)
            if verdict:
                return verdict
        if done or self._interval.is_due(self.rounds):
            self._checkpoint()
        budget = self.config.stop.seconds
        if budget is not None and time.monotonic() - self._session > budget and not done:
            return self._pause(f"the time budget of {budget:g} s ran out after round {self.rounds}")
        return Verdict("finished") if done else None

    def _pause(self, reason: str) -> Verdict:
        self._checkpoint()
        return Verdict("paused", reason)

    def _round(self) -> None:
        server, number = self.server, self.rounds
        for store in self._stores.values():
            store.now = number + 1
        before = _flat(server.model)
        for average in self.averages.values():
            average.before(number, before)
        cohort = [self.client(i) for i in self.cohort(number)]
        outcome = self.engine.train(self.training, number, server.model, server.states, cohort)
        if self._observer.due(number + 1):
            self._observer.trained(cohort, outcome, server.states)
        weights, states = self.algorithm.aggregate(outcome.returned, outcome.means, server.states)
        for client in outcome.clients:
            self._clients.write(client)
        cost = Cost(**{key: value + getattr(outcome.cost, key) for key, value in asdict(server.cost).items()})
        self.server = ServerState(number + 1, ModelState(weights, outcome.buffers, outcome.integers), states, cost)
        if number + 1 < self.config.training.rounds:
            upcoming = [(i, self.partition.clients[i]) for i in self.cohort(number + 1)]
            self.engine.prepare(self.training, number + 1, upcoming)
        self._loss = outcome.loss
        after = _flat(self.server.model)
        for average in self.averages.values():
            average.after(number, after)
        self._notify("round_done")

    def cohort(self, number: int) -> Sequence[int]:
        """The clients sampled for a round, counted from 0."""
        return self._sampler(self.config.seed, number)

    def client(self, number: int) -> Client:
        """A client with its examples and state."""
        return Client(number, self.partition.clients[number], *self._clients.read(number))

    @property
    def primary(self) -> str:
        """The primary model: the last average, or ``server`` without averages."""
        return list(self.averages)[-1] if self.averages else "server"

    def models(self) -> dict[str, ModelState]:
        """The current models by name: ``server``, those that the drift evaluates, and every average."""
        server = self.server.model
        models = {"server": server}
        for name, weights in self.algorithm.drift.evaluated(self.server.states["drift"]).items():
            models[name] = server._replace(weights=weights)
        flat = _flat(server)
        for name, average in self.averages.items():
            mean = average.model(flat)
            if mean is not None:
                weights, buffers = torch.split(mean, [len(server.weights), len(server.buffers)])
                if len(buffers) and self.config.evaluation.statistics == "estimated":
                    buffers = estimated_on(self.problem, server._replace(weights=weights), self.partition.trained_on)
                models[name] = ModelState(weights, buffers, server.integers)
        return models

    def _evaluate(self) -> None:
        models = self.models()
        scores = self.engine.evaluate(models, self.problem.held_out)
        item = torch.finfo(self.problem.dtype).bits // 8
        cost = self.server.cost
        record: dict[str, Any] = {"round": self.rounds, "train_loss": _finite(self.loss)}
        for part in self.problem.held_out:
            record[part] = {name: self._metrics(parts[part]) for name, parts in scores.items()}
        record |= {"backward_passes": cost.backward_passes, "samples": cost.samples}
        record |= {"bytes_down": cost.floats_down * item, "bytes_up": cost.floats_up * item}
        timing: dict[str, Any] = {"round": self.rounds}
        if self._observer.due(self.rounds):
            record["flatness"] = self._observer.figures(models, scores)
            timing["flatness"] = round(self._observer.seconds, 3)
        self.history.append(record)
        if self.folder:
            import resource  # not available on Windows

            memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            self.folder.append("metrics.jsonl", record)
            self.folder.append("timing.jsonl", {**timing, "seconds": round(self.seconds, 3), "memory": memory})
        self._notify("evaluated")

    def _metrics(self, values: Mapping[str, float]) -> dict[str, float | None]:
        """Metrics for the history; values that are not finite become None."""
        if self.metric not in values:
            raise UserError(
                f"the task's metric is {self.metric!r}, but it reports only {', '.join(values)}; report that metric too"
            )
        return {name: _finite(value) for name, value in values.items()}

    def _open(self) -> float:
        """Set up stores and averages and restore the last checkpoint; returns the seconds spent before."""
        folder, init_rounds = self.folder, self.config.init_rounds
        if folder:
            if not self._resume:
                folder.create(self.config, provenance(self.partition, self.problem.data, self._own), self.metric)
            folder.hold()
        checkpoint = last_checkpoint(folder, self.config, self._frozen, self.problem.device) if folder else None
        if folder and self._resume and self._data_are_local:
            require_same_inputs(folder, fingerprints(self._own), self.partition.digest())
        own_statistics, open_rows = self.training.own_statistics, partial(self._open_rows, "clients")
        self._clients = ClientStateStore(self.algorithm, self.server.model, own_statistics, open_rows)
        self.averages = self._begin_averages()
        if folder and checkpoint:
            self._restore(folder, *checkpoint)
            return folder.seconds()
        for store in self._stores.values():
            store.rewind(init_rounds)
        if folder:
            create_folder((folder.path / CHECKPOINT).parent)  # it may have been deleted
            folder.cut_metrics(0)
            remove_snapshots_after(folder.path, init_rounds)
        return 0.0

    def _begin_averages(self) -> dict[str, AverageState]:
        flat = _flat(self.server.model)
        by_part = any(getattr(average, "part", "all") != "all" for average in self.algorithm.averages)
        names = classifier_parameters(self.problem.model) if by_part else set()
        info = RunInfo(
            self.config.training.rounds,
            self.algorithm.lr_schedule.cycle,
            self.problem.whole_layout.indicator(names.__contains__, flat),
            lambda name, _: self._open_rows(name, len(flat)),
            self.config.init_rounds,
        )
        for warning in filter(None, (average.warning(info) for average in self.algorithm.averages)):
            warnings.warn(warning, stacklevel=2)
        return {average_name(average): average.begin(info, flat) for average in self.algorithm.averages}

    def _open_rows(self, name: str, width: int) -> RowStore:
        file = self.folder.rows(name, width, self.problem.dtype) if self.folder and width else None
        store = CachedRowStore(file, cache_size(self.problem.device)) if file else RowStore()
        self._stores[name] = store
        return store

    def _checkpoint(self) -> None:
        if self.folder:
            with self._interval.measured():
                self._clients.settle()
                loss = _finite(self.loss)
                write_checkpoint(self.folder, self.server, self.averages, self._stores, self.config, loss, self._frozen)

    def _restore(self, folder: RunFolder, tensors: dict[str, Tensor], about: dict[str, Any]) -> None:
        require_rows(folder, self._stores, about)
        folder.cut_metrics(about["metrics"])
        self.server = ServerState.from_checkpoint(tensors, about)
        self._loss = torch.tensor(math.nan if about["loss"] is None else about["loss"], dtype=self.problem.dtype)
        for name, average in self.averages.items():
            average.restore(under(tensors, f"average/{name}/"))
        for store in self._stores.values():
            store.rewind(self.rounds)
        remove_snapshots_after(folder.path, self.rounds)
        self.history = folder.metrics()

    def _save_models(self) -> None:
        """Save all models, if ``evaluation.save_every`` asks for it after this round."""
        every = self.config.evaluation.save_every
        if self.folder and every is not None and self.rounds % every == 0:
            create_folder(self.folder.path / SNAPSHOTS)
            self._write_models(self.folder, lambda name: snapshot_file(name, self.rounds))

    def _write_models(self, folder: RunFolder, file: Callable[[str], str]) -> None:
        trained = {"trained": list(self.problem.layout.names)} if self._frozen else {}
        for name, model in self.models().items():
            about = {"model": self.config.model, "name": name, "rounds": self.rounds, **trained}
            folder.write_tensors(file(name), self.problem.state_dict(*model), about)

    def _close(self, verdict: Verdict) -> None:
        self._statistics = self._clients.statistics(len(self.partition.clients))
        if not self.folder:
            return
        if self._statistics:
            by_number = {str(number): statistics for number, statistics in self._statistics.items()}
            self.folder.write_tensors(STATISTICS_FILE, by_number, {"rounds": self.rounds})
        self._write_models(self.folder, model_file)
        self.folder.write_status(verdict.status, metric=self.metric, rounds=self.rounds, reason=verdict.reason)

    def _notify(self, event: str) -> None:
        for callback in self.callbacks:
            getattr(callback, event)(self)


def _flat(model: ModelState) -> Tensor:
    """Weights and floating buffers as one vector, which averages operate on."""
    return torch.cat([model.weights, model.buffers])


def _finite(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None
