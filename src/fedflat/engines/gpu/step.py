"""One local step on a GPU, as it is or compiled: what a lane captures."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fedflat.algorithms.algorithm import LocalState
from fedflat.engines.gpu.layers import with_gpu_layers
from fedflat.engines.problem.problem import Pass, Problem
from fedflat.engines.round.client import StepGradient
from fedflat.engines.round.contract import Training

CLOSE, SAME = 0.5, 0.05
"""How far a compiled step may be from the step as it is, and that from itself, as a share: low precision rounds, mistakes do more."""


class Moved(NamedTuple):
    """What a local step changes, and what it took."""

    client: list[Tensor]
    statistics: Tensor
    integers: dict[str, Tensor]
    loss: Tensor
    passes: int


Advance = Callable[[LocalState, Tensor, dict[str, Tensor], Tensor, dict[str, Tensor]], Moved]
"""One local step of a client: (client, positions, draws, statistics, integers)."""


def in_place(problem: Problem, training: Training) -> Advance:
    """The step as it is; BatchNorm statistics and counters move in place."""

    def advance(
        local: LocalState, positions: Tensor, draws: dict[str, Tensor], statistics: Tensor, integers: dict[str, Tensor]
    ) -> Moved:
        gradient = StepGradient(
            problem, problem.batch(positions, draws), {**problem.buffers.views(statistics), **integers}
        )
        moved = training.algorithm.step(local, gradient, training.schedule, training.descent)
        return Moved(changing(moved), statistics, integers, gradient.loss, gradient.passes)

    return advance


def compiled(problem: Problem, training: Training, backend: str = "inductor", strict: bool = False) -> Advance:
    """The step as a pure function, compiled whole: fewer and larger kernels, for some tens of seconds at the start.

    torch's ``combo_kernels`` stay off: with them steps went wrong in bf16 on a GPU (docs/benchmarks.md). Where a compiler fails, as it does
    on a few models, or finds something else, the step runs as it is, unless ``strict``.
    """
    problem.training_mode()
    model = with_gpu_layers(problem.model)

    def advance(
        local: LocalState, positions: Tensor, draws: dict[str, Tensor], statistics: Tensor, integers: dict[str, Tensor]
    ) -> Moved:
        batch = problem.batch(positions, draws)
        passes: list[Pass] = []

        def gradient(point: Tensor) -> Tensor:
            passes.append(problem.functional_pass(point, statistics, integers, batch, model))
            return passes[-1].gradient

        moved = training.algorithm.step(local, gradient, training.schedule, training.descent)
        first = passes[0]  # others leave no trace
        return Moved(changing(moved), first.statistics, first.integers, first.loss, len(passes))

    torch.compiler.reset()  # what was compiled for another run is of no use, and counts against torch's limit
    fast: Advance = torch.compile(advance, dynamic=False, fullgraph=True, backend=backend)
    plain = in_place(problem, training)
    usable: bool | None = None

    def attempt(
        local: LocalState, positions: Tensor, draws: dict[str, Tensor], statistics: Tensor, integers: dict[str, Tensor]
    ) -> Moved:
        nonlocal usable
        step = (local, positions, draws, statistics, integers)
        if usable is False or len(positions) < training.plan.batch:  # every other size would be compiled anew
            return plain(*step)
        try:
            found = fast(*step)
        except torch.OutOfMemoryError:
            raise  # which tells a lane that it does not fit
        except (
            Exception
        ) as error:  # compilers fail in many ways; a mistake of the user's own comes back from the plain step
            usable, why = False, f"could not be compiled and runs as it is ({type(error).__name__})"
        else:
            usable = trusted(found, *step) if usable is None else usable
            why = "found something else compiled than as it is, and runs as it is"
        if not usable:
            warnings.warn(f"the step {why}", stacklevel=2)
        return found if usable else plain(*step)

    def trusted(
        found: Moved,
        local: LocalState,
        positions: Tensor,
        draws: dict[str, Tensor],
        statistics: Tensor,
        integers: dict[str, Tensor],
    ) -> bool:
        def expected() -> Moved:
            return plain(
                local, positions, draws, statistics.clone(), {name: value.clone() for name, value in integers.items()}
            )

        try:
            once = expected()
            return agree(found, once, local, statistics) or not agree(
                expected(), once, local, statistics, SAME
            )  # a step that is random
        except torch.OutOfMemoryError:
            return True  # compiled it takes less
        finally:
            if positions.is_cuda:
                torch.cuda.reset_peak_memory_stats()  # by which a lane learns how much a step takes

    return fast if strict else attempt


def agree(found: Moved, expected: Moved, local: LocalState, statistics: Tensor, share: float = CLOSE) -> bool:
    """Whether two steps from the same place are one: their losses, and how far they move the iterate and BatchNorm's statistics."""
    moves = [(found.client[0], expected.client[0], local.drift.y), (found.statistics, expected.statistics, statistics)]
    close = all(bool((one - other).norm() <= share * (other - start).norm()) for one, other, start in moves)
    counted = all(bool((expected.integers[name] == value).all()) for name, value in found.integers.items())
    return close and counted and bool(torch.isclose(found.loss, expected.loss, rtol=SAME, atol=SAME))


def changing(local: LocalState) -> list[Tensor]:
    """What a step changes of a client; drift and perturbation share the iterate and the counters."""
    velocity = [] if local.velocity is None else [local.velocity]
    at = local.drift
    return [at.y, at.step, at.lr_sum, *at.local.values(), *local.perturbation.local.values(), *velocity]
