"""The gradient of full batches, compiled for a CPU: twice as fast for narrow networks, after seconds of compiling."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fedflat.data.batches import Batch
from fedflat.engines.problem.narrow_networks import is_narrow, narrowed

Loss = Callable[[Tensor, Tensor, Tensor, nn.Module | None], Tensor]
"""(weights [parameters], inputs, targets, replacement for the model) -> mean loss of the batch, as a scalar."""


class CompiledGradient:
    """Loss and gradient of batches of one size, compiled as a single graph.

    Every other batch size would be compiled anew, so the caller computes those itself.

    Args:
        model: the model, which must have no buffers that training changes.
        loss: the mean loss of a batch for a flat weight vector.
        size: examples in a full batch.
        backend: backend of ``torch.compile``.
    """

    def __init__(self, model: nn.Module, loss: Loss, size: int, backend: str = "inductor") -> None:
        """Prepare the gradient of ``loss`` for batches of ``size`` examples; the first call compiles it."""
        self._model, self._loss, self._size = model, loss, size
        self._usable = True
        self._fast_model: nn.Module | None = None  # the model, or a copy with faster layers
        self._compiled: Any = torch.compile(self._loss_and_gradient, dynamic=False, fullgraph=True, backend=backend)

    def __call__(self, vector: Tensor, batch: Batch) -> tuple[Tensor, Tensor] | None:
        """Loss and gradient [parameters] of a batch at the weights ``vector``; None if the caller must compute them.

        The caller must do so for other batch sizes, for mixup, and once compiling has failed or given a wrong loss.
        """
        if not self._usable or len(batch.targets) != self._size or batch.mixed_targets is not None:
            return None
        is_first_call = self._fast_model is None
        try:
            if self._fast_model is None:
                self._fast_model = narrowed(self._model) if is_narrow(self._model, self._size) else self._model
            loss, gradient = self._compiled(vector, batch.inputs, batch.targets)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # compilers fail in many ways; the eager step re-raises errors of the user's code
            self._fall_back(f"could not be compiled ({type(error).__name__})")
            return None
        if is_first_call and not self._agrees_with_eager(vector, batch, loss):
            self._fall_back("computes another loss when compiled")
            return None
        return loss.detach(), gradient

    def _fall_back(self, reason: str) -> None:
        """Leave all further batches to the caller, and warn; ``reason`` completes "the local step ..."."""
        self._usable = False
        warnings.warn(f"the local step {reason}; continuing without compilation", stacklevel=3)

    def _agrees_with_eager(self, vector: Tensor, batch: Batch, loss: Tensor) -> bool:
        """Whether ``loss``, the compiled loss at the weights ``vector``, equals the eager one up to rounding.

        They may differ because faster layers store activations in another memory layout, and a model may depend on it.
        """
        if any(isinstance(layer, nn.modules.dropout._DropoutNd) and layer.p > 0 for layer in self._model.modules()):
            return True  # dropout differs in every pass
        with torch.no_grad():
            expected = self._loss(vector, batch.inputs, batch.targets, None)
        return bool(torch.isclose(loss.detach(), expected, rtol=1e-4, atol=1e-6, equal_nan=True))

    def _loss_and_gradient(self, vector: Tensor, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Loss and gradient [parameters] in one pass; the function that is compiled."""

        def loss_twice(point: Tensor) -> tuple[Tensor, Tensor]:  # has_aux: the second value is returned as well
            loss = self._loss(point, inputs, targets, self._fast_model)
            return loss, loss

        gradient, loss = torch.func.grad(loss_twice, has_aux=True)(vector)
        return loss, gradient
