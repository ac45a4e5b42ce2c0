"""A run: training rounds, averaging, evaluation and checkpoints, from the start or from the last checkpoint."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Mapping
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedflat.algorithms import algorithm
from fedflat.data import Dataset
from fedflat.engines.problem.task import Task, finite_or_none, lower_is_better
from fedflat.engines.round.contract import Client, Cost, Engine, ModelState
from fedflat.engines.round.server_step import server_step
from fedflat.errors import UserError
from fedflat.experiment.analysis.observer import Observer
from fedflat.experiment.analysis.run_model import estimated_statistics
from fedflat.experiment.callback import Callback, RunView
from fedflat.experiment.config import Config
from fedflat.experiment.setup.engine import (
    begin_averages,
    decide_compile,
    engine_for,
    explain_gpu_errors,
    prepare_workers,
    training_of,
)
from fedflat.experiment.setup.privacy import budget_verdict, privacy_metrics
from fedflat.experiment.setup.problem import build_problem, check_new_run, decide_precision
from fedflat.experiment.stopping import DIVERGENCE_CHECK_EVERY, Verdict, describe_divergence, stopping_verdict
from fedflat.experiment.store.checkpoint import (
    CHECKPOINT,
    CheckpointInterval,
    ServerState,
    last_checkpoint,
    require_same_run,
    with_prefix,
    write_checkpoint,
)
from fedflat.experiment.store.client_states import CachedRowStore, ClientStateStore, RowStore, cache_size
from fedflat.experiment.store.files import create_folder
from fedflat.experiment.store.initial_weights import without_lost_weights
from fedflat.experiment.store.provenance import changed_weights, fingerprints, provenance, require_same_inputs
from fedflat.experiment.store.run_folder import (
    SNAPSHOTS,
    STATISTICS_FILE,
    Record,
    RunFolder,
    model_file,
    remove_snapshots_after,
    snapshot_file,
)
from fedflat.experiment.timeline import TimelineSetup, timeline_for
from fedflat.gradients import gradients_enabled
from fedflat.operating_system import peak_memory
from fedflat.randomness import isolated_from_caller


class Run:
    """One experiment: trains round by round, evaluates models and writes checkpoints and results.

    Args:
        config: the experiment.
        folder: path of the run folder; if None, nothing is written.
        data: a dataset that replaces ``config.data.dataset``.
        model: a network that replaces ``config.model``.
        task: a task that replaces the dataset's.
        callbacks: observers of the run.
        resume: continue from the last checkpoint in ``folder``.
        engine: function that builds a custom engine, which trains at remote sites; default: the config's engine.
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
        self.callbacks, self._resume, self._has_local_data = callbacks, resume, engine is None
        self._user_objects = {"data": data, "model": model, "task": task}
        recorded = RunFolder(folder).config() if folder and resume else None
        config = config if engine else decide_precision(config, recorded)  # remote sites decide by themselves
        built = config  # with other initial weights if only the checkpoint still has those of the run
        if folder and resume and engine is None:
            built = without_lost_weights(config, RunFolder(folder))
        with explain_gpu_errors(config):
            if engine is None:
                prepare_workers(config, self._user_objects)
            self.problem, self.partition = build_problem(built, data, model, task)
        if not resume:  # a resumed run was checked when it began
            check_new_run(config, self.metric, self.partition)
        self.algorithm, self.folder = algorithm(config.algorithm), RunFolder(folder) if folder else None
        self.history: list[dict[str, Any]] = []
        self.record: Record | None = None  # set when the run ends or pauses
        self._train_loss = torch.tensor(math.nan)
        self.training = training_of(config, self.algorithm, len(self.partition.clients), self.problem, bool(engine))
        setup = TimelineSetup(config, self.algorithm, self.training, self.problem, self.partition.clients)
        self.timeline = timeline_for(setup)
        initial = ModelState(*self.problem.initial_state())
        self.server = ServerState(config.init_rounds, initial, self.algorithm.new_server(initial.weights), Cost())
        self._flatness: Observer | None = None
        if config.flatness.every is not None:
            self._flatness = Observer(config, self.problem, self.partition, self.algorithm)
        self._stores: dict[str, RowStore] = {}  # client states and averages, by name
        self._bn_statistics: dict[int, Tensor] = {}  # by client, if clients keep their own
        self._frozen_hash = self.problem.frozen.fingerprint() if self.folder else ""
        self._interval = CheckpointInterval(config.engine.checkpoint_every)
        self._started = self._session_started = time.monotonic()
        if engine is None:  # last, because it may compile kernels, which takes seconds
            with gradients_enabled():
                built = decide_compile(built, self.problem, self.partition, recorded, folder)
        self.config, self._init = config.changed(engine=built.engine), built.init
        self.engine: Engine = engine(self) if engine else engine_for(built, self.problem, self._user_objects)

    def execute(self) -> Record:
        """Run to the end, from the last checkpoint if there is one; returns the record of the run."""
        for _ in self.train_rounds():
            pass
        assert self.record is not None
        return self.record

    @isolated_from_caller
    def train_rounds(self) -> Generator[int, None, None]:
        """Run one round at a time and yield the number of completed rounds; closing the generator pauses the run.

        The loop ends with a verdict: the status of the run and the reason why it ended. Afterwards, ``record`` is set.
        """
        try:
            earlier_seconds = self._open()
            self._notify("began")
            self._session_started = time.monotonic()  # only now: a deployment waits for its sites in "began"
            self._started = self._session_started - earlier_seconds
            with explain_gpu_errors(self.config):
                verdict = self._before_first_round()
                while verdict is None:
                    self._train_round()
                    verdict = self._after_round()
                    try:
                        yield self.rounds
                    except GeneratorExit:  # the caller has left its loop
                        verdict = verdict or self._pause(f"left after round {self.rounds}")
                self._write_outcome(verdict)
        finally:
            for store in self._stores.values():
                store.close()
            if self.folder:
                self.folder.release_lock()
        self.record = Record(
            self.config,
            self.history,
            verdict.status,
            verdict.reason,
            seconds=self.seconds,
            models=self.models(),
            folder=self.folder,
            user_objects=self._user_objects,
            statistics=self._bn_statistics,
            rounds=self.rounds,
            metric=self.metric,
            lower_is_better=self.lower_is_better,
            averages=tuple(self.averages),
        )
        self._notify("ended", self.record)

    @property
    def rounds(self) -> int:
        """Number of completed rounds."""
        return self.server.rounds

    @property
    def metric(self) -> str:
        """The primary metric: the one that the task compares models by."""
        return self.problem.task.metric

    @property
    def lower_is_better(self) -> bool:
        """Whether lower values of the primary metric are better."""
        return lower_is_better(self.problem.task)

    @property
    def loss(self) -> float:
        """Mean training loss of the last round; NaN before the first."""
        return float(self._train_loss)

    @property
    def seconds(self) -> float:
        """Duration of the run in seconds, without the time between pause and resume."""
        return time.monotonic() - self._started

    def _before_first_round(self) -> Verdict | None:
        """Evaluate and save the initial model; returns a verdict if a resumed run has no rounds or budget left."""
        if self.rounds == self.config.init_rounds and not self.history:
            self._evaluate()
            self._save_models()
        finished = Verdict("finished") if self.rounds == self.config.training.rounds else None
        return finished or budget_verdict(self.config, self.training, self.engine, self.rounds)

    def _after_round(self) -> Verdict | None:
        """Check for divergence, then save, evaluate and checkpoint if due; returns a verdict if the run ends here."""
        is_last = self.rounds == self.config.training.rounds
        spent = budget_verdict(self.config, self.training, self.engine, self.rounds)
        is_evaluated = self.config.is_evaluated(self.rounds) or spent is not None
        # On a GPU, the check waits for all queued work, so it is not made every round.
        is_checked = is_evaluated or self.problem.device.type == "cpu" or self.rounds % DIVERGENCE_CHECK_EVERY == 0
        if is_checked and self.rounds - self.config.init_rounds > self.timeline.idle_rounds:  # else no loss is known
            weights = self.server.model.weights
            divergence = describe_divergence(weights, self.loss, self.algorithm, self.config, self.problem)
            if divergence:
                return Verdict("diverged", f"round {self.rounds}: {divergence}")
        self._save_models()
        if is_evaluated:
            self._evaluate()
            verdict = stopping_verdict(self.history, self.config.stop, self.primary, self.metric, self.lower_is_better)
            if verdict or spent:
                return verdict or spent
        if is_last or self._interval.is_due(self.rounds):
            self._checkpoint()
        budget = self.config.stop.seconds
        if budget is not None and time.monotonic() - self._session_started > budget and not is_last:
            return self._pause(f"the time budget of {budget:g} s ran out after round {self.rounds}")
        return Verdict("finished") if is_last else None

    def _pause(self, reason: str) -> Verdict:
        """Write a checkpoint, from which the run can be resumed, and return the verdict ``paused``."""
        self._checkpoint()
        return Verdict("paused", reason)

    def _train_round(self) -> None:
        """Train the next cohort, aggregate its updates and update server state, client state and averages."""
        server, round_index = self.server, self.rounds  # before this round; rounds are counted from 0
        for store in self._stores.values():
            store.current_round = round_index + 1  # row stores count rounds from 1
        flat_model = _flat(server.model)
        for average in self.averages.values():
            average.before_round(round_index, flat_model)
        result = self.timeline.train(self.engine, server, self.client)
        model, states, cost, outcome = server.model, server.states, server.cost + result.wasted, result.outcome
        if outcome is not None:  # measure flatness now, because the next round overwrites the clients' updates
            if result.cohort and self._flatness and self._flatness.is_due(round_index + 1):
                self._flatness.observe_cohort(result.cohort, outcome, server.model, server.states)
            model, states = server_step(self.algorithm, self.problem, outcome, server.states)
            cost, self._train_loss = cost + outcome.cost, outcome.loss
        for client in result.trained:
            self._clients.write(client)
        self.server = ServerState(round_index + 1, model, states, cost)  # this also increases self.rounds
        if self.rounds < self.config.training.rounds:  # the engine may load the next clients' data in the background
            self.engine.prepare(self.training, self.rounds, self.timeline.upcoming(self.rounds))
        flat_model = _flat(model)
        for average in self.averages.values() if outcome else ():  # a round without progress has no new model
            average.update(round_index, flat_model)
        self._notify("round_done")

    def client(self, number: int) -> Client:
        """A client with its examples and state."""
        return Client(number, self.partition.clients[number], *self._clients.read(number))

    @property
    def primary(self) -> str:
        """Name of the primary model: the last average, or ``server`` if there are no averages."""
        return list(self.averages)[-1] if self.averages else "server"

    def models(self) -> dict[str, ModelState]:
        """The current models by name: ``server``, further models of the drift slot, and averages that have begun."""
        server = self.server.model
        further = self.algorithm.drift.evaluated(self.server.states["drift"])
        models = {"server": server} | {name: server._replace(weights=weights) for name, weights in further.items()}
        flat_model = _flat(server)
        for name, average in self.averages.items():
            mean = average.model(flat_model)
            if mean is None:  # this average has not begun yet
                continue
            weights, buffers = torch.split(mean, [len(server.weights), len(server.buffers)])
            if len(buffers) and self.config.evaluation.statistics == "estimated":
                averaged = server._replace(weights=weights)
                buffers = estimated_statistics(self.problem, averaged, self.partition.trained_on)
            models[name] = ModelState(weights, buffers, server.integer_buffers)
        return models

    def _evaluate(self) -> None:
        """Evaluate all models on all held-out sets, and append metrics, costs and flatness to the history."""
        models = self.models()
        scores = self.engine.evaluate(models, self.problem.evaluation_sets)
        cost = self.server.cost
        bytes_per_float = torch.finfo(self.problem.dtype).bits // 8
        evaluation: dict[str, Any] = {"round": self.rounds, "train_loss": finite_or_none(self.loss)}
        for set_name in dict.fromkeys(chain(self.problem.evaluation_sets, *scores.values())):  # sites may add a set
            evaluated = {name: by_set[set_name] for name, by_set in scores.items() if set_name in by_set}
            evaluation[set_name] = {name: self._metrics(values) for name, values in evaluated.items()}
        evaluation |= {"backward_passes": cost.backward_passes, "samples": cost.samples}
        evaluation |= {"bytes_down": cost.floats_down * bytes_per_float, "bytes_up": cost.floats_up * bytes_per_float}
        evaluation |= self.timeline.metrics() | privacy_metrics(self.config, self.training, self.engine, self.rounds)
        timing: dict[str, Any] = {"round": self.rounds}
        if self._flatness and self._flatness.is_due(self.rounds):
            evaluation["flatness"] = self._flatness.measurements(models, scores, self.rounds)
            timing["flatness"] = round(self._flatness.take_seconds(), 3)
        self.history.append(evaluation)
        if self.folder:
            self.folder.append("metrics.jsonl", evaluation)
            self.folder.append("timing.jsonl", {**timing, "seconds": round(self.seconds, 3), "memory": peak_memory()})
        self._notify("evaluated")

    def _metrics(self, values: Mapping[str, float]) -> dict[str, float | None]:
        """Metrics for the history, where None replaces values that are not finite; the primary one must be present."""
        if self.metric not in values:
            raise UserError(
                f"the task's metric is {self.metric!r}, but it reports only {', '.join(values)}; report that metric too"
            )
        return {name: finite_or_none(value) for name, value in values.items()}

    def _open(self) -> float:
        """Set up folder, stores and averages, and restore the last checkpoint; returns the seconds taken up to it."""
        folder, init_rounds = self.folder, self.config.init_rounds
        if folder:
            if not self._resume:
                initial_inputs = provenance(self.partition, self.problem.data, self._user_objects, self._init)
                folder.create(self.config, initial_inputs, self.metric, self.lower_is_better)
            folder.acquire_lock()
        checkpoint = last_checkpoint(folder, self.config, self._frozen_hash, self.problem.device) if folder else None
        if folder and self._resume and self._has_local_data:
            current_inputs = fingerprints({**self._user_objects, "data": self.problem.data}, self._init)
            require_same_inputs(folder, current_inputs, self.partition.digest())
            if checkpoint is None and self._init != self.config.init:  # it has been removed meanwhile
                raise changed_weights(folder, folder.remedy)
        open_rows = partial(self._open_rows, "clients")
        self._clients = ClientStateStore(self.algorithm, self.server.model, self.training.own_statistics, open_rows)
        flat_model = _flat(self.server.model)
        self.averages = begin_averages(
            self.algorithm, self.problem, self.config, flat_model, partial(self._open_rows, width=len(flat_model))
        )
        if folder and checkpoint:
            self._restore(folder, *checkpoint)
            return folder.seconds()
        for store in self._stores.values():  # a run that was killed before its first checkpoint may have left rows
            store.rewind(init_rounds)
        if folder:
            create_folder((folder.path / CHECKPOINT).parent)  # it may have been deleted
            folder.rewind_logs(metrics_length=0, rounds=-1)
            remove_snapshots_after(folder.path, init_rounds)
        return 0.0

    def _open_rows(self, name: str, width: int) -> RowStore:
        """Open a store of rows with ``width`` scalars, in the run folder or, for a run without a folder, in memory."""
        file = self.folder.open_rows(name, width, self.problem.dtype) if self.folder and width else None
        self._stores[name] = CachedRowStore(file, cache_size(self.problem.device)) if file else RowStore()
        return self._stores[name]

    def _checkpoint(self) -> None:
        """Write a checkpoint, if the run has a folder, and measure how long that takes."""
        if self.folder:
            with self._interval.measured():
                self._clients.fetch_remote_states()
                loss, frozen = finite_or_none(self.loss), self._frozen_hash
                state = self.server, self.averages, self._stores, self.config, loss, frozen, self.timeline.state()
                write_checkpoint(self.folder, *state)

    def _restore(self, folder: RunFolder, tensors: dict[str, Tensor], header: dict[str, Any]) -> None:
        """Continue from a checkpoint, given its tensors and header; discard all that was written after it."""
        self.history = require_same_run(folder, tensors, header, self.server.model, self._stores)
        if folder.has_ended:  # resumed to write its models again; if it is killed meanwhile, it can be resumed
            metric: dict[str, Any] = {"metric": self.metric, "lower_is_better": self.lower_is_better}
            folder.write_status("running", **metric, averages=[*self.averages])
        folder.rewind_logs(header["metrics"], header["rounds"])
        self.server = ServerState.from_checkpoint(tensors, header)
        loss = math.nan if header["loss"] is None else header["loss"]
        self._train_loss = torch.tensor(loss, dtype=self.problem.dtype)
        for name, average in self.averages.items():
            average.restore(with_prefix(tensors, f"average/{name}/"))
        self.timeline.restore(with_prefix(tensors, "timeline/"), header.get("timeline", {}))
        for store in self._stores.values():
            store.rewind(self.rounds)
        remove_snapshots_after(folder.path, self.rounds)

    def _save_models(self) -> None:
        """Save all models if the number of completed rounds is a multiple of ``evaluation.save_every``."""
        every = self.config.evaluation.save_every
        if self.folder and every is not None and self.rounds % every == 0:
            create_folder(self.folder.path / SNAPSHOTS)
            self._write_models(self.folder, lambda name: snapshot_file(name, self.rounds))

    def _write_models(self, folder: RunFolder, file: Callable[[str], str]) -> None:
        """Write every model; ``file`` maps a model's name to its file name."""
        # If parameters are frozen, the header names the trained ones.
        trained = {"trained": list(self.problem.layout.names)} if self._frozen_hash else {}
        for name, model in self.models().items():
            header = {"model": self.config.model, "name": name, "rounds": self.rounds, **trained}
            folder.write_tensors(file(name), self.problem.state_dict(*model), header)

    def _write_outcome(self, verdict: Verdict) -> None:
        """Write the final models, the clients' BatchNorm statistics (SiLoBN) and the run's status."""
        self._bn_statistics = self._clients.statistics(len(self.partition.clients))
        if not self.folder:
            return
        self.folder.sync_metrics()
        if self._bn_statistics:
            by_number = {str(number): statistics for number, statistics in self._bn_statistics.items()}
            self.folder.write_tensors(STATISTICS_FILE, by_number, {"rounds": self.rounds})
        self._write_models(self.folder, model_file)
        metric: dict[str, Any] = {"metric": self.metric, "lower_is_better": self.lower_is_better}
        self.folder.write_status(**verdict._asdict(), **metric, averages=[*self.averages], rounds=self.rounds)

    def _notify(self, event: str, *arguments: Any) -> None:
        """Call the method ``event`` of every callback."""
        view: RunView = self  # what callbacks may rely on
        for callback in self.callbacks:
            getattr(callback, event)(view, *arguments)


def _flat(model: ModelState) -> Tensor:
    """Weights and floating-point buffers as one vector, which averages operate on."""
    return torch.cat([model.weights, model.buffers])
