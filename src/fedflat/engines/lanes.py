"""The GPU engine: clients side by side in lanes, each a stream that replays a captured local step.

A lane holds one client at a time in tensors that never move: its iterate, its state, its batches. One local step, from gathering the
batch to the update, is captured once as a CUDA graph and then replayed K times without the host in between; lanes run at the same
time, and their clients may have different numbers of steps. On a CPU the same code runs without graphs, which tests use.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fedflat.algorithms.algorithm import Local, States, flat_state, nested_state
from fedflat.engines.aggregation import by_samples, weighted_sum
from fedflat.engines.client import StepGradient, whole_gradient
from fedflat.engines.contract import Client, ModelState, Outcome, Training
from fedflat.engines.problem import Problem
from fedflat.engines.randomness import generator
from fedflat.engines.reduction import Report, reduce_rows
from fedflat.engines.table import Table

MOST_LANES = 16
"""More streams than this bring nothing: the GPU is full."""
WARM_UPS = 2


class Work:
    """A client's batches and draws of one round, in tensors of a fixed shape, and how many examples each batch has."""

    def __init__(self, problem: Problem, training: Training, round: int, client: int, indices: np.ndarray) -> None:
        batches = training.plan.batches(training.seed, round, client, len(indices))
        self.sizes = [len(batch) for batch in batches]
        padded = np.zeros((len(batches), training.plan.batch), np.int64)
        for row, batch in zip(padded, batches, strict=True):
            row[: len(batch)] = indices[batch]
        rng = generator(training.seed, "augment", round, client)
        draws = problem.augmentation.draw(rng, len(batches), training.plan.batch, problem.data.input_shape)
        self.tensors = {"indices": torch.from_numpy(padded), **draws}
        if problem.device.type == "cuda":
            self.tensors = {name: tensor.pin_memory() for name, tensor in self.tensors.items()}


Advance = Callable[[Local, Tensor, dict[str, Tensor], Tensor, dict[str, Tensor]], tuple[list[Tensor], Tensor, Tensor, int]]
"""One local step: (client, positions, draws, statistics, integers) to (what changed of the client, statistics, loss, passes)."""


def in_place(problem: Problem, training: Training) -> Advance:
    """The step as it is; BatchNorm statistics move in place."""

    def advance(
        local: Local, positions: Tensor, draws: dict[str, Tensor], statistics: Tensor, integers: dict[str, Tensor]
    ) -> tuple[list[Tensor], Tensor, Tensor, int]:
        gradient = StepGradient(problem, problem.batch(positions, draws), {**problem.buffers.views(statistics), **integers})
        moved = training.algorithm.step(local, gradient, training.schedule, training.descent)
        return _changing(moved), statistics, gradient.loss, gradient.passes

    return advance


def compiled(problem: Problem, training: Training, backend: str = "inductor") -> Advance:
    """The step as a pure function, compiled whole: fewer and larger kernels, for some tens of seconds at the start."""

    def advance(
        local: Local, positions: Tensor, draws: dict[str, Tensor], statistics: Tensor, integers: dict[str, Tensor]
    ) -> tuple[list[Tensor], Tensor, Tensor, int]:
        batch = problem.batch(positions, draws)
        seen: list[tuple[Tensor, Tensor]] = []

        def gradient(point: Tensor) -> Tensor:
            loss, value, moved = problem.functional_gradient(point, statistics, integers, batch)
            seen.append((loss, moved))
            return value

        moved = training.algorithm.step(local, gradient, training.schedule, training.descent)
        return _changing(moved), seen[0][1], seen[0][0], len(seen)

    torch.compiler.reset()  # what was compiled for another run is of no use, and counts against torch's limit
    return torch.compile(advance, dynamic=False, fullgraph=True, backend=backend)


