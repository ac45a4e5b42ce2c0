"""One local step on a GPU, as it is or compiled: what a lane captures."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fedflat.algorithms.algorithm import Local
from fedflat.engines.client import StepGradient
from fedflat.engines.contract import Training
from fedflat.engines.problem import Problem

Advance = Callable[[Local, Tensor, dict[str, Tensor], Tensor, dict[str, Tensor]], tuple[list[Tensor], Tensor, Tensor, int]]
"""One local step: (client, positions, draws, statistics, integers) to (what changed of the client, statistics, loss, passes)."""


def in_place(problem: Problem, training: Training) -> Advance:
    """The step as it is; BatchNorm statistics move in place."""

    def advance(
        local: Local, positions: Tensor, draws: dict[str, Tensor], statistics: Tensor, integers: dict[str, Tensor]
    ) -> tuple[list[Tensor], Tensor, Tensor, int]:
        gradient = StepGradient(problem, problem.batch(positions, draws), {**problem.buffers.views(statistics), **integers})
        moved = training.algorithm.step(local, gradient, training.schedule, training.descent)
        return changing(moved), statistics, gradient.loss, gradient.passes

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
        return changing(moved), seen[0][1], seen[0][0], len(seen)

    torch.compiler.reset()  # what was compiled for another run is of no use, and counts against torch's limit
    fast: Advance = torch.compile(advance, dynamic=False, fullgraph=True, backend=backend)
    plain = in_place(problem, training)
    failed = False

    def attempt(local: Local, positions: Tensor, *rest: Any) -> tuple[list[Tensor], Tensor, Tensor, int]:
        nonlocal failed
        if not failed and len(positions) == training.plan.batch:  # every other size would be compiled anew
            try:
                return fast(local, positions, *rest)
            except torch.OutOfMemoryError:
                raise  # which tells a lane that it does not fit
            except Exception as error:  # compilers fail in many ways; a mistake of the user's own comes back from the plain step
                failed = True
                warnings.warn(f"the step could not be compiled and runs as it is ({type(error).__name__})", stacklevel=2)
        return plain(local, positions, *rest)

    return fast if strict else attempt


def changing(local: Local) -> list[Tensor]:
    """What a step changes of a client; drift and perturbation share the iterate and the counters."""
    velocity = [] if local.velocity is None else [local.velocity]
    at = local.drift
    return [at.y, at.step, at.rates, *at.local.values(), *local.perturbation.local.values(), *velocity]
