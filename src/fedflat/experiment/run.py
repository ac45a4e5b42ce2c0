"""A run: rounds of training, averaging, evaluating and checkpointing, from a config or from where it was left."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedflat.algorithms import algorithm
from fedflat.algorithms.algorithm import States, flat_state, nested_state
from fedflat.averaging import RunInfo, average_name
from fedflat.data import Dataset
from fedflat.engines.problem.task import Task
from fedflat.engines.round.contract import Client, Cost, Engine, ModelState
from fedflat.engines.round.randomness import drawn_apart
from fedflat.errors import UserError
from fedflat.experiment.analysis.batchnorm import estimated_on
from fedflat.experiment.analysis.observer import Observer
from fedflat.experiment.callback import Callback
from fedflat.experiment.config import Config
from fedflat.experiment.setup.engine import engine_for, explain_out_of_memory
from fedflat.experiment.setup.problem import federation
from fedflat.experiment.setup.training import sampler_of, training_of
from fedflat.experiment.stopping import Verdict, check_target, diverged, stop_early
from fedflat.experiment.store.atomic_files import create_folder
from fedflat.experiment.store.checkpoint import CHECKPOINT, Pace, last_checkpoint, require_rows, under
from fedflat.experiment.store.client_states import ClientStateStore
from fedflat.experiment.store.provenance import brought, origin_of, require_same_origin
from fedflat.experiment.store.record import STATISTICS_FILE, Record, model_file
from fedflat.experiment.store.row_store import CachedRows, Rows, cache_size
from fedflat.experiment.store.run_folder import RunFolder
from fedflat.experiment.store.snapshots import FOLDER, cut_snapshots, snapshot_file
from fedflat.models import classifier_parameters

LOOKS_EVERY = 10
"""Rounds between looks for divergence on a GPU, besides those at evaluations."""


@dataclass
class Server:
    """All that the server holds between rounds."""

    rounds: int
    model: ModelState
    states: States
    cost: Cost


class Run:
    """One experiment, from its first round to its last; with ``resume``, from where its folder left it."""

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
            self.problem, self.partition = federation(config, data, model, task)
        if config.stop.target is not None and not resume:
            check_target(config.stop.target, self.problem.task.metric)
        self.algorithm = algorithm(config.algorithm)
        self.folder = RunFolder(folder) if folder else None
        self._has_the_data = engine is None  # with an engine of their own they lie elsewhere
        self.history: list[dict[str, Any]] = []
        self.record: Record | None = None  # before the run is over
        self._loss = torch.tensor(math.nan)
        self.training = training_of(config, self.algorithm, len(self.partition.clients))
        self._sampler = sampler_of(config, len(self.partition.clients))
        weights, buffers, integers = self.problem.initial()
        self.server = Server(
            config.init_rounds, ModelState(weights, buffers, integers), self.algorithm.new_server(weights), Cost()
        )
        self._observer = Observer(config.flatness, self.problem, self.partition, self.algorithm, config.training.rounds)
        self._stores: dict[str, Rows] = {}
        self._statistics: dict[int, Tensor] = {}
        self._still = self.problem.still.fingerprint() if self.folder else ""
        self._pace = Pace(config.engine.checkpoint_every)
        self._begun = self._session = time.monotonic()
        self.engine: Engine = engine(self) if engine else engine_for(config, self.problem, self._own)

    # --- the life of a run -------------------------------------------------------------------------------------------------------

    def go(self) -> Record:
        """Run to the end, from the last checkpoint where there is one."""
        for _ in self.steps():
            pass
        assert self.record is not None
        return self.record

    @drawn_apart
    def steps(self) -> Generator[int, None, None]:
        """The same one round at a time: the number of rounds done, after each. Whoever leaves off pauses the run, which can be resumed."""
        try:
            earlier = self._open()
            self._session = time.monotonic()
            self._begun = self._session - earlier
            self._tell("began")
            with explain_out_of_memory(self.config):
                verdict = self._first()
                while verdict is None:
                    self._round()
                    verdict = self._judged()
                    try:
                        yield self.server.rounds
                    except GeneratorExit:
                        verdict = verdict or self._paused(f"left after round {self.server.rounds}")
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
            self.server.rounds,
        )
        for callback in self.callbacks:
            callback.ended(self, self.record)

    @property
    def loss(self) -> float:
        """The mean training loss of the last round; not a number before the first."""
        return float(self._loss)

    @property
    def seconds(self) -> float:
        """How long the run has taken, without the time it lay still."""
        return time.monotonic() - self._begun

    def _first(self) -> Verdict | None:
        """Evaluate what there is before the first round; nothing is left to do where a run was killed just before its end."""
        if self.server.rounds == self.config.init_rounds and not self.history:
            self._evaluate()
            self._keep()
        return Verdict("finished") if self.server.rounds == self.config.training.rounds else None

    def _judged(self) -> Verdict | None:
        """Look at a round that is done, evaluate and save what is due, and say how the run has ended, if it has."""
        done = self.server.rounds == self.config.training.rounds
        evaluating = self.config.is_evaluated(self.server.rounds)
        # Looking at numbers on a GPU means waiting for it, so that is not done after every round there.
        if evaluating or self.problem.device.type == "cpu" or self.server.rounds % LOOKS_EVERY == 0:
            bad = diverged(self.server.model.weights, self.loss, self.algorithm, self.config)
            if bad:
                return Verdict("diverged", f"round {self.server.rounds}: {bad}")
        self._keep()
        if evaluating:
            self._evaluate()
            verdict = stop_early(self.history, self.config.stop, self.primary, self.problem.task.metric)
            if verdict:
                return verdict
        if done or self._pace.is_due(self.server.rounds):
            self._checkpoint()
        budget = self.config.stop.seconds
        if budget is not None and time.monotonic() - self._session > budget and not done:
            return self._paused(f"the time budget of {budget:g} s ran out after round {self.server.rounds}")
        return Verdict("finished") if done else None

    def _paused(self, why: str) -> Verdict:
        self._checkpoint()
        return Verdict("paused", why)

    # --- one round ---------------------------------------------------------------------------------------------------------------

    def _round(self) -> None:
        server, number = self.server, self.server.rounds
        for store in self._stores.values():
            store.now = number + 1
        before = self._whole(server.model)
        for average in self.averages.values():
            average.before(number, before)
        cohort = [self.client(i) for i in self.cohort(number)]
        outcome = self.engine.train(self.training, number, server.model, server.states, cohort)
        if self._observer.due(number + 1):
            self._observer.trained(cohort, outcome, server.states)
        weights, states = self.algorithm.aggregate(outcome.returned, outcome.means, server.states)
        for client in outcome.clients:
            self._keeping.write(client)
        cost = Cost(**{key: value + getattr(outcome.cost, key) for key, value in asdict(server.cost).items()})
        self.server = Server(number + 1, ModelState(weights, outcome.buffers, outcome.integers), states, cost)
        if number + 1 < self.config.training.rounds:
            coming = [(i, self.partition.clients[i]) for i in self.cohort(number + 1)]
            self.engine.prepare(self.training, number + 1, coming)
        self._loss = outcome.loss
        after = self._whole(self.server.model)
        for average in self.averages.values():
            average.after(number, after)
        self._tell("round_done")

    def cohort(self, number: int) -> Sequence[int]:
        """The clients that take part in a round, which is counted from 0."""
        return self._sampler(self.config.seed, number)

    def client(self, number: int) -> Client:
        """A client with its data and with what it keeps."""
        return Client(number, self.partition.clients[number], *self._keeping.read(number))

    # --- evaluation --------------------------------------------------------------------------------------------------------------

    @property
    def primary(self) -> str:
        """The model whose figures stand for the run: its last average, or the server's own."""
        return list(self.averages)[-1] if self.averages else "server"

    def models(self) -> dict[str, ModelState]:
        """Every model there is to evaluate now, by name."""
        own = self.server.model
        found = {"server": own}
        found |= {
            name: own._replace(weights=w)
            for name, w in self.algorithm.drift.evaluated(self.server.states["drift"]).items()
        }
        whole = self._whole(own)
        for name, average in self.averages.items():
            mean = average.model(whole)
            if mean is not None:
                weights, buffers = torch.split(mean, [len(own.weights), len(own.buffers)])
                if len(buffers) and self.config.evaluation.statistics == "estimated":
                    buffers = estimated_on(self.problem, own._replace(weights=weights), self.partition.trained_on)
                found[name] = ModelState(weights, buffers, own.integers)
        return found

    def _evaluate(self) -> None:
        models = self.models()
        found = self.engine.evaluate(models, self.problem.held_out)
        item = torch.finfo(self.problem.dtype).bits // 8
        cost = self.server.cost
        record: dict[str, Any] = {
            "round": self.server.rounds,
            "train_loss": None if math.isnan(self.loss) else self.loss,
        }
        for part in self.problem.held_out:
            record[part] = {name: self._kept(sets[part]) for name, sets in found.items()}
        record |= {
            "backward_passes": cost.backward_passes,
            "samples": cost.samples,
            "bytes_down": cost.floats_down * item,
            "bytes_up": cost.floats_up * item,
        }
        timing: dict[str, Any] = {"round": self.server.rounds}
        if self._observer.due(self.server.rounds):
            record["flatness"] = self._observer.figures(models, found)
            timing["flatness"] = round(self._observer.seconds, 3)
        self.history.append(record)
        if self.folder:
            self.folder.append("metrics.jsonl", record)
            self.folder.append("timing.jsonl", {**timing, "seconds": round(self.seconds, 3), "memory": _memory()})
        self._tell("evaluated")

    def _kept(self, figures: Mapping[str, float]) -> dict[str, float | None]:
        """Figures as they are written; after the loss the metric that stands for the run, which readers know by its place."""
        metric = self.problem.task.metric
        if metric not in figures:
            raise UserError(
                f"the task compares models by {metric!r} and reports {', '.join(figures)}; let its metric be one of them"
            )
        return {name: _finite(figures[name]) for name in dict.fromkeys(["loss", metric, *figures]) if name in figures}

    # --- on disk -----------------------------------------------------------------------------------------------------------------

    def _open(self) -> float:
        """Set up what is kept, going back to the last checkpoint where there is one; returns the seconds spent before."""
        if self.folder:
            if not self._resume:
                self.folder.create(self.config, origin_of(self.partition, self.problem.data, self._own))
            self.folder.hold()
        checkpoint = last_checkpoint(self.folder, self.config, self._still) if self.folder else None
        if self.folder and self._resume and self._has_the_data:
            require_same_origin(self.folder, brought(self._own), self.partition.digest())
        own_statistics = self.training.own_statistics
        self._keeping = ClientStateStore(
            self.algorithm, self.server.model, own_statistics, lambda width: self._rows("clients", width)
        )
        whole = self._whole(self.server.model)
        parts = any(getattr(average, "part", "all") != "all" for average in self.algorithm.averages)
        names = classifier_parameters(self.problem.model) if parts else set()
        classifier = self.problem.whole_layout.indicator(names.__contains__, whole)
        scene = RunInfo(
            self.config.training.rounds,
            self.algorithm.lr_schedule.cycle,
            classifier,
            lambda name, _: self._rows(name, len(whole)),
            self.config.init_rounds,
        )
        for nothing in filter(None, (average.warning(scene) for average in self.algorithm.averages)):
            warnings.warn(nothing, stacklevel=2)
        self.averages = {average_name(average): average.begin(scene, whole) for average in self.algorithm.averages}
        if not self.folder or not checkpoint:
            for store in self._stores.values():
                store.rewind(self.config.init_rounds)
            if self.folder:
                create_folder((self.folder.path / CHECKPOINT).parent)  # someone may have removed it
                self.folder.cut_metrics(0)
                cut_snapshots(self.folder.path, self.config.init_rounds)
            return 0.0
        self._restore(self.folder, *checkpoint)
        return self.folder.seconds()

    def _rows(self, name: str, width: int) -> Rows:
        file = self.folder.rows(name, width, self.problem.dtype) if self.folder and width else None
        store = CachedRows(file, cache_size(self.problem.device)) if file else Rows()
        self._stores[name] = store
        return store

    def _checkpoint(self) -> None:
        if self.folder:
            with self._pace.measured():
                self._save(self.folder)

    def _save(self, folder: RunFolder) -> None:
        server = self.server
        self._keeping.settle()
        for store in self._stores.values():
            store.flush()
        tensors = {"weights": server.model.weights, "buffers": server.model.buffers}
        tensors |= {f"integers/{name}": value for name, value in server.model.integers.items()}
        tensors |= {f"server/{name}": value for name, value in flat_state(server.states).items()}
        for name, average in self.averages.items():
            tensors |= {f"average/{name}/{key}": value for key, value in average.tensors().items()}
        about = {
            "rounds": server.rounds,
            "metrics": folder.metrics_length(),
            "cost": asdict(server.cost),
            "loss": _finite(self.loss),
            "rows": {name: store.count for name, store in self._stores.items()},
            "settings": self.config.lasting(),
        }
        if self._still:
            about["frozen"] = self._still
        folder.write_tensors(CHECKPOINT, tensors, about)
        for store in self._stores.values():
            store.commit(server.rounds)

    def _restore(self, folder: RunFolder, saved: dict[str, Tensor], about: dict[str, Any]) -> None:
        require_rows(folder, self._stores, about)
        folder.cut_metrics(about["metrics"])
        tensors = {name: tensor.to(self.problem.device) for name, tensor in saved.items()}
        model = ModelState(tensors["weights"], tensors["buffers"], under(tensors, "integers/"))
        self.server = Server(about["rounds"], model, nested_state(under(tensors, "server/")), Cost(**about["cost"]))
        self._loss = torch.tensor(math.nan if about["loss"] is None else about["loss"], dtype=self.problem.dtype)
        for name, average in self.averages.items():
            average.restore(under(tensors, f"average/{name}/"))
        for store in self._stores.values():
            store.rewind(about["rounds"])
        cut_snapshots(folder.path, about["rounds"])
        self.history = folder.metrics()

    def _keep(self) -> None:
        """Keep every model as it is now, where the config asks for it after this round."""
        every = self.config.evaluation.save_every
        if not self.folder or every is None or self.server.rounds % every:
            return
        create_folder(self.folder.path / FOLDER)
        for name, model in self.models().items():
            self._write(self.folder, snapshot_file(name, self.server.rounds), name, model)

    def _write(self, folder: RunFolder, file: str, name: str, model: ModelState) -> None:
        about: dict[str, Any] = {"model": self.config.model, "name": name, "rounds": self.server.rounds}
        if self._still:
            about["trained"] = list(self.problem.layout.names)
        folder.write_tensors(file, self.problem.named(*model), about)

    def _close(self, verdict: Verdict) -> None:
        self._statistics = self._keeping.statistics(len(self.partition.clients))
        if not self.folder:
            return
        if self._statistics:
            named = {str(number): statistics for number, statistics in self._statistics.items()}
            self.folder.write_tensors(STATISTICS_FILE, named, {"rounds": self.server.rounds})
        for name, model in self.models().items():
            self._write(self.folder, model_file(name), name, model)
        self.folder.write_status(verdict.status, rounds=self.server.rounds, reason=verdict.reason)

    # --- small things ------------------------------------------------------------------------------------------------------------

    def _whole(self, model: ModelState) -> Tensor:
        return torch.cat([model.weights, model.buffers])

    def _tell(self, event: str) -> None:
        for callback in self.callbacks:
            getattr(callback, event)(self)


def _finite(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None


def _memory() -> int:
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
