"""One local step on a GPU, eager or compiled, to be captured by a lane."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fedflat.algorithms.algorithm import LocalState
from fedflat.engines.gpu.layers import with_gpu_layers
from fedflat.engines.problem.problem import PassResult, Problem
from fedflat.engines.round.client import StepGradient
from fedflat.engines.round.contract import Training

CLOSE = 0.5
"""Largest difference between a compiled and an eager step, relative to the step; rounding errors are smaller."""
SAME = 0.05
"""Largest difference between two eager steps that are not random, and between two losses."""


class StepResult(NamedTuple):
    """Result of a local step.

    Attributes:
        client: new values of the tensors in ``changing``, in the same order.
        statistics: new BatchNorm statistics [buffers].
        integer_buffers: new integer buffers by name.
        loss: mean loss of the batch.
        passes: backward passes.
    """

    client: list[Tensor]
    statistics: Tensor
    integer_buffers: dict[str, Tensor]
    loss: Tensor
    passes: int


Advance = Callable[[LocalState, Tensor, dict[str, Tensor], Tensor, dict[str, Tensor]], StepResult]
"""One local step: (client, positions [batch], augmentation draws, statistics [buffers], integer buffers) -> result."""


def in_place(problem: Problem, training: Training) -> Advance:
    """Build the eager local step for this problem and training; BatchNorm statistics and counters change in place."""

    def advance(
        local: LocalState,
        positions: Tensor,
        draws: dict[str, Tensor],
        statistics: Tensor,
        integer_buffers: dict[str, Tensor],
    ) -> StepResult:
        """Take one local step on the examples at ``positions`` [batch]; arguments as in ``Advance``."""
        gradient = StepGradient(
            problem, problem.batch(positions, draws), {**problem.buffers.views(statistics), **integer_buffers}
        )
        new_local = training.algorithm.step(local, gradient, training.schedule, training.descent)
        return StepResult(changing(new_local), statistics, integer_buffers, gradient.loss, gradient.passes)

    return advance


def compiled(problem: Problem, training: Training, backend: str = "inductor", strict: bool = False) -> Advance:
    """The step as a pure function, compiled as one graph: fewer and larger kernels, after tens of seconds of compiling.

    torch's ``combo_kernels`` stay off: they gave wrong bf16 results on a GPU (docs/benchmarks.md).

    Args:
        problem: model, task and data.
        training: how clients train.
        backend: backend of ``torch.compile``.
        strict: whether errors of the compiler are raised. Otherwise, if compiling fails or the first result differs
            from the eager one, the step continues in eager mode with a warning.
    """
    problem.set_training_mode()
    model = with_gpu_layers(problem.model)

    def advance(
        local: LocalState,
        positions: Tensor,
        draws: dict[str, Tensor],
        statistics: Tensor,
        integer_buffers: dict[str, Tensor],
    ) -> StepResult:
        """One local step without changes in place."""
        batch = problem.batch(positions, draws)
        passes: list[PassResult] = []

        def gradient(point: Tensor) -> Tensor:
            passes.append(problem.functional_pass(point, statistics, integer_buffers, batch, model))
            return passes[-1].gradient

        new_local = training.algorithm.step(local, gradient, training.schedule, training.descent)
        first = passes[0]  # only the first pass updates statistics
        return StepResult(changing(new_local), first.statistics, first.integer_buffers, first.loss, len(passes))

    torch.compiler.reset()  # code of earlier runs counts against torch's recompilation limit
    fast: Advance = torch.compile(advance, dynamic=False, fullgraph=True, backend=backend)
    eager = in_place(problem, training)
    is_usable: bool | None = None  # unknown before the first step

    def step_with_fallback(
        local: LocalState,
        positions: Tensor,
        draws: dict[str, Tensor],
        statistics: Tensor,
        integer_buffers: dict[str, Tensor],
    ) -> StepResult:
        """The compiled step, or the eager one for smaller batches and once compilation has failed."""
        nonlocal is_usable
        arguments = (local, positions, draws, statistics, integer_buffers)
        if is_usable is False or len(positions) < training.plan.batch_size:  # other sizes would be compiled anew
            return eager(*arguments)
        try:
            result = fast(*arguments)
        except torch.OutOfMemoryError:
            raise  # tells the lane that it does not fit
        except Exception as error:  # compilers fail in many ways; the eager step re-raises errors of the user's code
            is_usable, reason = False, f"could not be compiled ({type(error).__name__})"
        else:
            is_usable = agrees_with_eager(result, *arguments) if is_usable is None else is_usable
            reason = "computes another result when compiled"
        if not is_usable:
            warnings.warn(f"the local step {reason}; continuing without compilation", stacklevel=2)
        return result if is_usable else eager(*arguments)

    def agrees_with_eager(
        result: StepResult,
        local: LocalState,
        positions: Tensor,
        draws: dict[str, Tensor],
        statistics: Tensor,
        integer_buffers: dict[str, Tensor],
    ) -> bool:
        """Whether a compiled result agrees with the eager step, or cannot be compared because the step is random."""

        def eager_result() -> StepResult:
            new_integer_buffers = {name: value.clone() for name, value in integer_buffers.items()}
            return eager(local, positions, draws, statistics.clone(), new_integer_buffers)

        try:
            expected = eager_result()
            if agree(result, expected, local, statistics):
                return True
            return not agree(eager_result(), expected, local, statistics, SAME)  # true for a random step
        except torch.OutOfMemoryError:
            return True  # a compiled step takes less memory
        finally:
            if positions.is_cuda:
                torch.cuda.reset_peak_memory_stats()  # a lane measures a step's memory by the peak

    return fast if strict else step_with_fallback


def agree(
    result: StepResult, expected: StepResult, local: LocalState, statistics: Tensor, tolerance: float = CLOSE
) -> bool:
    """Whether two steps from the same point agree in loss, counters, and the moves of iterate and statistics.

    Args:
        result: the first step; its first tensor is the new iterate.
        expected: the second step.
        local: the client before the steps.
        statistics: BatchNorm statistics before the steps [buffers].
        tolerance: largest difference, relative to how far the second step moved.
    """
    for new, other, start in (
        (result.client[0], expected.client[0], local.drift.y),
        (result.statistics, expected.statistics, statistics),
    ):
        if not bool((new - other).norm() <= tolerance * (other - start).norm()):
            return False
    if not all(bool((expected.integer_buffers[name] == value).all()) for name, value in result.integer_buffers.items()):
        return False
    # Losses differ only by rounding, so their tolerance is tighter.
    return bool(torch.isclose(result.loss, expected.loss, rtol=SAME, atol=SAME))


def changing(local: LocalState) -> list[Tensor]:
    """The tensors of a client that a step changes, in a fixed order that starts with the iterate.

    Drift and perturbation share the iterate and the counters, so these are taken from the drift only.
    """
    velocity = [] if local.velocity is None else [local.velocity]
    drift = local.drift
    return [drift.y, drift.step, drift.lr_sum, *drift.local.values(), *local.perturbation.local.values(), *velocity]
