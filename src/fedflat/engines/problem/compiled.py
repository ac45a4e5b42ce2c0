"""The gradient of one size of batch, compiled for a CPU: half the time for narrow networks, for some seconds at the start."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fedflat.engines.cpu.narrow_networks import is_narrow, narrowed

if TYPE_CHECKING:
    from fedflat.engines.problem.problem import Batch, Problem


class CompiledGradient:
    """A problem's loss and gradient on full batches, compiled whole; other batches are for the problem itself.

    Clients end on batches of many sizes, and each would be compiled anew. BatchNorm changes buffers in place, and that stays with the
    problem too.
    """

    def __init__(self, problem: Problem, size: int, backend: str = "inductor") -> None:
        self._problem, self._size = problem, size
        self._usable = not problem.buffers.names
        self._model: nn.Module | None = None
        self._fast: Any = torch.compile(self._pure, dynamic=False, fullgraph=True, backend=backend)

    def __call__(self, vector: Tensor, batch: Batch) -> tuple[Tensor, Tensor] | None:
        """Loss and gradient; None where this batch is not compiled, or cannot be."""
        if not self._usable or len(batch.targets) != self._size or batch.mixed_targets is not None:
            return None
        try:
            first, self._model = self._model is None, self._model or self._rearranged()
            loss, gradient = self._fast(vector, batch.inputs, batch.targets)
        except torch.OutOfMemoryError:
            raise
        except (
            Exception
        ) as error:  # compilers fail in many ways; a mistake of the user's own comes back from the step as it is
            self._usable = False
            warnings.warn(f"the step could not be compiled and runs as it is ({type(error).__name__})", stacklevel=2)
            return None
        if first and not self._agrees(vector, batch, loss):
            self._usable = False
            warnings.warn(
                "the compiled step found another loss than the step as it is, which runs instead", stacklevel=2
            )
            return None
        return loss.detach(), gradient

    def _agrees(self, vector: Tensor, batch: Batch, loss: Tensor) -> bool:
        """Whether a loss is that of the model itself: rearranging layers changes one that looks at what is between them."""
        problem = self._problem
        if any(isinstance(part, nn.modules.dropout._DropoutNd) and part.p > 0 for part in problem.model.modules()):
            return True  # which draws anew in every pass
        with torch.no_grad():
            expected = problem.task.loss(problem.output(vector, {}, batch.inputs), batch.targets)
        return bool(torch.isclose(loss.detach(), expected, rtol=1e-4, atol=1e-6, equal_nan=True))

    def _rearranged(self) -> nn.Module:
        model = self._problem.model
        return narrowed(model) if is_narrow(model, self._size) else model

    def _pure(self, vector: Tensor, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        def loss_of(point: Tensor) -> tuple[Tensor, Tensor]:
            loss = self._problem.task.loss(self._problem.output(point, {}, inputs, self._model), targets)
            return loss, loss

        gradient, loss = torch.func.grad(loss_of, has_aux=True)(vector)
        return loss, gradient
