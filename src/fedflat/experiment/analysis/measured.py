"""Models of runs as objectives to measure: which model, and its loss on which data.

A model is named by a text: ``RUN`` is the model that stands for the run in a folder, ``RUN:wima`` one of its models by name,
``RUN:server@50`` that model as it was kept after round 50.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedflat.data import Examples, Partition
from fedflat.engines.problem.problem import Problem
from fedflat.engines.problem.task import PooledTask
from fedflat.engines.round.contract import ModelState
from fedflat.errors import UserError, one_of
from fedflat.experiment.analysis.batchnorm import with_statistics
from fedflat.experiment.analysis.reopen import primary_model, reopen, require_model, state_of
from fedflat.experiment.config import Config
from fedflat.experiment.store.record import Record, client_statistics, load_record
from fedflat.flatness import Objective, Sharpness, Spectrum, sharpness_of, spectrum_of
from fedflat.flatness.batches import TensorBatches

NUMBERS = {"cpu": 300_000, "cuda": 1_500_000}
"""Input numbers in memory at a time, 100 or 500 images of CIFAR: second derivatives need several times the memory of a step of training."""
LARGEST_BATCH = 1000


@dataclass(frozen=True)
class Reference:
    """A model of a run, as a text names it."""

    run: Path
    model: str | None = None
    rounds: int | None = None

    def __str__(self) -> str:
        return (
            f"{self.run}{f':{self.model}' if self.model else ''}{f'@{self.rounds}' if self.rounds is not None else ''}"
        )


def reference(text: str) -> Reference:
    """The model that a text names.

    >>> reference("runs/a:wima(window=50)@20")
    Reference(run=PosixPath('runs/a'), model='wima(window=50)', rounds=20)
    """
    if Path(text).is_dir():  # a folder may have any name
        return Reference(Path(text))
    found = re.fullmatch(r"(?P<run>.+?)(:(?P<model>[A-Za-z][^/\\:@]*))?(@(?P<rounds>\d+))?", text, re.DOTALL)
    assert found is not None  # whatever it is, a folder may be called so
    return Reference(Path(found["run"]), found["model"], None if found["rounds"] is None else int(found["rounds"]))


@dataclass(eq=False)
class Measured:
    """A model of a run, with the problem it was trained for and the data of its clients."""

    record: Record
    name: str
    rounds: int | None
    """After which round it was kept; none for the model at the end."""
    problem: Problem = field(repr=False)
    partition: Partition = field(repr=False)
    state: ModelState = field(repr=False)
    tf32: bool = False
    """Whether products on a GPU may be rounded."""

    @property
    def label(self) -> str:
        """The model as a text that ``measured`` reads again, in a run without a folder without it."""
        where = str(self.record.folder.path) if self.record.folder else self.record.config.algorithm
        return f"{where}:{self.name}{f'@{self.rounds}' if self.rounds is not None else ''}"

    @cached_property
    def training_positions(self) -> np.ndarray:
        """The training examples that clients have, in order; one that several clients have counts as often."""
        return np.sort(np.concatenate([np.asarray(indices) for indices in self.partition.described_clients]))

    def objective(
        self, on: str = "train", *, client: int | None = None, batch: int | None = None, state: ModelState | None = None
    ) -> Objective:
        """The loss on the training set (what all clients have), on the test set, or on what one client has, of this or another model."""
        if client is not None:
            if not 0 <= client < len(self.partition.clients):
                raise UserError(
                    f"there is no client {client}; this run has {len(self.partition.clients)}, counted from 0"
                )
            if on != "train":
                raise UserError(f"clients have training data alone, so that on={on} and a client do not go together")
            own = state or self._of_client(client)
            return self.on_examples(self.problem.data.train, np.asarray(self.partition.clients[client]), batch, own)
        if on == "train":
            return self.on_examples(self.problem.data.train, self.training_positions, batch, state)
        if on == "test":
            return self.on_examples(self.problem.data.test, None, batch, state)
        raise one_of("data to measure on", on, ("train", "test"))

    def on_examples(
        self,
        examples: Examples,
        positions: np.ndarray | None = None,
        batch: int | None = None,
        state: ModelState | None = None,
    ) -> Objective:
        """The loss on any examples that the model can take."""
        problem, state = self.problem, state or self._still
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
    def _still(self) -> ModelState:
        """The model with statistics that do not depend on a batch."""
        return with_statistics(self.problem, self.state, self.training_positions)

    def _of_client(self, client: int) -> ModelState:
        """The model with the statistics that a client has kept, at the end of the run, where clients keep them."""
        kept = client_statistics(self.record) if self.problem.batch_statistics and self.rounds is None else {}
        return self.state._replace(buffers=kept[client].to(self.state.buffers)) if client in kept else self._still

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
        """The loss on the data, or on each of several random subsets of ``examples`` of them, drawn by the seed, the next one and so on."""
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
        """The curvature: the largest eigenvalues (50 unless said), the smallest one, and the trace; ``options`` are ``spectrum_of``'s."""
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
        """How much the loss rises within a radius (``rho=0.05`` unless said); ``options`` are ``sharpness_of``'s."""
        (objective,) = self.objectives(on, client=client, examples=examples, seed=seed, batch=batch)
        return sharpness_of(objective, kind, seed=seed, **options)

    def sibling(self, name: str | None = None, rounds: int | None = None) -> Measured:
        """Another model of the same run, on the same problem and partition."""
        name = require_model(self.record, name or self.name)
        return replace(self, name=name, rounds=rounds, state=state_of(self.record, name, self.problem, rounds))


def measured(
    model: str | Path | Reference | Record,
    *,
    name: str | None = None,
    rounds: int | None = None,
    device: str | None = None,
    precision: str | None = None,
    **own: Any,
) -> Measured:
    """A model of a run, ready to be measured: by a text, or by a record, its model's name and the round it was kept after.

    Measuring is in float32 unless the run was in float64, whatever the run trained in; ``own`` are ``data``, ``network`` and ``task`` where
    those were the user's.
    """
    if isinstance(model, Record):
        record = model
    else:
        found = model if isinstance(model, Reference) else reference(str(model))
        record, name, rounds = load_record(found.run), name or found.model, found.rounds if rounds is None else rounds
    if not record.models and not record.evaluated:
        where = record.folder.path if record.folder else "this run"
        raise UserError(f"{where} has no models to measure yet: it has evaluated none; go on with it (fedflat resume)")
    name = require_model(record, name or primary_model(record))
    config = _config(record.config, device, precision)
    problem, partition = reopen(record, config=config, call="flatness", **own)
    state = state_of(record, name, problem, rounds)
    return Measured(record, name, rounds, problem, partition, state, config.engine.precision == "tf32")


def _batch(problem: Problem) -> int:
    return max(1, min(LARGEST_BATCH, NUMBERS[problem.device.type] // math.prod(problem.data.input_shape)))


def _config(config: Config, device: str | None, precision: str | None) -> Config:
    wanted = precision or ("float64" if config.engine.precision == "float64" else "float32")
    if wanted not in ("float32", "tf32", "float64"):
        raise one_of("precision to measure in", wanted, ("float32", "tf32", "float64"))
    if device is not None and device not in ("auto", "cpu", "cuda"):
        raise one_of("device", device, ("auto", "cpu", "cuda"))
    # The run's own device may not be here.
    engine = config.engine.model_copy(update={"device": device or "auto", "precision": wanted})
    return config.model_copy(update={"engine": engine})
