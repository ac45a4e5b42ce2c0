"""One lane: a CUDA stream that trains one client at a time by replaying captured local steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedflat.algorithms.algorithm import LocalState, Message, States, nested_state
from fedflat.algorithms.slot import Pilot
from fedflat.algorithms.state import State
from fedflat.engines.gpu.static_state import copy_changed, with_static_tensors
from fedflat.engines.gpu.step import LocalStep, changing_tensors
from fedflat.engines.problem.problem import Problem
from fedflat.engines.problem.residuals import add_products
from fedflat.engines.round.client import ClientReport, begin_client, draw_batches
from fedflat.engines.round.client_facts import explain_small_batches, full_gradient, label_scalars, pilot_gradients
from fedflat.engines.round.cohort_buffers import CohortBuffers
from fedflat.engines.round.contract import Client, ClientRound, Cost, Training
from fedflat.errors import UserError, first_line

WARM_UPS = 2
"""Uncaptured calls before a capture, in which libraries allocate memory and select kernels."""
SELDOM = 8
"""The step for a batch size below the full one is captured only after this many uses, since a capture is slow."""
HEADROOM = 2
"""Capacity of a lane in steps, as a multiple of the steps of its longest client so far."""
RESERVE = 2**27
"""Bytes that a graph capture may need in addition to those of a warm-up, because libraries keep memory per stream."""


class ClientBatches:
    """A client's batches of one round and the random numbers that augment them, in tensors of fixed shape on the host.

    Attributes:
        sizes: number of examples in each batch.
        tensors: by name, ``indices`` [steps, batch size], which are int64 positions in the training set, padded with
            zeros, and the random numbers of the augmentation [steps, ...].
    """

    def __init__(self, problem: Problem, training: Training, client_round: ClientRound) -> None:
        """Draw the batches of the client and round ``client_round``."""
        batches, draws = draw_batches(problem, training, client_round)
        self.sizes = [len(batch) for batch in batches]
        padded = np.zeros((len(batches), training.plan.batch_size), np.int64)
        for row, batch in zip(padded, batches, strict=True):
            row[: len(batch)] = batch
        self.tensors = {"indices": torch.from_numpy(padded), **draws}
        if problem.device.type == "cuda":
            self.tensors = {name: tensor.pin_memory() for name, tensor in self.tensors.items()}


class DoesNotFit(Exception):
    """A lane needs more memory than the device has free.

    Args:
        needed: bytes needed; None if unknown because an allocation failed.
        free: bytes free.
    """

    def __init__(self, needed: int | None, free: int) -> None:
        self.needed, self.free = needed, free


def memory_needed(work: Callable[[], None]) -> int:
    """Call ``work``, and return its peak memory: the bytes that it allocated on the GPU on top of what was in use.

    The memory is freed again. Raises ``DoesNotFit`` if there is not enough.
    """
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
def cudnn_benchmark(allowed: bool) -> Iterator[None]:
    """Turn cuDNN's benchmarking of convolutions off in this context unless ``allowed``.

    It pays off only for shapes that are used often.
    """
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = before and allowed
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


@contextmanager
def explain_capture_errors() -> Iterator[None]:
    """Raise a ``UserError`` if a CUDA graph capture fails; the step has worked without one, as a warm-up."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise UserError(
            f"the local step cannot be captured as a CUDA graph ({first_line(error)}); the model must "
            "not copy tensor values to the host (such as .item()), and gradient checkpointing needs "
            "preserve_rng_state=False; change the model, or use engine.name=loop"
        ) from error