class Lane:
    """One client at a time, in tensors that stay where they are."""

    def __init__(self, problem: Problem, training: Training, table: Table, advance: Advance) -> None:
        self.problem, self.training, self.table, self._advance = problem, training, table, advance
        cuda = problem.device.type == "cuda"
        self.stream = torch.cuda.Stream() if cuda else None  # type: ignore[no-untyped-call]
        self._graphs: dict[int, Any] = {}
        self._pool = torch.cuda.graph_pool_handle() if cuda else None
        self.local: Local | None = None
        self.work: dict[str, Tensor] = {}
        self.k = torch.zeros(1, dtype=torch.int64, device=problem.device)
        self.loss = torch.zeros((), dtype=problem.dtype, device=problem.device)
        self.statistics = torch.zeros_like(table.buffers[0])
        self.integers: dict[str, Tensor] = {}
        self.passes = 0

    def on_stream(self) -> AbstractContextManager[Any]:
        """Everything inside happens on this lane's stream."""
        return torch.cuda.stream(self.stream) if self.stream is not None else nullcontext()

    def train(self, round: int, row: int, client: Client, work: Work, integers: dict[str, Tensor]) -> Report:
        """Queue a client's whole round; nothing here waits for the GPU."""
        training, table, problem = self.training, self.table, self.problem
        steps = len(work.sizes)
        self._hold(work, integers)
        own, passes, samples = None, 0, 0
        if training.algorithm.drift.whole_gradient == "own":
            own, passes, samples = whole_gradient(problem, training, table, round, client.number, client.indices, row)
        fresh = training.algorithm.begin(
            table.z,
            nested_state(table.server),
            nested_state({name: rows[row] for name, rows in table.client.items()}),
            problem.layout,
            training.schedule,
            torch.tensor(round, dtype=table.z.dtype, device=problem.device),
            torch.tensor(steps, dtype=table.z.dtype, device=problem.device),
            training.descent,
            own_gradient=own,
            common_gradient=table.common_gradient if training.algorithm.drift.whole_gradient == "common" else None,
        )
        shared = {id(tensor) for tensor in (table.z, table.common_gradient, *table.server.values())}
        for size in sorted(set(work.sizes)):
            if self.local is None:
                self.local = _settled(fresh, shared)
            if size not in self._graphs:
                self._graphs[size] = self._captured(size)
        assert self.local is not None
        _copy(fresh, self.local)
        self.statistics.copy_(table.buffers[row])
        self.k.zero_()
        self.loss.zero_()
        for size in work.sizes:
            self._graphs[size]()
        kept, message = training.algorithm.finish(self.local)
        table.displacement[row].copy_(message.displacement)
        table.buffers[row].copy_(self.statistics)
        for name, value in flat_state(kept).items():
            table.client[name][row].copy_(value)
        for name, value in flat_state(message.sent).items():
            table.sent[name][row].copy_(value)
        passes += self.passes * steps
        samples += self.passes * sum(work.sizes)
        return Report(message.rates.clone(), self.loss.clone(), steps, passes, samples, dict(self.integers))

    def _hold(self, work: Work, integers: dict[str, Tensor]) -> None:
        """Put a client's batches where the captured step reads them; longer rounds need new room, and new graphs."""
        steps = len(work.sizes)
        if not self.work or len(self.work["indices"]) < steps:
            self._graphs = {}
            self.work = {n: torch.zeros((steps, *t.shape[1:]), dtype=t.dtype, device=self.problem.device) for n, t in work.tensors.items()}
        for name, tensor in work.tensors.items():
            self.work[name][:steps].copy_(tensor, non_blocking=True)
        if not self.integers:
            self.integers = {name: value.clone() for name, value in integers.items()}
        for name, value in integers.items():
            self.integers[name].copy_(value)

    def _step(self, size: int) -> None:
        assert self.local is not None
        now = {name: tensor.index_select(0, self.k)[0] for name, tensor in self.work.items()}
        positions = now.pop("indices")[:size]
        moved, statistics, loss, self.passes = self._advance(self.local, positions, now, self.statistics, self.integers)
        for new, old in zip(moved, _changing(self.local), strict=True):
            if new is not old:
                old.copy_(new)
        if statistics is not self.statistics:
            self.statistics.copy_(statistics)
        self.loss.add_(loss)
        self.k.add_(1)

    def _captured(self, size: int) -> Callable[[], None]:
        """One step on batches of a given size, as something to replay."""
        self.problem.model.train()
        if self.stream is None:
            return lambda: self._step(size)
        torch.cuda.synchronize()
        for _ in range(WARM_UPS):
            self.k.zero_()
            self._step(size)
        self.k.zero_()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self.stream, capture_error_mode="thread_local"):
            self._step(size)
        torch.cuda.synchronize()
        replay: Callable[[], None] = graph.replay
        return replay


