"""The GPU engine: clients side by side in lanes, each a stream that replays a captured local step.

A lane holds one client at a time in tensors that never move: its iterate, its state, its batches. One local step, from gathering the
batch to the update, is captured once as a CUDA graph and then replayed K times without the host in between; lanes run at the same
time, and their clients may have different numbers of steps. On a CPU the same code runs without graphs, which tests use.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fedflat.algorithms.algorithm import Local, Message, States, flat_state, nested_state
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


def compiled(problem: Problem, training: Training, backend: str = "inductor", strict: bool = False) -> Advance:
    """The step as a pure function, compiled whole: fewer and larger kernels, for some tens of seconds at the start.

    Where the compiler fails, which it does on a few models, the step runs as it is, unless ``strict``.
    """

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
    fast: Advance = torch.compile(advance, dynamic=False, fullgraph=True, backend=backend)
    plain = in_place(problem, training)
    failed = False

    def attempt(*client: Any) -> tuple[list[Tensor], Tensor, Tensor, int]:
        nonlocal failed
        if not failed:
            try:
                return fast(*client)
            except Exception as error:  # compilers fail in many ways; a mistake of the user's own comes back from the plain step
                failed = True
                warnings.warn(f"the step could not be compiled and runs as it is ({type(error).__name__})", stacklevel=2)
        return plain(*client)

    return fast if strict else attempt


class Lane:
    """One client at a time, in tensors that stay where they are; beginning, stepping and finishing are captured once each."""

    def __init__(self, problem: Problem, training: Training, table: Table, advance: Advance) -> None:
        self.problem, self.training, self.table, self._advance = problem, training, table, advance
        z = table.z
        self.stream = torch.cuda.Stream() if z.is_cuda else None  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle() if z.is_cuda else None
        self._graphs: dict[int, Callable[[], None]] = {}
        self._begin: Callable[[], None] | None = None
        self._finish: Callable[[], None] | None = None
        self.client = {name: torch.zeros_like(rows[0]) for name, rows in table.client.items()}
        self.round, self.steps, self.loss = (z.new_zeros(()) for _ in range(3))
        self.own_gradient = torch.zeros_like(z) if training.algorithm.drift.whole_gradient == "own" else None
        self.k = torch.zeros(1, dtype=torch.int64, device=z.device)
        self.statistics = torch.zeros_like(table.buffers[0])
        self.integers: dict[str, Tensor] = {}
        self.work: dict[str, Tensor] = {}
        self.local: Local | None = None
        self.finished: tuple[States, Message] | None = None
        self.passes = 0
        self._row, self._sizes, self._before = 0, [0], (0, 0)

    def on_stream(self) -> AbstractContextManager[Any]:
        """Everything inside happens on this lane's stream."""
        return torch.cuda.stream(self.stream) if self.stream is not None else nullcontext()

    def load(self, round: int, row: int, client: Client, work: Work, integers: dict[str, Tensor]) -> None:
        """Bring a client to its first step; nothing here waits for the device."""
        training, table = self.training, self.table
        self._row, self._sizes, self._before = row, work.sizes, (0, 0)
        self._hold(work, integers)
        for name, rows in table.client.items():
            self.client[name].copy_(rows[row])
        if self.own_gradient is not None:
            own, passes, samples = whole_gradient(self.problem, training, table, round, client.number, client.indices, row)
            self._before = (passes, samples)
            self.own_gradient.copy_(own)
        self.statistics.copy_(table.buffers[row])
        self.round.fill_(round)
        self.steps.fill_(len(work.sizes))
        self._begin = self._begin or self._captured(self._begin_client)
        self._begin()
        for size in sorted(set(work.sizes) - set(self._graphs)):
            self._graphs[size] = self._captured(partial(self._step, size))
            self._begin()  # trying the step out has moved the client
            self.statistics.copy_(table.buffers[row])

    def step(self, k: int) -> None:
        """Queue the client's step k, where it has one."""
        if k < len(self._sizes):
            self._graphs[self._sizes[k]]()

    def unload(self) -> Report:
        """Write what the client keeps and sends to its row, after its last step."""
        table, row = self.table, self._row
        self._finish = self._finish or self._captured(self._finish_client)
        self._finish()
        assert self.finished is not None
        kept, message = self.finished
        table.displacement[row].copy_(message.displacement)
        table.buffers[row].copy_(self.statistics)
        for name, value in flat_state(kept).items():
            table.client[name][row].copy_(value)
        for name, value in flat_state(message.sent).items():
            table.sent[name][row].copy_(value)
        steps, (passes, samples) = len(self._sizes), self._before
        passes, samples = passes + self.passes * steps, samples + self.passes * sum(self._sizes)
        return Report(message.rates.clone(), self.loss.clone(), steps, passes, samples, dict(self.integers))

    def _hold(self, work: Work, integers: dict[str, Tensor]) -> None:
        """Put a client's batches where the captured step reads them; longer rounds need new room, and new graphs."""
        steps = len(work.sizes)
        if not self.work or len(self.work["indices"]) < steps:
            self._graphs = {}
            self.work = {n: torch.zeros((steps, *t.shape[1:]), dtype=t.dtype, device=self.k.device) for n, t in work.tensors.items()}
        for name, tensor in work.tensors.items():
            self.work[name][:steps].copy_(tensor, non_blocking=True)
        if not self.integers:
            self.integers = {name: value.clone() for name, value in integers.items()}
        for name, value in integers.items():
            self.integers[name].copy_(value)

    def _begin_client(self) -> None:
        training, table = self.training, self.table
        common = table.common_gradient if training.algorithm.drift.whole_gradient == "common" else None
        fresh = training.algorithm.begin(
            table.z,
            nested_state(table.server),
            nested_state(self.client),
            self.problem.layout,
            training.schedule,
            self.round,
            self.steps,
            training.descent,
            own_gradient=self.own_gradient,
            common_gradient=common,
        )
        if self.local is None:
            self.local = _settled(fresh)
        _copy(fresh, self.local)
        self.k.zero_()
        self.loss.zero_()

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

    def _finish_client(self) -> None:
        assert self.local is not None
        self.finished = self.training.algorithm.finish(self.local)

    def _captured(self, work: Callable[[], None]) -> Callable[[], None]:
        """Some work on this lane's tensors as something to replay; on a CPU, the work itself."""
        self.problem.training_mode()
        if self.stream is None:
            return work
        torch.cuda.synchronize()
        for _ in range(WARM_UPS):
            work()
            self.k.zero_()
        torch.cuda.synchronize()
        if torch.cuda.memory_reserved() > torch.cuda.get_device_properties(self.k.device).total_memory // 2:
            torch.cuda.empty_cache()  # a graph has memory of its own, so what trying out has left would be held twice
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self.stream, capture_error_mode="thread_local"):
            work()
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
        self._join(to_lanes=True)
        self.problem.training_mode()  # an evaluation may have come between
        reports: list[Report] = []
        for first in range(0, len(cohort), len(self.lanes)):
            reports += self._side_by_side(training, round, list(enumerate(cohort))[first : first + len(self.lanes)], model.integers)
        self._join(to_lanes=False)
        outcome = reduce_rows(training, round, model, z, table, cohort, reports)
        outcome.cost.backward_passes += extra[0]
        outcome.cost.samples += extra[1]
        return outcome

    def _side_by_side(self, training: Training, round: int, clients: list[tuple[int, Client]], integers: dict[str, Tensor]) -> list[Report]:
        works = [self._work(training, round, client) for _, client in clients]
        lanes = self.lanes[: len(clients)]
        for lane, (row, client), work in zip(lanes, clients, works, strict=True):
            with lane.on_stream():
                lane.load(round, row, client, work, integers)
        for k in range(max(len(work.sizes) for work in works)):
            for lane in lanes:
                with lane.on_stream():
                    lane.step(k)
        reports = []
        for lane in lanes:
            with lane.on_stream():
                reports.append(lane.unload())
        return reports

    def _work(self, training: Training, round: int, client: Client) -> Work:
        prepared = self._prepared.pop((round, client.number), None)
        return prepared or Work(self.problem, training, round, client.number, client.indices)

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


def _settled(local: Local) -> Local:
    """A client in tensors of its own for all that is made anew in every round; the rest, which a lane or table holds, as it is.

    What drift and perturbation see as the same tensor under the same name, the iterate above all, is one tensor in the copy too.
    """
    copies: dict[Any, Tensor] = {}
    made_anew = ("y", "local", "drift", "step", "rates", "first_rate", "final_rate")

    def settle(path: Any, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or (len(path) > 1 and path[1].name not in made_anew):
            return leaf
        # At.drift is what At.local is for the drift itself.
        inside = tuple(path[2:]) if path[1:] and path[1].name in ("local", "drift") else tuple(path[1:])
        return copies.setdefault((inside, id(leaf)), leaf.clone())

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