class Lane:
    """Trains one client at a time on a CUDA stream of its own, by replaying CUDA graphs.

    The beginning of local training, a local step of each common batch size, and the end of local training are captured
    as graphs. Captured graphs need static tensors, which keep their place in memory: a client is loaded into these
    tensors, and its results are copied out.

    Args:
        problem: model, task and data.
        training: how clients train.
        cohort_buffers: tensors of the cohort, one row per client.
        local_step: one local step (``eager_step`` or ``compiled_step``).
    """

    def __init__(
        self, problem: Problem, training: Training, cohort_buffers: CohortBuffers, local_step: LocalStep
    ) -> None:
        """Allocate the tensors that captured steps read and write; ``local_step`` takes one local step."""
        self.problem, self.training, self.local_step = problem, training, local_step
        self.cohort_buffers, z = cohort_buffers, cohort_buffers.z
        self.stream = torch.cuda.Stream() if z.is_cuda else None  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle() if z.is_cuda else None  # memory that the graphs share
        self._pool_bytes = 0
        # Functions that replay graphs: a local step by batch size, and the beginning and end of local training.
        self._graphs: dict[int, Callable[[], None]] = {}
        self._begin: Callable[[], None] | None = None
        self._finish: Callable[[], None] | None = None
        self._uncaptured: set[int] = set()  # batch sizes whose step does not fit into a graph
        self._uses: Counter[int] = Counter()  # batches seen, by size
        # Static tensors of the loaded client; k is the number of its next step.
        self.client = {name: torch.zeros_like(rows[0]) for name, rows in cohort_buffers.client_states.items()}
        self.round, self.steps, self.loss = (z.new_zeros(()) for _ in range(3))
        needs_pilot = training.algorithm.perturbation.pilot_batches > 0
        self.pilot = Pilot(torch.zeros_like(z), z.new_zeros(())) if needs_pilot else None
        self.own_gradient = torch.zeros_like(z) if training.algorithm.drift.full_gradient == "own" else None
        self.k = torch.zeros(1, dtype=torch.int64, device=z.device)
        self.statistics = torch.zeros_like(cohort_buffers.statistics[0])
        self.integer_buffers: dict[str, Tensor] = {}
        self.batches: dict[str, Tensor] = {}
        self.local: LocalState | None = None
        self.finished: tuple[States, Message] | None = None
        self.passes = 0  # backward passes per step
        # Of the loaded client: its row, the size of each batch, and the cost of gradients before its first step.
        self._row, self._sizes, self._cost_before_steps = 0, [0], Cost()
        self._client_round: ClientRound
        self._label_scalars: State = {}  # of the loaded client, if the client weights need them

    def on_stream(self) -> AbstractContextManager[Any]:
        """A context in which all work is queued on this lane's stream."""
        return torch.cuda.stream(self.stream) if self.stream is not None else nullcontext()

    @property
    def memory(self) -> int:
        """Bytes of GPU memory that the lane keeps: its static tensors, and the memory of its captured graphs."""
        tensors = [self.statistics, *self.client.values(), *self.integer_buffers.values(), *self.batches.values()]
        tensors += [] if self.own_gradient is None else [self.own_gradient]
        tensors += [] if self.pilot is None else [*self.pilot]
        if self.local is not None:
            tensors += changing_tensors(self.local)
            tensors += [] if self.local.drift.received is None else [self.local.drift.z]  # the client's own start
        return self._pool_bytes + sum(tensor.nbytes for tensor in tensors)

    def load(
        self, round: int, row: int, client: Client, batches: ClientBatches, integer_buffers: dict[str, Tensor]
    ) -> None:
        """Load a client into the lane and prepare its first step, without waiting for the device.

        ``Algorithm.begin`` and the local step are captured as CUDA graphs when they are first needed. A capture runs
        the step a few times, so the client's state is loaded again afterwards.

        Args:
            round: number of the round, from 0.
            row: the client's row in ``cohort_buffers``.
            client: the client.
            batches: its batches of this round.
            integer_buffers: integer buffers of the server's model, by name.
        """
        training, cohort_buffers = self.training, self.cohort_buffers
        self._row, self._sizes, self._cost_before_steps = row, batches.sizes, Cost()
        self._client_round = client.in_round(round)
        self._load_batches(batches)
        for name, rows in cohort_buffers.client_states.items():
            self.client[name].copy_(rows[row])
        if self.own_gradient is not None:
            gradient, self._cost_before_steps = full_gradient(
                self.problem, training, cohort_buffers, row, self._client_round
            )
            self.own_gradient.copy_(gradient)
        if self.pilot is not None:
            self._load_pilot(row, self._client_round)
        self._label_scalars = label_scalars(self.problem, training, client.indices)
        self._load_buffers(row, integer_buffers)
        self.round.fill_(round)
        self.steps.fill_(len(batches.sizes))
        self._begin = self._begin or self._captured(self._begin_client)
        self._begin()
        self._uses.update(batches.sizes)
        for size in sorted(self._sizes_to_capture() - self._graphs.keys() - self._uncaptured):
            self._capture_step(size)
            self._begin()  # warming up the step has changed the client's state
            self._load_buffers(row, integer_buffers)

    def _capture_step(self, size: int) -> None:
        """Capture the step for a batch size; a small batch stays uncaptured if it fits only without a graph."""
        try:
            self._graphs[size] = self._captured(partial(self._step, size))
        except DoesNotFit as shortage:
            fits_uncaptured = shortage.needed is not None
            if size == self.training.plan.batch_size or not fits_uncaptured:
                raise
            self._uncaptured.add(size)

    @property
    def step_count(self) -> int:
        """Number of local steps K of the loaded client."""
        return len(self._sizes)

    def step(self, k: int) -> None:
        """Queue the client's step k, if it has one: as a captured graph, or eagerly for a rare batch size."""
        if k >= len(self._sizes):
            return
        size = self._sizes[k]
        if size in self._graphs:
            self._graphs[size]()
        else:
            self._step(size)

    def _sizes_to_capture(self) -> set[int]:
        """Batch sizes whose step is worth capturing: that of full batches, and smaller ones that occur often."""
        full = self.training.plan.batch_size
        return {size for size, uses in self._uses.items() if size == full or uses > SELDOM}

    def unload(self) -> ClientReport:
        """After the last step, write the client's state, message and statistics to its row; returns its report."""
        with suppress(DoesNotFit):  # if the capture does not fit, ``finish`` runs uncaptured, which takes less memory
            self._finish = self._finish or self._captured(self._finish_client)
        (self._finish or self._finish_client)()
        assert self.finished is not None and self.local is not None
        state, message = self.finished
        message.sent["weights"] = self._label_scalars
        self.cohort_buffers.write(self._row, state, message)
        self.cohort_buffers.statistics[self._row].copy_(self.statistics)
        add_products(self.problem, self.cohort_buffers.statistics[self._row], self.local.drift.y)
        return ClientReport(
            lr_sum=message.lr_sum.clone(),
            loss=self.loss.clone(),
            steps=self.step_count,
            backward_passes=self._cost_before_steps.backward_passes + self.passes * self.step_count,
            samples=self._cost_before_steps.samples + self.passes * sum(self._sizes),
            integer_buffers={name: value.clone() for name, value in self.integer_buffers.items()},
        )

    def _load_pilot(self, row: int, client_round: ClientRound) -> None:
        """Compute the pilot gradients of the client in ``row``, and copy them to the tensors that ``begin`` reads."""
        pilot, cost = pilot_gradients(self.problem, self.training, self.cohort_buffers, row, client_round)
        assert pilot is not None and self.pilot is not None
        self.pilot.gradient.copy_(pilot.gradient)
        self.pilot.norm.copy_(pilot.norm)
        self._cost_before_steps += cost

    def _load_batches(self, batches: ClientBatches) -> None:
        """Copy a client's batches to the tensors that the captured step reads.

        A client with more steps than there is room for needs new memory and new graphs.
        """
        steps = len(batches.sizes)
        if not self.batches or len(self.batches["indices"]) < steps:
            self._graphs, self._uncaptured = {}, set()
            room = HEADROOM * steps
            self.batches = {
                name: torch.zeros((room, *tensor.shape[1:]), dtype=tensor.dtype, device=self.k.device)
                for name, tensor in batches.tensors.items()
            }
        for name, tensor in batches.tensors.items():
            self.batches[name][:steps].copy_(tensor, non_blocking=True)

    def _load_buffers(self, row: int, integer_buffers: dict[str, Tensor]) -> None:
        """Copy BatchNorm statistics, from the client's row, and integer buffers to the tensors that the step reads."""
        self.statistics.copy_(self.cohort_buffers.statistics[row])
        if not self.integer_buffers:  # allocate them for the first client; later ones reuse the memory
            self.integer_buffers = {name: value.clone() for name, value in integer_buffers.items()}
        for name, value in integer_buffers.items():
            self.integer_buffers[name].copy_(value)

    def _begin_client(self) -> None:
        """Call ``Algorithm.begin`` and copy its result to the static tensors in ``self.local``, which steps update.

        Static tensors are those that captured graphs read and write.
        """
        arguments = nested_state(self.client), self.round, self.steps, self.own_gradient, self.pilot
        fresh = begin_client(self.problem, self.training, self.cohort_buffers, *arguments)
        if self.local is None:
            self.local = with_static_tensors(fresh)
        copy_changed(fresh, self.local)
        self.k.zero_()
        self.loss.zero_()

    def _step(self, size: int) -> None:
        """Take the client's next local step, with a batch of ``size`` examples.

        This method is captured as a CUDA graph, so it reads and writes only static tensors, which keep their place in
        memory. The number k of the step is one of them: every replay reads batch k, then increments k.
        """
        assert self.local is not None
        # Row k of each tensor: the positions of the batch's examples, and the random numbers of the augmentation.
        draws = {name: tensor.index_select(0, self.k)[0] for name, tensor in self.batches.items()}
        positions = draws.pop("indices")[:size]  # the rest is padding
        with cudnn_benchmark(size == self.training.plan.batch_size), explain_small_batches(self._client_round):
            result = self.local_step(self.local, positions, draws, self.statistics, self.integer_buffers)
        # Pair each new value with the static tensor that it replaces.
        pairs = [*zip(result.client, changing_tensors(self.local), strict=True), (result.statistics, self.statistics)]
        pairs += [(new, self.integer_buffers[name]) for name, new in result.integer_buffers.items()]
        replaced = [(new, static) for new, static in pairs if new is not static]  # the eager step changes some in place
        for new, static in without_overlap(replaced):
            static.copy_(new)
        self.loss.add_(result.loss)
        self.k.add_(1)
        self.passes = result.passes

    def _finish_client(self) -> None:
        assert self.local is not None
        self.finished = self.training.algorithm.finish(self.local)

    def _warm_up(self, work: Callable[[], None]) -> None:
        """Call ``work`` a few times, as a CUDA graph capture requires; if it is a local step, always as step k = 0."""
        for _ in range(WARM_UPS):
            work()
            self.k.zero_()

    def _captured(self, work: Callable[[], None]) -> Callable[[], None]:
        """Capture ``work`` as a CUDA graph and return a function that replays it; on a CPU, return ``work`` itself.

        Raises ``DoesNotFit`` if the capture would need more memory than is free.
        """
        self.problem.set_training_mode()
        if self.stream is None:
            return work
        torch.cuda.synchronize()
        needed = memory_needed(lambda: self._warm_up(work)) + RESERVE
        free = torch.cuda.mem_get_info()[0]
        if needed > free:
            raise DoesNotFit(needed, free)
        graph, reserved = torch.cuda.CUDAGraph(), torch.cuda.memory_reserved()
        capture = torch.cuda.graph(graph, pool=self._pool, stream=self.stream, capture_error_mode="thread_local")
        with explain_capture_errors(), capture:
            work()
        torch.cuda.synchronize()
        self._pool_bytes += torch.cuda.memory_reserved() - reserved
        replay: Callable[[], None] = graph.replay
        return replay


def without_overlap(pairs: list[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """Clone new tensors that share memory with an old one, so that all (new, old) pairs can be copied in any order.

    For example, if a step stores the client's previous model, copying the new model first would overwrite it.
    """
    overwritten = {old.untyped_storage().data_ptr() for _, old in pairs}
    return [(new.clone() if new.untyped_storage().data_ptr() in overwritten else new, old) for new, old in pairs]
