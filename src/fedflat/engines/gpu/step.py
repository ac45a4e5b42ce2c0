"""One local step on a GPU, eager or compiled, to be captured by a lane."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fedflat.algorithms.algorithm import LocalState
from fedflat.algorithms.part_checks import explain_key_errors
from fedflat.algorithms.teacher import Teacher
from fedflat.engines.problem.objective import PassResult
from fedflat.engines.problem.problem import Problem
from fedflat.engines.round.client import StepGradient
from fedflat.engines.round.contract import Training

CLOSE = 0.5
"""Largest difference between a compiled and an eager step, relative to the eager one; rounding errors are smaller."""
SAME = 0.05
"""Largest relative difference between two eager steps without randomness, and between the losses of two steps."""


class StepResult(NamedTuple):
    """Result of a local step.

    Attributes:
        client: new values of the tensors that ``changing_tensors`` returns, in the same order.
        statistics: new BatchNorm statistics [buffers].
        integer_buffers: new integer buffers by name.
        loss: mean loss of the batch.
        passes: number of backward passes.
    """

    client: list[Tensor]
    statistics: Tensor
    integer_buffers: dict[str, Tensor]
    loss: Tensor
    passes: int


LocalStep = Callable[[LocalState, Tensor, dict[str, Tensor], Tensor, dict[str, Tensor]], StepResult]
"""One local step. Its arguments are, in this order:

