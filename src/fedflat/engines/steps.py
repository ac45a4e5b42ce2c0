"""One local step on a GPU, as it is or compiled: what a lane captures."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedflat.algorithms.algorithm import Local
from fedflat.engines.client import StepGradient
from fedflat.engines.contract import Training
from fedflat.engines.gpu_layers import with_gpu_layers
from fedflat.engines.problem import Batch, Pass, Problem

SMALL = 2**21
"""Weights of models whose kernels take longer to start than to run, so that those that need not wait for each other start as one."""


class Held(NamedTuple):
    """What a lane holds of a client's round besides the client, in tensors that stay where they are."""

    work: dict[str, Tensor]
    """The batches and draws of all its steps."""
    k: Tensor
    """Which step is next."""
    statistics: Tensor
    integers: dict[str, Tensor]
    loss: Tensor
    """The sum of losses so far."""

    def batch(self, problem: Problem, size: int) -> Batch:
        """The next step's batch, of the first so many examples."""
        now = {name: tensor.index_select(0, self.k)[0] for name, tensor in self.work.items()}
        return problem.batch(now.pop("indices")[:size], now)


Advance = Callable[[Local, Held, int], int]
"""One local step on a batch of some size, which moves the client and all that is held of it; returns its backward passes."""


def in_place(problem: Problem, training: Training) -> Advance:
    """The step as it is."""

    def advance(local: Local, held: Held, size: int) -> int:
        gradient = StepGradient(problem, held.batch(problem, size), {**problem.buffers.views(held.statistics), **held.integers})
        moved = training.algorithm.step(local, gradient, training.schedule, training.descent)
        move(zip(changing(moved), changing(local), strict=True))
        held.loss.add_(gradient.loss)
        held.k.add_(1)
        return gradient.passes

    return advance


def compiled(problem: Problem, training: Training, backend: str = "inductor", strict: bool = False) -> Advance:
    """The step as a pure function and what it moves, compiled whole: fewer and larger kernels, for some tens of seconds at the start.

    Where the compiler fails, which it does on a few models, the step runs as it is, unless ``strict``.
    """
    problem.training_mode()
    model = with_gpu_layers(problem.model)

    def advance(local: Local, held: Held, size: int) -> int:
        batch = held.batch(problem, size)
        passes: list[Pass] = []

        def gradient(point: Tensor) -> Tensor:
            passes.append(problem.functional_pass(point, held.statistics, held.integers, batch, model))
            return passes[-1].gradient

        moved = training.algorithm.step(local, gradient, training.schedule, training.descent)
        first = passes[0]  # others leave no trace
        buffers = [(first.statistics, held.statistics), *((first.integers[name], old) for name, old in held.integers.items())]
        move([*zip(changing(moved), changing(local), strict=True), *buffers])
        held.loss.add_(first.loss)
        held.k.add_(1)
        return len(passes)

    torch.compiler.reset()  # what was compiled for another run is of no use, and counts against torch's limit
    combined = backend == "inductor" and problem.device.type == "cuda" and problem.layout.size < SMALL
    options: dict[str, Any] | None = {"combo_kernels": True} if combined else None
    fast: Advance = torch.compile(advance, dynamic=False, fullgraph=True, backend=backend, options=options)
    plain = in_place(problem, training)
    failed = False

    def attempt(local: Local, held: Held, size: int) -> int:
        nonlocal failed
        if not failed and size == training.plan.batch:  # every other size would be compiled anew
            try:
                return fast(local, held, size)
            except torch.OutOfMemoryError:
                raise  # which tells a lane that it does not fit
            except Exception as error:  # compilers fail in many ways; a mistake of the user's own comes back from the plain step
                failed = True
                warnings.warn(f"the step could not be compiled and runs as it is ({type(error).__name__})", stacklevel=2)
        return plain(local, held, size)

    return fast if strict else attempt


def changing(local: Local) -> list[Tensor]:
    """What a step changes of a client; drift and perturbation share the iterate and the counters."""
    velocity = [] if local.velocity is None else [local.velocity]
    at = local.drift
    return [at.y, at.step, at.rates, *at.local.values(), *local.perturbation.local.values(), *velocity]


def move(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Write new values over old ones, all of which are read before the first is written: a step may keep what was the iterate before it."""
    apart = [(new, old) for new, old in pairs if new is not old]
    if torch.compiler.is_compiling():  # which spares copies that are not needed
        apart = [(new.clone(), old) for new, old in apart]
    else:
        written = {old.untyped_storage().data_ptr() for _, old in apart}
        apart = [(new.clone() if new.untyped_storage().data_ptr() in written else new, old) for new, old in apart]
    for new, old in apart:
        old.copy_(new)
