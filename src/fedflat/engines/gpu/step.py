"""One local step on a GPU, eager or compiled: what a lane captures."""

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

CLOSE, SAME = 0.5, 0.05
"""Relative distance allowed between a compiled and an eager step, and between two eager ones; rounding is smaller."""


class StepResult(NamedTuple):
    """Result of a local step.

    Attributes:
        client: new values of the tensors in ``changing``, in the same order.
        statistics: new BatchNorm statistics [buffers].
        integers: new integer buffers by name.
        loss: mean loss of the batch.
        passes: backward passes.
    """

    client: list[Tensor]
    statistics: Tensor
    integers: dict[str, Tensor]
    loss: Tensor
    passes: int


Advance = Callable[[LocalState, Tensor, dict[str, Tensor], Tensor, dict[str, Tensor]], StepResult]
"""One local step: (client, positions [batch], augmentation draws, statistics [buffers], integers) -> result."""


def in_place(problem: Problem, training: Training) -> Advance:
    """The eager step; BatchNorm statistics and counters change in place."""

    def advance(
        local: LocalState, positions: Tensor, draws: dict[str, Tensor], statistics: Tensor, integers: dict[str, Tensor]
    ) -> StepResult:
        gradient = StepGradient(
            problem, problem.batch(positions, draws), {**problem.buffers.views(statistics), **integers}
        )
        moved = training.algorithm.step(local, gradient, training.schedule, training.descent)
        return StepResult(changing(moved), statistics, integers, gradient.loss, gradient.passes)

    return advance


def compiled(problem: Problem, training: Training, backend: str = "inductor", strict: bool = False) -> Advance:
    """The step as a pure function, compiled as one graph: fewer and larger kernels, after tens of seconds of compiling.

    torch's ``combo_kernels`` stay off: they gave wrong bf16 results on a GPU (docs/benchmarks.md). Unless ``strict``,
    the step falls back to eager mode, with a warning, if compiling fails or the compiled result differs.
    """
    problem.set_training_mode()
    model = with_gpu_layers(problem.model)

    def advance(
        local: LocalState, positions: Tensor, draws: dict[str, Tensor], statistics: Tensor, integers: dict[str, Tensor]
    ) -> StepResult:
        batch = problem.batch(positions, draws)
        passes: list[PassResult] = []

        def gradient(point: Tensor) -> Tensor:
            passes.append(problem.functional_pass(point, statistics, integers, batch, model))
            return passes[-1].gradient

        moved = training.algorithm.step(local, gradient, training.schedule, training.descent)
        first = passes[0]  # only the first pass updates statistics
        return StepResult(changing(moved), first.statistics, first.integers, first.loss, len(passes))

    torch.compiler.reset()  # code of earlier runs counts against torch's recompilation limit
    fast: Advance = torch.compile(advance, dynamic=False, fullgraph=True, backend=backend)
    eager = in_place(problem, training)
    usable: bool | None = None

    def attempt(
        local: LocalState, positions: Tensor, draws: dict[str, Tensor], statistics: Tensor, integers: dict[str, Tensor]
    ) -> StepResult:
        nonlocal usable
        step = (local, positions, draws, statistics, integers)
        if usable is False or len(positions) < training.plan.batch_size:  # other sizes would be compiled anew
            return eager(*step)
        try:
            result = fast(*step)
        except torch.OutOfMemoryError:
            raise  # tells the lane that it does not fit
        except Exception as error:  # compilers fail in many ways; the eager step re-raises errors of the user's code
            usable, reason = False, f"could not be compiled ({type(error).__name__})"
        else:
            usable = trusted(result, *step) if usable is None else usable
            reason = "computes another result when compiled"
        if not usable:
            warnings.warn(f"the local step {reason}; continuing without compilation", stacklevel=2)
        return result if usable else eager(*step)

    def trusted(
        result: StepResult,
        local: LocalState,
        positions: Tensor,
        draws: dict[str, Tensor],
        statistics: Tensor,
        integers: dict[str, Tensor],
    ) -> bool:
        def expected() -> StepResult:
            return eager(
                local, positions, draws, statistics.clone(), {name: value.clone() for name, value in integers.items()}
            )

        try:
            once = expected()
            if agree(result, once, local, statistics):
                return True
            return not agree(expected(), once, local, statistics, SAME)  # a random step cannot be compared
        except torch.OutOfMemoryError:
            return True  # a compiled step takes less memory
        finally:
            if positions.is_cuda:
                torch.cuda.reset_peak_memory_stats()  # by which a lane measures the memory of a step

    return fast if strict else attempt


def agree(
    result: StepResult, expected: StepResult, local: LocalState, statistics: Tensor, share: float = CLOSE
) -> bool:
    """Whether two steps from the same point agree in loss, counters, and the moves of iterate and statistics."""
    moves = [
        (result.client[0], expected.client[0], local.drift.y),
        (result.statistics, expected.statistics, statistics),
    ]
    close = all(bool((new - other).norm() <= share * (other - start).norm()) for new, other, start in moves)
    counted = all(bool((expected.integers[name] == value).all()) for name, value in result.integers.items())
    return close and counted and bool(torch.isclose(result.loss, expected.loss, rtol=SAME, atol=SAME))


def changing(local: LocalState) -> list[Tensor]:
    """The tensors of a client that a step changes; drift and perturbation share the iterate and the counters."""
    velocity = [] if local.velocity is None else [local.velocity]
    at = local.drift
    return [at.y, at.step, at.lr_sum, *at.local.values(), *local.perturbation.local.values(), *velocity]
