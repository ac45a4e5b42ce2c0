"""The mean loss of a model over fixed data as a function of its weights. Every flatness measurement evaluates it.

    f(w) = 1/n sum_j loss(model_w(x_j), y_j)

The model is in evaluation mode: BatchNorm uses its running statistics and dropout is off. Hessian-vector products use
reverse-over-reverse differentiation, ``H v = d/dw <df/dw, v>``. Unlike forward-over-reverse, it supports every layer
that torch can differentiate twice (GroupNorm in any memory format, fused LSTMs, attention), at the same cost.

>>> model = torch.nn.Linear(1, 1, bias=False)
>>> f = Objective(model, torch.nn.functional.mse_loss, (torch.tensor([[1.0], [3.0]]), torch.zeros(2, 1)))
>>> f.loss(torch.tensor([2.0])).item(), f.gradient(torch.tensor([2.0])).tolist()
(20.0, [20.0])
>>> f.hessian_product(torch.tensor([2.0]), torch.tensor([1.0])).tolist()  # the mean of 2 x^2
[10.0]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from fedflat.errors import UserError
from fedflat.flatness.batches import Batch, batches_of, counts, draw, mapped, picked
from fedflat.flatness.curvature.compiled import CompiledProduct
from fedflat.flatness.curvature.convolution import convolution
from fedflat.flatness.curvature.normalisation import group_norm, layer_norm
from fedflat.flatness.precision import rounding
from fedflat.models.layout import Layout

REPLACEMENTS: dict[Callable[..., Any], Callable[..., Any]] = {
    **{function: partial(convolution, function) for function in (torch.conv1d, torch.conv2d, torch.conv3d)},
    F.group_norm: group_norm,
    F.layer_norm: layer_norm,
}


class TwiceDifferentiable(TorchFunctionMode):
    """Context in which convolutions, GroupNorm and LayerNorm use our implementations.

    >>> x, w = torch.ones(1, 1, 3), torch.ones(1, 1, 2)
    >>> with TwiceDifferentiable():
    ...     F.conv1d(x, w, torch.ones(1))
    tensor([[[3., 3.]]])
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call ``func`` or its replacement."""
        return REPLACEMENTS.get(func, func)(*args, **kwargs or {})


Loss = Callable[[Any, Any], Tensor]
"""Maps (model output, targets) to the mean loss over a batch, a scalar tensor."""
Sums = Callable[[Any, Any], Mapping[str, Tensor]]
"""Maps (model output, targets) to metrics summed over the examples of a batch, by name."""


class Objective:
    """The loss of a module on fixed data, evaluated at any flat weight vector of shape [P].

    Args:
        module: the model; it is evaluated functionally and never modified.
        loss: maps (output, targets) to the mean loss over a batch.
        data: a pair of tensors (inputs, targets), a list of batches, or a DataLoader.
        batch: batch size for a pair of tensors.
        prepare: applied to the inputs before the model, e.g. normalisation.
        sums: metrics that ``measured`` reports in addition to the loss.
        buffers: tensors used in place of the module's own buffers, by name.
        weights: the point at which the objective is evaluated by default, [P]; default: the module's parameters.
        tf32: whether a GPU may round float32 matrix products to TF32.
        channels_last: memory format of images and filters; default: contiguous on a GPU in full float32, for which
            the exact kernels are written, channels-last otherwise.
    """

    def __init__(
        self,
        module: nn.Module,
        loss: Loss,
        data: Any,
        *,
        batch: int = 500,
        prepare: Callable[[Tensor], Tensor] | None = None,
        sums: Sums | None = None,
        buffers: Mapping[str, Tensor] | None = None,
        weights: Tensor | None = None,
        tf32: bool = False,
        channels_last: bool | None = None,
    ) -> None:
        self.module, self.tf32 = module, tf32
        self.layout = Layout.of_parameters(module)
        if not self.layout.names:
            raise UserError("this model has no trainable parameters, so there is nothing to measure")
        parameters = {name: p.detach() for name, p in module.named_parameters()}
        self.weights = self.layout.flatten(parameters) if weights is None else weights.detach()
        self.batches: Sequence[Batch] = batches_of(data, batch)
        self._loss, self._prepare, self._sums, self._buffers = loss, prepare, sums, dict(buffers or {})
        self._counts = counts(self.batches)
        self._contiguous = self.device.type == "cuda" and not tf32 if channels_last is None else not channels_last
        self._tied = len(list(module.named_parameters(remove_duplicate=False))) > len(parameters)
        self._recurrent = any(isinstance(part, nn.RNNBase) for part in module.modules())
        self._compiled: CompiledProduct | None = None

    @property
    def size(self) -> int:
        """Number of weights, P."""
        return self.layout.size

    @property
    def examples(self) -> int:
        """Number of examples in the mean."""
        return sum(self._counts)

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.weights.device

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the weights."""
        return self.weights.dtype

    def on(self, batches: Sequence[Batch]) -> Objective:
        """The same model and loss on other data."""
        other = Objective(
            self.module,
            self._loss,
            batches,
            prepare=self._prepare,
            sums=self._sums,
            buffers=self._buffers,
            weights=self.weights,
            tf32=self.tf32,
            channels_last=not self._contiguous,
        )
        other._compiled = self._compiled
        return other

    def compile(self) -> None:
        """Compile Hessian-vector products for batches of the first batch's size; compilation happens at the first
        product.
        """
        self._compiled = CompiledProduct(
            lambda weights, vector, *batch: self._products(weights, [vector], *batch)[0], self._counts[0]
        )

    def subset(self, size: int, seed: int) -> Objective:
        """The same objective on ``size`` of its examples, drawn without replacement."""
        return self.on(picked(self.batches, draw(self.examples, size, seed)))

    @torch.no_grad()
    def loss(self, w: Tensor | None = None) -> Tensor:
        """The mean loss at ``w`` (default: the model's weights), a scalar tensor."""
        tensors = self._tensors(w)
        with self._evaluating():
            return self._mean(lambda batch: self._batch_loss(tensors, batch))

    def gradient(self, w: Tensor | None = None) -> Tensor:
        """The gradient of the mean loss at ``w``, [P]."""
        return self.loss_and_gradient(w)[1]

    @torch.enable_grad()
    def loss_and_gradient(self, w: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The mean loss at ``w`` and its gradient, from one pass over the data."""

        def both(batch: Batch) -> Tensor:
            leaves = self._leaves(w)
            loss = self._batch_loss(leaves, batch)
            pieces = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
            return torch.cat([loss.detach().reshape(1), self._flat(pieces)])

        with self._evaluating():
            loss_and_gradient = self._mean(both)
        return loss_and_gradient[0], loss_and_gradient[1:]

    def hessian_product(self, w: Tensor | None, v: Tensor) -> Tensor:
        """The Hessian of the mean loss at ``w`` times ``v``, [P]."""
        return self.hessian_products(w, v[None])[0]

    @torch.enable_grad()
    def hessian_products(self, w: Tensor | None, vectors: Tensor) -> Tensor:
        """The Hessian at ``w`` times each row of ``vectors``, [b, P]; all rows share one first derivative."""
        weights = list(self._tensors(w).values())
        along = [list(self.layout.views(vector).values()) for vector in vectors]

        def products(batch: Batch) -> Tensor:
            inputs, targets = self._moved(batch[0]), self._moved(batch[1])
            fast = [self._compiled(weights, vector, inputs, targets) for vector in along] if self._compiled else [None]
            rows = self._products(weights, along, inputs, targets) if None in fast else fast
            return torch.stack([self._flat(pieces) for pieces in rows if pieces is not None])

        with self._evaluating():
            return self._mean(products)

    def _products(
        self, weights: Sequence[Tensor], vectors: Sequence[Sequence[Tensor]], inputs: Any, targets: Any
    ) -> Sequence[Sequence[Tensor]]:
        """Hessian-vector products on one batch, as one tensor per parameter."""
        leaves = {
            name: tensor.detach().requires_grad_() for name, tensor in zip(self.layout.names, weights, strict=True)
        }
        places = list(leaves.values())
        first = torch.autograd.grad(
            self._batch_loss(leaves, (inputs, targets)), places, create_graph=True, materialize_grads=True
        )
        curved = [place for place, piece in enumerate(first) if piece.requires_grad]
        if not curved:  # the loss is linear in the weights
            return [[torch.zeros_like(place) for place in places] for _ in vectors]
        return [
            torch.autograd.grad(
                [first[place] for place in curved],
                places,
                [vector[place] for place in curved],
                retain_graph=number + 1 < len(vectors),
                materialize_grads=True,
            )
            for number, vector in enumerate(vectors)
        ]

    @torch.no_grad()
    def measured(self, w: Tensor | None = None) -> dict[str, float]:
        """The mean loss at ``w`` and all metrics of ``sums``, by name."""
        if self._sums is None:
            return {"loss": float(self.loss(w))}
        tensors = self._tensors(w)
        totals: dict[str, Any] = {}
        with self._evaluating():
            for inputs, targets in self.batches:
                targets = self._moved(targets)
                for name, value in self._sums(self._output(tensors, inputs), targets).items():
                    totals[name] = totals.get(name, 0) + value
        return {name: float(value) / self.examples for name, value in totals.items()}

    def check(self) -> None:
        """Raise a ``UserError`` if the loss or its gradient is not finite or not deterministic."""
        loss = float(self.loss())
        if not torch.isfinite(torch.tensor(loss)):
            raise UserError(f"the loss is {loss}, so its curvature is undefined; use a model that did not diverge")
        first_batch = self.on(self.batches[:1])
        first, second = first_batch.loss_and_gradient(), first_batch.loss_and_gradient()
        if not bool(first[1].isfinite().all()):
            raise UserError(
                "the gradient is not finite, so the curvature is undefined; use a model that did not diverge"
            )
        # GPU reductions are unordered and change the last digits; dropout or augmentation change the leading ones.
        slack = 1e-4 if self.dtype == torch.float64 else 1e-2
        for before, after in zip(first, second, strict=True):
            if float((before - after).norm()) > slack * float(before.norm()) + torch.finfo(self.dtype).eps:
                raise UserError(
                    f"the loss is not deterministic ({float(first[0]):.6g}, then {float(second[0]):.6g}); "
                    "disable randomness in its forward pass and its data, such as dropout or augmentation"
                )

    def _at(self, w: Tensor | None) -> Tensor:
        if w is None:
            return self.weights
        if w.shape != self.weights.shape:
            raise UserError(
                f"got a weight vector of shape {tuple(w.shape)}; expected ({self.size},), one entry per weight"
            )
        return w.detach()

    def _tensors(self, w: Tensor | None) -> dict[str, Tensor]:
        views = self.layout.views(self._at(w))
        return {name: view.contiguous() for name, view in views.items()} if self._contiguous else views

    def _leaves(self, w: Tensor | None) -> dict[str, Tensor]:
        return {name: tensor.detach().requires_grad_() for name, tensor in self._tensors(w).items()}

    def _flat(self, pieces: Sequence[Tensor]) -> Tensor:
        return self.layout.flatten(dict(zip(self.layout.names, pieces, strict=True))).detach()

    def _mean(self, of_batch: Callable[[Batch], Tensor]) -> Tensor:
        """The mean over batches, weighted by their numbers of examples."""
        total: Tensor | None = None
        for count, batch in zip(self._counts, self.batches, strict=True):
            part = of_batch(batch).mul_(count / self.examples)
            total = part if total is None else total.add_(part)
        assert total is not None
        return total

    def _batch_loss(self, tensors: Mapping[str, Tensor], batch: Batch) -> Tensor:
        inputs, targets = batch
        loss = self._loss(self._output(tensors, inputs), self._moved(targets))
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            kind = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise UserError(f"the loss returned {kind}; expected a scalar, the mean over the batch (reduction='mean')")
        return loss.reshape(())

    def _output(self, tensors: Mapping[str, Tensor], inputs: Any) -> Any:
        inputs = self._moved(inputs)
        if self._prepare is not None:
            inputs = mapped(inputs, self._prepare)
        if self._contiguous:
            inputs = mapped(inputs, Tensor.contiguous)
        named = inputs if isinstance(inputs, dict) else None
        arguments = () if named is not None else inputs if isinstance(inputs, tuple) else (inputs,)
        return functional_call(self.module, {**tensors, **self._buffers}, arguments, named, tie_weights=self._tied)

    def _moved(self, value: Any) -> Any:
        return mapped(value, lambda tensor: tensor.to(self.device, non_blocking=True))

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """The model in evaluation mode, in full precision, by kernels that can be differentiated twice; afterwards
        all is as before.
        """
        modes = [(part, part.training) for part in self.module.modules()]
        with ExitStack() as stack:
            for part, mode in modes:
                stack.callback(setattr, part, "training", mode)
            stack.enter_context(torch.autocast(self.device.type, enabled=False))
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
            if self.device.type == "cuda":
                stack.enter_context(rounding(self.tf32))
                # cuDNN's recurrent kernels have no second derivative, and no first one in evaluation mode.
                stack.callback(setattr, torch.backends.cudnn, "enabled", torch.backends.cudnn.enabled)
                torch.backends.cudnn.enabled &= not self._recurrent
            self.module.eval()
            stack.enter_context(TwiceDifferentiable())
            yield
