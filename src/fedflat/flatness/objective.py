"""The mean loss of a model over fixed data, as a function of its weights: what every measurement of flatness looks at.

    f(w) = 1/n sum_j loss(model_w(x_j), y_j)

The model is in evaluation mode, so that BatchNorm takes its running statistics and nothing is dropped out. Hessian-vector products are
reverse over reverse, ``H v = d/dw <df/dw, v>``: unlike forward over reverse this passes through every layer that torch can differentiate
twice (GroupNorm in any memory order, fused LSTMs, attention), at the same number of operations.

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
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from fedflat.errors import UserError
from fedflat.flatness.batches import Batch, batches_of, counts, draw, mapped, picked
from fedflat.flatness.curvature.compiled import CompiledProduct
from fedflat.flatness.curvature.second_order import TwiceDifferentiable
from fedflat.flatness.precision import rounding
from fedflat.models.layout import Layout

Loss = Callable[[Any, Any], Tensor]
"""The mean loss of a batch, from the model's output and the targets."""
Sums = Callable[[Any, Any], Mapping[str, Tensor]]
"""Metrics summed over the examples of a batch, from the model's output and the targets."""


class Objective:
    """A loss to look at: of a module, on fixed data, at any flat vector of weights.

    ``data`` is a pair of tensors (cut into batches of ``batch`` examples), a list of batches or a DataLoader; ``prepare`` turns inputs into
    what the model takes. ``buffers`` stand in for the module's own. ``sums`` gives the metrics of ``measured``. On a GPU products are in
    full float32 unless ``tf32`` allows rounding; images and filters then lie channel by channel, for which kernels of full precision are
    made, unless ``channels_last`` says otherwise.
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
            raise UserError("this model has no parameters that are trained, so that there is nothing to measure")
        own = {name: p.detach() for name, p in module.named_parameters()}
        self.weights = self.layout.flatten(own) if weights is None else weights.detach()
        self.batches: Sequence[Batch] = batches_of(data, batch)
        self._loss, self._prepare, self._sums, self._buffers = loss, prepare, sums, dict(buffers or {})
        self._counts = counts(self.batches)
        self._contiguous = self.device.type == "cuda" and not tf32 if channels_last is None else not channels_last
        self._tied = len(list(module.named_parameters(remove_duplicate=False))) > len(own)
        self._recurrent = any(isinstance(part, nn.RNNBase) for part in module.modules())
        self._compiled: CompiledProduct | None = None

    # --- what it is --------------------------------------------------------------------------------------------------------------

    @property
    def size(self) -> int:
        """How many weights there are: P."""
        return self.layout.size

    @property
    def examples(self) -> int:
        """How many examples the loss is the mean over."""
        return sum(self._counts)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.weights.device

    @property
    def dtype(self) -> torch.dtype:
        """The precision of the weights."""
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
        """Have Hessian-vector products on batches as large as the first compiled, when the first one is asked for."""
        self._compiled = CompiledProduct(
            lambda weights, vector, *batch: self._products(weights, [vector], *batch)[0], self._counts[0]
        )

    def subset(self, size: int, seed: int) -> Objective:
        """The same on ``size`` of its examples, drawn without replacement by a seed."""
        return self.on(picked(self.batches, draw(self.examples, size, seed)))

    # --- values and derivatives --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def loss(self, w: Tensor | None = None) -> Tensor:
        """The mean loss at w, by default at the model's own weights."""
        tensors = self._tensors(w)
        with self._evaluating():
            return self._mean(lambda batch: self._batch_loss(tensors, batch))

    def gradient(self, w: Tensor | None = None) -> Tensor:
        """The gradient of the mean loss at w."""
        return self.loss_and_gradient(w)[1]

    @torch.enable_grad()
    def loss_and_gradient(self, w: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The mean loss at w and its gradient, in one pass."""

        def both(batch: Batch) -> Tensor:
            leaves = self._leaves(w)
            loss = self._batch_loss(leaves, batch)
            pieces = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
            return torch.cat([loss.detach().reshape(1), self._flat(pieces)])

        with self._evaluating():
            found = self._mean(both)
        return found[0], found[1:]

    def hessian_product(self, w: Tensor | None, v: Tensor) -> Tensor:
        """The Hessian of the mean loss at w, times a vector v."""
        return self.hessian_products(w, v[None])[0]

    @torch.enable_grad()
    def hessian_products(self, w: Tensor | None, vectors: Tensor) -> Tensor:
        """The Hessian at w times each row of a matrix; the first derivative is taken once for all of them."""

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
        """The products on one batch, tensor by tensor."""
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
        """The mean loss at w, and every metric where the objective knows some."""
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

    # --- whether it can be measured ----------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Refuse a loss that is not finite, and one that differs from one evaluation to the next; each told in a sentence."""
        loss = float(self.loss())
        if not torch.isfinite(torch.tensor(loss)):
            raise UserError(
                f"the loss of this model is {loss}, so that it has no curvature; take a model that did not diverge"
            )
        one = self.on(self.batches[:1])
        first, second = one.loss_and_gradient(), one.loss_and_gradient()
        if not bool(first[1].isfinite().all()):
            raise UserError(
                "the gradient of this model is not finite, so that it has no curvature; take a model that did not diverge"
            )
        # Sums on a GPU may be taken in any order, which changes the last digits; dropout or augmentation change the first ones.
        slack = 1e-4 if self.dtype == torch.float64 else 1e-2
        for before, after in zip(first, second, strict=True):
            if float((before - after).norm()) > slack * float(before.norm()) + torch.finfo(self.dtype).eps:
                raise UserError(
                    f"the loss of this model is not the same twice ({float(first[0]):.6g}, then {float(second[0]):.6g}), so that no number "
                    "would mean anything; switch off what is random in its forward pass or in its data, such as dropout or augmentation"
                )

    # --- small things ------------------------------------------------------------------------------------------------------------

    def _at(self, w: Tensor | None) -> Tensor:
        if w is None:
            return self.weights
        if w.shape != self.weights.shape:
            raise UserError(
                f"a vector of shape {tuple(w.shape)} is no point of this model; expected {self.size} numbers"
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
        """The mean over batches, each weighted by its examples."""
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
            found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise UserError(
                f"the loss of a batch is {found} here; expected one number, the mean over its examples (reduction='mean')"
            )
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
        """The model in evaluation mode, in full precision, by kernels that can be differentiated twice; afterwards all is as before."""
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
