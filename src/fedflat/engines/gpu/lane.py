"""One lane: a client at a time on a stream of its own, its local steps captured as CUDA graphs and replayed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fedflat.algorithms.algorithm import LocalState, Message, States, flat_state, nested_state
from fedflat.engines.gpu.step import Advance, changing
from fedflat.engines.problem.problem import Problem
from fedflat.engines.round.client import whole_gradient
from fedflat.engines.round.cohort_buffers import Table
from fedflat.engines.round.contract import Client, Training
from fedflat.engines.round.randomness import generator
from fedflat.engines.round.reduction import Report

WARM_UPS = 2
SELDOM = 8
"""Uses of a batch that is not full before its step is captured: capturing takes as long as some tens of steps."""
TIMES_THE_LONGEST = 2
"""A lane has room for so many times the steps of its longest client so far."""
ROOM = 2**27
"""Bytes besides those of a trial that capturing may take: libraries keep some memory for each stream."""


class Work:
    """A client's batches and draws of one round, in tensors of a fixed shape, and how many examples each batch has."""

    def __init__(self, problem: Problem, training: Training, round: int, client: int, indices: np.ndarray) -> None:
        batches = training.plan.batches(training.seed, round, client, len(indices))
        self.sizes = [len(batch) for batch in batches]
        padded = np.zeros((len(batches), training.plan.batch), np.int64)
        padded[np.arange(training.plan.batch) < np.array(self.sizes)[:, None]] = indices[np.concatenate(batches)]
        rng = generator(training.seed, "augment", round, client)
        draws = problem.augmentation.draw(rng, len(batches), training.plan.batch, problem.data.input_shape)
        self.tensors = {"indices": torch.from_numpy(padded), **draws}
        if problem.device.type == "cuda":
            self.tensors = {name: tensor.pin_memory() for name, tensor in self.tensors.items()}


class DoesNotFit(Exception):
    """A lane needs more memory than is free on the device; how much is not known where it got some of it and no more."""

    def __init__(self, needed: int | None, free: int) -> None:
        self.needed, self.free = needed, free


def memory_needed(work: Callable[[], None]) -> int:
    """The bytes that some work takes on the GPU besides what is there already; afterwards they are free again."""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    try:
        work()
        torch.cuda.synchronize()
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        raise DoesNotFit(None, torch.cuda.mem_get_info()[0]) from None
    needed = torch.cuda.max_memory_allocated() - before
    torch.cuda.empty_cache()
    return needed