class LaneEngine:
    """Trains the clients of a cohort at the same time on one device."""

    def __init__(self, problem: Problem, lanes: int = MOST_LANES, step: Callable[[Problem, Training], Advance] = in_place) -> None:
        self.problem, self.most, self.step = problem, lanes, step
        self.table: Table | None = None
        self.lanes: list[Lane] = []
        self._prepared: dict[tuple[int, int], Work] = {}

    def train(self, training: Training, round: int, model: ModelState, server: States, cohort: list[Client]) -> Outcome:
        """Queue a cohort's round on the lanes and reduce what it sends; nothing waits for the device."""
        table = self._room(training, len(cohort), model.weights)
        z = table.fill(training.algorithm, model, server, cohort)
        extra = self._common_gradient(training, round, table, cohort)
        reports = []
        self._join(to_lanes=True)
        for row, client in enumerate(cohort):
            lane = self.lanes[row % len(self.lanes)]
            work = self._prepared.pop((round, client.number), None)
            with lane.on_stream():
                work = work or Work(self.problem, training, round, client.number, client.indices)
                reports.append(lane.train(round, row, client, work, model.integers))
        self._join(to_lanes=False)
        outcome = reduce_rows(training, round, model, z, table, cohort, reports)
        outcome.cost.backward_passes += extra[0]
        outcome.cost.samples += extra[1]
        return outcome

    def prepare(self, training: Training, round: int, cohort: list[tuple[int, np.ndarray]]) -> None:
        """Draw a coming round's batches while the device is busy with this one."""
        self._prepared = {(round, number): Work(self.problem, training, round, number, indices) for number, indices in cohort}

    def evaluate(self, models: dict[str, ModelState], examples: dict[str, Any]) -> dict[str, dict[str, dict[str, float]]]:
        """Every metric of every model on every set of examples."""
        problem = self.problem
        results: dict[str, dict[str, dict[str, float]]] = {}
        for name, model in models.items():
            buffers = {**problem.buffers.views(model.buffers), **model.integers}
            results[name] = {}
            for part, some in examples.items():
                totals: dict[str, Tensor] = {}
                for positions in problem.evaluation_batches(len(some)):
                    for metric, value in problem.sum_tensors(model.weights, buffers, some.take(positions)).items():
                        totals[metric] = totals[metric] + value if metric in totals else value.double()
                results[name][part] = {metric: float(value) / len(some) for metric, value in totals.items()}
        return results

    def _room(self, training: Training, rows: int, like: Tensor) -> Table:
        if self.table is None or self.table.rows < rows or self.lanes[0].training is not training:
            problem = self.problem
            self.table = Table.new(training.algorithm, problem.layout.size, problem.buffers.size, rows, like, False)
            advance = self.step(problem, training)
            self.lanes = [Lane(problem, training, self.table, advance) for _ in range(min(rows, self.most))]
        return self.table

    def _common_gradient(self, training: Training, round: int, table: Table, cohort: list[Client]) -> tuple[int, int]:
        if training.algorithm.drift.whole_gradient != "common":
            return 0, 0
        passes = samples = 0
        for row, client in enumerate(cohort):
            gradient, some, seen = whole_gradient(self.problem, training, table, round, client.number, client.indices, row)
            table.gradient[row].copy_(gradient)
            passes, samples = passes + some, samples + seen
        table.common_gradient.copy_(weighted_sum(table.gradient[: len(cohort)], by_samples([len(c.indices) for c in cohort])))
        return passes, samples

    def _join(self, to_lanes: bool) -> None:
        """Make the lanes wait for what was queued before them, or the main stream for the lanes."""
        for lane in self.lanes:
            if lane.stream is not None:
                main = torch.cuda.current_stream()
                lane.stream.wait_stream(main) if to_lanes else main.wait_stream(lane.stream)


def _settled(local: Local, shared: set[int]) -> Local:
    """A copy of a client in tensors of its own, except for what the whole cohort shares.

    What drift and perturbation see as the same tensor under the same name, the iterate above all, is one tensor in the copy too.
    """
    copies: dict[Any, Tensor] = {}

    def settle(path: Any, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or id(leaf) in shared:
            return leaf
        return copies.setdefault((path[1:], id(leaf)), leaf.clone())

    settled: Local = pytree.tree_map_with_path(settle, local)
    return settled


def _changing(local: Local) -> list[Tensor]:
    """What a step changes of a client; drift and perturbation share the iterate and the counters."""
    velocity = [] if local.velocity is None else [local.velocity]
    at = local.drift
    return [at.y, at.step, at.rates, *at.local.values(), *local.perturbation.local.values(), *velocity]


def _copy(source: Local, target: Local) -> None:
    """Copy what differs from one client's tensors to another's, each tensor once."""
    done = set()
    for new, old in zip(pytree.tree_leaves(source), pytree.tree_leaves(target), strict=True):
        if isinstance(new, Tensor) and new is not old and id(old) not in done:
            old.copy_(new)
            done.add(id(old))