- the client's state before the step,
- the positions of the batch's examples in the training set [batch],
- the random numbers of the augmentation, by name,
- BatchNorm statistics [buffers],
- integer buffers, such as batch counters, by name.
"""


def eager_step(problem: Problem, training: Training) -> LocalStep:
    """Build an eager local step for a problem and training; it changes BatchNorm statistics and counters in place."""

    @explain_key_errors
    def local_step(
        local: LocalState,
        positions: Tensor,
        draws: dict[str, Tensor],
        statistics: Tensor,
        integer_buffers: dict[str, Tensor],
    ) -> StepResult:
        """Take one local step; changes ``statistics`` and ``integer_buffers`` in place."""
        gradient = StepGradient(
            problem, problem.batch(positions, draws), {**problem.buffer_layout.views(statistics), **integer_buffers}
        )
        new_local = training.algorithm.step(local, gradient, training.schedule, training.descent)
        return StepResult(changing_tensors(new_local), statistics, integer_buffers, gradient.loss, gradient.passes)

    return local_step


def compiled_step(problem: Problem, training: Training, backend: str = "inductor", strict: bool = False) -> LocalStep:
    """Build a local step that is compiled as one graph of fewer and larger kernels.

    Compiling takes tens of seconds. torch's ``combo_kernels`` stay off: they gave wrong bf16 results on a GPU
    (docs/benchmarks.md).

    Args:
        problem: model, task and data.
        training: how clients train.
        backend: backend of ``torch.compile``.
        strict: whether errors of the compiler are raised. Otherwise the step falls back to eager mode, with a warning,
            if compiling fails or the first result differs from the eager one.
    """
    from fedflat.engines.gpu.layers import with_gpu_layers  # imports Triton, which takes half a second

    problem.set_training_mode()
    model = with_gpu_layers(problem.model)

    def pure_step(
        local: LocalState,
        positions: Tensor,
        draws: dict[str, Tensor],
        statistics: Tensor,
        integer_buffers: dict[str, Tensor],
    ) -> StepResult:
        """Take one local step without changing anything in place, as the compiler requires."""
        batch = problem.batch(positions, draws)
        passes: list[PassResult] = []

        def gradient(point: Tensor, teacher: Teacher | None = None) -> Tensor:
            """The gradient of the batch at ``point``; records the result of the pass."""
            passes.append(problem.functional_pass(point, statistics, integer_buffers, batch, model, teacher))
            return passes[-1].gradient

        new_local = training.algorithm.step(local, gradient, training.schedule, training.descent)
        first = passes[0]  # only the first pass updates statistics
        return StepResult(changing_tensors(new_local), first.statistics, first.integer_buffers, first.loss, len(passes))

    # torch 2.11 prints a warning about every kernel that it cannot time.
    logging.getLogger("torch._inductor.select_algorithm").setLevel(logging.ERROR)
    torch.compiler.reset()  # code of earlier runs counts against torch's recompilation limit
    fast_step: LocalStep = torch.compile(pure_step, dynamic=False, fullgraph=True, backend=backend)
    return fast_step if strict else StepWithFallback(fast_step, eager_step(problem, training), training.plan.batch_size)


class StepWithFallback:
    """A compiled local step that is replaced by the eager one if compiling fails or the two give different results.

    Args:
        compiled: the compiled step.
        eager: the eager step.
        batch_size: size of a full batch. Smaller batches always take the eager step, because every size would have to
            be compiled separately.
    """

    def __init__(self, compiled: LocalStep, eager: LocalStep, batch_size: int) -> None:
        self._compiled, self._eager, self._batch_size = compiled, eager, batch_size
        self._is_usable: bool | None = None  # unknown before the first compiled step

    def __call__(
        self,
        local: LocalState,
        positions: Tensor,
        draws: dict[str, Tensor],
        statistics: Tensor,
        integer_buffers: dict[str, Tensor],
    ) -> StepResult:
        """Take one local step; the first compiled result is compared with the eager one."""
        arguments = (local, positions, draws, statistics, integer_buffers)
        if self._is_usable is False or len(positions) < self._batch_size:
            return self._eager(*arguments)
        try:
            result = self._compiled(*arguments)
        except torch.OutOfMemoryError:
            raise  # the lane handles it
        except Exception as error:  # compilers fail in many ways; the eager step re-raises errors of the user's code
            self._is_usable, reason = False, f"could not be compiled ({type(error).__name__})"
        else:
            if self._is_usable is None:
                self._is_usable = self._agrees_with_eager(result, *arguments)
            reason = "computes another result when compiled"
        if self._is_usable:
            return result
        warnings.warn(f"the local step {reason}; continuing without compilation", stacklevel=2)
        return self._eager(*arguments)

    def _agrees_with_eager(
        self,
        result: StepResult,
        local: LocalState,
        positions: Tensor,
        draws: dict[str, Tensor],
        statistics: Tensor,
        integer_buffers: dict[str, Tensor],
    ) -> bool:
        """Whether a compiled result agrees with the eager step; also true if they cannot be compared.

        They cannot be compared if the step is random, e.g. because of dropout, or if the eager step needs too much
        memory. The arguments after ``result`` are those of the compiled step.
        """

        def eager_result() -> StepResult:
            """The eager step on copies of the buffers, which it changes in place."""
            copies = {name: value.clone() for name, value in integer_buffers.items()}
            return self._eager(local, positions, draws, statistics.clone(), copies)

        try:
            expected = eager_result()
            if steps_agree(result, expected, local, statistics):
                return True
            # Two eager steps differ only if the step is random.
            return not steps_agree(eager_result(), expected, local, statistics, SAME)
        except torch.OutOfMemoryError:
            return True  # the compiled step takes less memory
        finally:
            # A lane measures the memory of a step by its peak, to which the eager steps must not contribute.
            if positions.is_cuda:
                torch.cuda.reset_peak_memory_stats()


def steps_agree(
    result: StepResult, expected: StepResult, local: LocalState, statistics: Tensor, tolerance: float = CLOSE
) -> bool:
    """Whether a step, e.g. compiled, agrees with a reference step, e.g. eager, that starts from the same state.

    Loss, batch counters, and the changes of the model and of the BatchNorm statistics are compared.

    Args:
        result: result of the step; its first tensor is the new model.
        expected: result of the reference step.
        local: the client's state before both steps.
        statistics: BatchNorm statistics before both steps [buffers].
        tolerance: largest norm of the difference between the two changes, relative to the norm of the reference change.
    """
    for new, other, start in (
        (result.client[0], expected.client[0], local.drift.y),
        (result.statistics, expected.statistics, statistics),
    ):
        if not bool((new - other).norm() <= tolerance * (other - start).norm()):
            return False
    if not all(bool((expected.integer_buffers[name] == value).all()) for name, value in result.integer_buffers.items()):
        return False
    # Both losses are computed at the old model and differ only by rounding, so their tolerance is tighter.
    return bool(torch.isclose(result.loss, expected.loss, rtol=SAME, atol=SAME))


def changing_tensors(local: LocalState) -> list[Tensor]:
    """The tensors of a client's state that a step changes, in a fixed order that starts with the client's model.

    The slots share the model and the counters, so these are taken from the drift only.
    """
    drift = local.drift
    slots = [value for ctx in local for value in ctx.local.values()]
    return [drift.y, drift.step, drift.lr_sum, *slots]