@contextmanager
def convolutions_searched(thoroughly: bool) -> Iterator[None]:
    """Let the GPU's library try out ways to convolve for a shape it has not seen, or not: that pays for shapes that are used often."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = before and thoroughly
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


class Lane:
    """One client at a time, in tensors that stay where they are; beginning, stepping and finishing are captured once each."""

    def __init__(self, problem: Problem, training: Training, table: Table, advance: Advance) -> None:
        self.problem, self.training, self.table, self.advance = problem, training, table, advance
        z = table.z
        self.stream = torch.cuda.Stream() if z.is_cuda else None  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle() if z.is_cuda else None
        self._graphs: dict[int, Callable[[], None]] = {}
        self._uses: Counter[int] = Counter()
        self._begin: Callable[[], None] | None = None
        self._finish: Callable[[], None] | None = None
        self.client = {name: torch.zeros_like(rows[0]) for name, rows in table.client.items()}
        self.round, self.steps, self.loss = (z.new_zeros(()) for _ in range(3))
        self.own_gradient = torch.zeros_like(z) if training.algorithm.drift.whole_gradient == "own" else None
        self.k = torch.zeros(1, dtype=torch.int64, device=z.device)
        self.statistics = torch.zeros_like(table.buffers[0])
        self.integers: dict[str, Tensor] = {}
        self.work: dict[str, Tensor] = {}
        self.local: LocalState | None = None
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
        self._hold(work)
        for name, rows in table.client.items():
            self.client[name].copy_(rows[row])
        if self.own_gradient is not None:
            own, passes, samples = whole_gradient(
                self.problem, training, table, round, client.number, client.indices, row
            )
            self._before = (passes, samples)
            self.own_gradient.copy_(own)
        self._hold_buffers(row, integers)
        self.round.fill_(round)
        self.steps.fill_(len(work.sizes))
        self._begin = self._begin or self._captured(self._begin_client)
        self._begin()
        self._uses.update(work.sizes)
        for size in sorted(self._worth_capturing() - set(self._graphs)):
            self._graphs[size] = self._captured(partial(self._step, size))
            self._begin()  # trying the step out has moved the client
            self._hold_buffers(row, integers)

    @property
    def steps_to_go(self) -> int:
        """How many steps the client that was loaded has."""
        return len(self._sizes)

    def step(self, k: int) -> None:
        """Queue the client's step k, where it has one."""
        if k >= len(self._sizes):
            return
        size = self._sizes[k]
        if size in self._graphs:
            self._graphs[size]()
        else:
            self._step(size)

    def _worth_capturing(self) -> set[int]:
        full = self.training.plan.batch
        return {size for size, uses in self._uses.items() if size == full or uses > SELDOM}

    def unload(self) -> Report:
        """Write what the client keeps and sends to its row, after its last step."""
        table, row = self.table, self._row
        with suppress(DoesNotFit):  # then as it is: it takes less than capturing it
            self._finish = self._finish or self._captured(self._finish_client)
        (self._finish or self._finish_client)()
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
        integers = {name: value.clone() for name, value in self.integers.items()}
        return Report(message.lr_sum.clone(), self.loss.clone(), steps, passes, samples, integers)

    def _hold(self, work: Work) -> None:
        """Put a client's batches where the captured step reads them.

        Clients with more steps need new room, and new graphs; there is always some to spare, so that this is seldom.
        """
        steps = len(work.sizes)
        if not self.work or len(self.work["indices"]) < steps:
            self._graphs = {}
            room = TIMES_THE_LONGEST * steps
            self.work = {
                n: torch.zeros((room, *t.shape[1:]), dtype=t.dtype, device=self.k.device)
                for n, t in work.tensors.items()
            }
        for name, tensor in work.tensors.items():
            self.work[name][:steps].copy_(tensor, non_blocking=True)

    def _hold_buffers(self, row: int, integers: dict[str, Tensor]) -> None:
        self.statistics.copy_(self.table.buffers[row])
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
        with convolutions_searched(size == self.training.plan.batch):
            moved = self.advance(self.local, positions, now, self.statistics, self.integers)
        pairs = [*zip(moved.client, changing(self.local), strict=True), (moved.statistics, self.statistics)]
        pairs += [(new, self.integers[name]) for name, new in moved.integers.items()]
        for new, old in apart([(new, old) for new, old in pairs if new is not old]):
            old.copy_(new)
        self.loss.add_(moved.loss)
        self.k.add_(1)
        self.passes = moved.passes

    def _finish_client(self) -> None:
        assert self.local is not None
        self.finished = self.training.algorithm.finish(self.local)

    def _try_out(self, work: Callable[[], None]) -> None:
        for _ in range(WARM_UPS):
            work()
            self.k.zero_()

    def _captured(self, work: Callable[[], None]) -> Callable[[], None]:
        """Some work on this lane's tensors as something to replay; on a CPU, the work itself."""
        self.problem.training_mode()
        if self.stream is None:
            return work
        torch.cuda.synchronize()
        needed = memory_needed(lambda: self._try_out(work)) + ROOM
        free = torch.cuda.mem_get_info()[0]
        if needed > free:
            raise DoesNotFit(needed, free)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self.stream, capture_error_mode="thread_local"):
            work()
        torch.cuda.synchronize()
        replay: Callable[[], None] = graph.replay
        return replay


def apart(pairs: list[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """New and old tensors, the new ones not in memory of an old one: a step may keep what was the iterate before it."""
    written = {old.untyped_storage().data_ptr() for _, old in pairs}
    return [(new.clone() if new.untyped_storage().data_ptr() in written else new, old) for new, old in pairs]


def _settled(local: LocalState) -> LocalState:
    """A client in tensors of its own for all that is made anew in every round; the rest, which a lane or table holds, as it is.

    What drift and perturbation see as the same tensor under the same name, the iterate above all, is one tensor in the copy too.
    """
    copies: dict[Any, Tensor] = {}
    made_anew = ("y", "local", "drift", "step", "rates", "first_lr", "final_lr")

    def settle(path: Any, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or (len(path) > 1 and path[1].name not in made_anew):
            return leaf
        # LocalContext.drift is what LocalContext.local is for the drift itself.
        inside = tuple(path[2:]) if path[1:] and path[1].name in ("local", "drift") else tuple(path[1:])
        return copies.setdefault((inside, id(leaf)), leaf.clone())

    settled: LocalState = pytree.tree_map_with_path(settle, local)
    return settled


def _copy(source: LocalState, target: LocalState) -> None:
    """Copy what differs from one client's tensors to another's, each tensor once."""
    done = set()
    for new, old in zip(pytree.tree_leaves(source), pytree.tree_leaves(target), strict=True):
        if isinstance(new, Tensor) and new is not old and id(old) not in done:
            old.copy_(new)
            done.add(id(old))
