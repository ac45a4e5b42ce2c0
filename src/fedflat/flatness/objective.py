"""The mean loss of a model over fixed data as a function of its weights. Every flatness measurement evaluates it.

    f(w) = 1/n sum_j loss(model_w(x_j), y_j)

The model is in evaluation mode: BatchNorm uses its running statistics and dropout is off. Hessian-vector products use
reverse-over-reverse differentiation, ``H v = d/dw <df/dw, v>``. Unlike forward-over-reverse, it supports every layer
that torch can differentiate twice (GroupNorm in any memory format, fused LSTMs, attention), at the same cost.
During every evaluation, convolutions, GroupNorm and LayerNorm are replaced by versions with fast second derivatives.

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
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from fedflat.errors import UserError, require_instance
from fedflat.flatness.batches import (
    Batch,
    batch_sizes,
    batches_of,
    draw_positions,
    map_tensors,
    select_examples,
    select_rows,
)
from fedflat.flatness.checks import check_objective
from fedflat.flatness.curvature.compiled import CompiledProduct
from fedflat.flatness.curvature.gauss_newton import factored_products
from fedflat.flatness.curvature.second_order import TwiceDifferentiable
from fedflat.flatness.precision import tf32_allowed
from fedflat.gradients import gradients_enabled
from fedflat.models.layout import Layout

Loss = Callable[[Any, Any], Tensor]
"""Maps (model output, targets) to the mean loss over a batch, a scalar tensor."""
Sums = Callable[[Any, Any], Mapping[str, Tensor]]
"""Maps (model output, targets) to metrics summed over the examples of a batch, by name."""


class Objective:
    """The loss of a module on fixed data, evaluated at any flat weight vector of shape [P].

    Flat vectors store two-dimensional convolutions channels last, unlike ``torch.nn.utils.parameters_to_vector``. Use
    ``vector_of`` to flatten a module, ``layout.views`` to read the tensors of a vector by name, and
    ``layout.from_torch_order`` and ``layout.to_torch_order`` to convert vectors of torch.

    Args:
        module: the model; it is evaluated functionally and never modified.
        loss: maps (output, targets) to the mean loss over a batch.
        data: a pair of tensors (inputs, targets), a list of batches, or a DataLoader.
        batch_size: for a pair of tensors.
        prepare: applied to the inputs before the model, e.g. normalisation.
        sums: maps (output, targets) to sums over the batch by metric, ``loss`` included; default: the loss alone.
        buffers: tensors used in place of the module's own buffers, by name.
        weights: the point at which the objective is evaluated by default, [P]; default: the module's parameters.
        weight: maps targets to the weight of a batch in the mean, e.g. its tokens or the sum of its examples' class
            weights; default: its number of examples.
        tf32: whether a GPU may round float32 matrix products to TF32.
        channels_last: whether images and filters are stored channels last. Default: False on a GPU in full float32
            precision, because the exact kernels expect contiguous tensors; otherwise True.
    """

    def __init__(
        self,
        module: nn.Module,
        loss: Loss,
        data: Any,
        *,
        batch_size: int = 500,
        prepare: Callable[[Tensor], Tensor] | None = None,
        sums: Sums | None = None,
        buffers: Mapping[str, Tensor] | None = None,
        weights: Tensor | None = None,
        weight: Callable[[Any], Tensor] | None = None,
        tf32: bool = False,
        channels_last: bool | None = None,
    ) -> None:
        """Flatten the module's parameters, and read the data in batches."""
        require_instance(loss, "loss")
        self.module, self.tf32 = module, tf32
        self.layout = Layout.of_parameters(module)
        if not self.layout.names:
            raise UserError("this model has no trainable parameters, so there is nothing to measure")
        trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
        if any(parameter.dtype in (torch.float16, torch.bfloat16) for parameter in trainable):
            raise UserError(
                "this model has weights of 16 bits, too few to measure curvature; convert the model with "
                "model.float(), and floating-point data likewise"
            )
        self.weights = self.vector_of(module)
        if weights is not None:
            self._check_vector(weights)
            self.weights = weights.detach()
        self.batches: Sequence[Batch] = batches_of(data, batch_size)
        self._loss, self._prepare, self._sums, self._buffers = loss, prepare, sums, dict(buffers or {})
        self._batch_sizes, self._weight = batch_sizes(self.batches), weight
        if channels_last is None:  # exact float32 kernels on a GPU are written for contiguous images
            channels_last = self.device.type != "cuda" or tf32
        self._channels_last = channels_last
        named_parameters = module.named_parameters
        self._has_tied_weights = len(list(named_parameters(remove_duplicate=False))) > len(list(named_parameters()))
        self._is_recurrent = any(isinstance(part, nn.RNNBase) for part in module.modules())
        self._compiled: CompiledProduct | None = None

    def vector_of(self, module: nn.Module) -> Tensor:
        """Return the parameters of a module with this architecture as a flat vector [P]."""
        return self.layout.flatten({name: parameter.detach() for name, parameter in module.named_parameters()})

    @property
    def size(self) -> int:
        """Number P of weights."""
        return self.layout.size

    @property
    def examples(self) -> int:
        """Number of examples over which the loss is averaged."""
        return sum(self._batch_sizes)

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.weights.device

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the weights."""
        return self.weights.dtype

    @property
    def precision(self) -> str:
        """Precision of matrix products: ``tf32``, ``float32`` or ``float64``."""
        return "tf32" if self.tf32 and self.device.type == "cuda" else str(self.dtype).removeprefix("torch.")

    def with_data(self, batches: Sequence[Batch]) -> Objective:
        """Return an objective with the same model and loss on other data, given as batches (inputs, targets)."""
        objective = Objective(
            self.module,
            self._loss,
            batches,
            prepare=self._prepare,
            sums=self._sums,
            buffers=self._buffers,
            weights=self.weights,
            weight=self._weight,
            tf32=self.tf32,
            channels_last=self._channels_last,
        )
        objective._compiled = self._compiled  # compiled code does not depend on the data
        return objective

    def subset(self, size: int, seed: int) -> Objective:
        """Return the same objective on ``size`` of its examples, drawn without replacement with this seed."""
        return self.with_data(select_examples(self.batches, draw_positions(self.examples, size, seed)))

    def compile(self) -> None:
        """Compile Hessian-vector products at their first use, for batches with as many examples as the first batch."""

        def product(weights: Sequence[Tensor], vector: Sequence[Tensor], inputs: Any, targets: Any) -> Sequence[Tensor]:
            return self._batch_products(weights, [vector], inputs, targets)[0]

        self._compiled = CompiledProduct(product, examples=self._batch_sizes[0])

    @property
    def buffers(self) -> dict[str, Tensor]:
        """The model's floating-point buffers by name, e.g. BatchNorm statistics."""
        tensors = dict(self.module.named_buffers()) | self._buffers
        return {name: tensor.detach() for name, tensor in tensors.items() if tensor.is_floating_point()}

    @torch.no_grad()
    def loss(self, w: Tensor | None = None, buffers: Mapping[str, Tensor] | None = None) -> Tensor:
        """Return the mean loss at ``w`` [P] (default: the model's weights) as a scalar tensor.

        ``buffers`` replaces some of the model's buffers, by name.
        """
        parameters = {**self._parameters_at(w), **(buffers or {})}
        with self._evaluation_mode():
            return self._mean_over_batches(lambda batch: self._batch_loss(parameters, batch))

    def gradient(self, w: Tensor | None = None) -> Tensor:
        """Return the gradient [P] of the mean loss at ``w`` [P] (default: the model's weights)."""
        return self.loss_and_gradient(w)[1]

    @gradients_enabled()
    def loss_and_gradient(self, w: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the mean loss at ``w`` [P] (default: the model's weights) and its gradient [P], from one pass."""

        def batch_loss_and_gradient(batch: Batch) -> Tensor:
            """Return the loss of one batch followed by its gradient, [1 + P]."""
            leaves = _leaves(self._parameters_at(w))
            loss = self._batch_loss(leaves, batch)
            if not loss.requires_grad:
                raise UserError(
                    "the loss cannot be differentiated by the model's weights; expected a smooth loss such as "
                    "cross_entropy, not an accuracy"
                )
            gradients = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
            # As one vector, so that both are averaged over batches together.
            return torch.cat([loss.detach().reshape(1), self._flatten(gradients)])

        with self._evaluation_mode():
            loss_and_gradient = self._mean_over_batches(batch_loss_and_gradient)
        return loss_and_gradient[0], loss_and_gradient[1:]

    def hessian_product(self, w: Tensor | None, v: Tensor) -> Tensor:
        """Return the product [P] of the Hessian of the mean loss at ``w`` [P] with the vector ``v`` [P]."""
        return self.hessian_products(w, v[None])[0]

    @gradients_enabled()
    def hessian_products(self, w: Tensor | None, vectors: Tensor) -> Tensor:
        """Return the products of the Hessian with several vectors, [b, P].

        Compiled code runs once per vector. Without it, all vectors share one gradient computation per batch.

        Args:
            w: the point at which the Hessian is taken, [P]; None means the model's weights.
            vectors: the vectors as rows, [b, P].
        """
        weights = list(self._parameters_at(w).values())
        vector_tensors = [list(self.layout.views(vector).values()) for vector in vectors]

        def flat_products(batch: Batch) -> Tensor:
            """Return one batch's Hessian times each of ``vector_tensors``, [b, P], with compiled code if possible."""
            inputs, targets = self._to_device(batch[0]), self._to_device(batch[1])
            products: list[Sequence[Tensor]] = []
            if self._compiled:
                compiled = [self._compiled(weights, vector, inputs, targets) for vector in vector_tensors]
                products = [product for product in compiled if product is not None]
            if len(products) < len(vector_tensors):  # no compiled code, or none for batches of this shape
                products = self._batch_products(weights, vector_tensors, inputs, targets)
            return torch.stack([self._flatten(product) for product in products])

        with self._evaluation_mode():
            return self._mean_over_batches(flat_products)

    def _batch_products(
        self, weights: Sequence[Tensor], vectors: Sequence[Sequence[Tensor]], inputs: Any, targets: Any
    ) -> list[Sequence[Tensor]]:
        """Return the products of one batch's Hessian with each vector.

        Each product is the gradient of <gradient, vector>, so the gradient is computed once, with its graph.

        Args:
            weights: the point at which the Hessian is taken, one tensor per parameter.
            vectors: the vectors, each with one tensor per parameter.
            inputs: the batch's inputs, on the device of the weights.
            targets: the batch's targets, likewise.

        Returns:
            The products, each with one tensor per parameter.
        """
        leaves = _leaves(dict(zip(self.layout.names, weights, strict=True)))
        parameters = list(leaves.values())
        loss = self._batch_loss(leaves, (inputs, targets))
        gradients = torch.autograd.grad(loss, parameters, create_graph=True, materialize_grads=True)
        # The gradient of a parameter in which the loss is linear is constant, so it cannot be differentiated.
        varying = [index for index, gradient in enumerate(gradients) if gradient.requires_grad]
        if not varying:
            return [[torch.zeros_like(parameter) for parameter in parameters] for _ in vectors]
        products: list[Sequence[Tensor]] = []
        for vector in vectors:
            product = torch.autograd.grad(
                [gradients[index] for index in varying],
                parameters,
                [vector[index] for index in varying],
                retain_graph=len(products) + 1 < len(vectors),  # free the graph with the last vector
                materialize_grads=True,
            )
            products.append(product)
        return products

    @gradients_enabled()
    def gauss_newton_products(self, w: Tensor | None, vectors: Tensor, empirical_fisher: bool = False) -> Tensor:
        """Return the products [b, P] of the Gauss-Newton or empirical Fisher matrix at ``w`` [P] with ``vectors``."""
        leaves = _leaves(self._parameters_at(w))
        vector_tensors = [list(self.layout.views(vector).values()) for vector in vectors]

        shares = iter(self._example_shares if empirical_fisher else [None] * len(self.batches))

        def flat_products(batch: Batch) -> Tensor:
            """Return one batch's matrix times each vector, [b, P]; batches come in order."""
            products = factored_products(
                self._output(leaves, batch[0]),
                lambda output: self._loss(output, self._to_device(batch[1])),
                list(leaves.values()),
                vector_tensors,
                next(shares),
            )
            return torch.stack([self._flatten(product) for product in products])

        with self._evaluation_mode():
            return self._mean_over_batches(flat_products)

    @torch.no_grad()
    def metrics(self, w: Tensor | None = None) -> dict[str, float]:
        """Return the metrics at ``w`` [P] (default: ``weights``) by name, as means over all examples.

        They are the metrics that ``sums`` computes, or the loss alone if the objective has no ``sums``.
        """
        if self._sums is None:
            return {"loss": float(self.loss(w))}
        parameters = self._parameters_at(w)
        totals: dict[str, Any] = {}
        with self._evaluation_mode():
            for inputs, targets in self.batches:
                for name, value in self._sums(self._output(parameters, inputs), self._to_device(targets)).items():
                    totals[name] = totals.get(name, 0) + value
        return {name: float(value) / self.examples for name, value in totals.items()}

    def check(self) -> None:
        """Raise a ``UserError`` unless loss and gradient are finite and deterministic, and the loss is a mean."""
        check_objective(self)

    def _parameters_at(self, w: Tensor | None) -> dict[str, Tensor]:
        """Split the flat vector ``w`` [P] (default: the model's weights) into parameters by name."""
        if w is not None:
            self._check_vector(w)
        views = self.layout.views(self.weights if w is None else w.detach())  # flat vectors store filters channels last
        return views if self._channels_last else {name: view.contiguous() for name, view in views.items()}

    def _check_vector(self, w: Tensor) -> None:
        """Raise a ``UserError`` if ``w`` does not have shape [P], or if it is in torch's order.

        Only vectors near the model's weights reveal their order: they are nearer to the weights in the same order.
        """
        if w.shape != self.weights.shape:
            raise UserError(
                f"got a weight vector of shape {tuple(w.shape)}; expected ({self.size},), one entry per weight"
            )
        if self.layout.has_torch_order:
            return
        w, torch_weights = w.detach().to(self.weights), self.layout.to_torch_order(self.weights)
        distance, torch_distance = torch.dist(w, self.weights), torch.dist(w, torch_weights)
        if bool(2 * torch_distance < distance):
            raise UserError(
                "this weight vector is in the order of torch.nn.utils.parameters_to_vector; "
                "convert it with objective.layout.from_torch_order(vector)"
            )

    def _flatten(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return one tensor per parameter as a flat vector [P]."""
        return self.layout.flatten(dict(zip(self.layout.names, tensors, strict=True))).detach()

    def _mean_over_batches(self, function: Callable[[Batch], Tensor]) -> Tensor:
        """Return the mean of ``function(batch)``, weighted by the batches' numbers of examples, or by ``weight``."""
        total: Tensor | None = None  # its shape is known after the first batch
        for share, batch in zip(self.batch_shares, self.batches, strict=True):
            weighted = function(batch).mul_(share)
            total = weighted if total is None else total.add_(weighted)
        assert total is not None
        return total

    @cached_property
    def batch_shares(self) -> list[float]:
        """The weight of each batch in the mean; all add up to 1."""
        weight = self._weight
        weights = [float(weight(targets)) for _, targets in self.batches] if weight else self._batch_sizes
        total = sum(weights)
        if not total >= 0:
            raise UserError(f"the weights of the batches add up to {total:g}; expected a positive sum")
        return [batch_weight / (total or 1.0) for batch_weight in weights]  # images may have no labelled pixel

    @cached_property
    def _example_shares(self) -> list[Tensor]:
        """For each batch, the share of each example in its mean loss [examples]."""
        shares = []
        for (_, targets), size in zip(self.batches, self._batch_sizes, strict=True):
            weights = [1.0] * size
            if self._weight is not None:
                weights = [float(self._weight(select_rows(targets, torch.tensor([row])))) for row in range(size)]
            shares.append(self.weights.new_tensor(weights) / (sum(weights) or 1.0))  # a batch may have no weight
        return shares

    def _batch_loss(self, parameters: Mapping[str, Tensor], batch: Batch) -> Tensor:
        """Return the mean loss over one batch (inputs, targets), for parameters by name, as a scalar tensor."""
        inputs, targets = batch
        loss = self._loss(self._output(parameters, inputs), self._to_device(targets))
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            kind = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise UserError(f"the loss returned {kind}; expected a scalar, the mean over the batch (reduction='mean')")
        return loss.reshape(())

    def _output(self, parameters: Mapping[str, Tensor], inputs: Any) -> Any:
        """Return the model's output with the given parameters, by name, in place of its own.

        Inputs are a tensor, a tuple (positional arguments of the model) or a mapping (keyword arguments).
        """
        inputs = self._to_device(inputs)
        if self._prepare is not None:
            inputs = map_tensors(inputs, self._prepare)
        if not self._channels_last:
            inputs = map_tensors(inputs, Tensor.contiguous)
        keywords = inputs if isinstance(inputs, dict) else None
        arguments = () if keywords is not None else inputs if isinstance(inputs, tuple) else (inputs,)
        tensors = {**self._buffers, **parameters}  # parameters may include buffers of another model
        return functional_call(self.module, tensors, arguments, keywords, tie_weights=self._has_tied_weights)

    def _to_device(self, value: Any) -> Any:
        return map_tensors(value, lambda tensor: tensor.to(self.device, non_blocking=True))

    @contextmanager
    def _evaluation_mode(self) -> Iterator[None]:
        """Context with the model in evaluation mode, without autocast, and with twice differentiable kernels.

        All settings are restored afterwards.
        """
        with ExitStack() as stack:
            for part in self.module.modules():
                stack.callback(setattr, part, "training", part.training)
            stack.enter_context(torch.autocast(self.device.type, enabled=False))
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
            if self.device.type == "cuda":
                stack.enter_context(tf32_allowed(self.tf32))
                # cuDNN's recurrent layers cannot be differentiated in evaluation mode, and never twice.
                stack.callback(setattr, torch.backends.cudnn, "enabled", torch.backends.cudnn.enabled)
                torch.backends.cudnn.enabled &= not self._is_recurrent
            self.module.eval()
            stack.enter_context(TwiceDifferentiable())
            stack.enter_context(self._explained_data_types())
            yield

    @contextmanager
    def _explained_data_types(self) -> Iterator[None]:
        """Context that turns torch's errors about data types into a ``UserError`` if those of inputs and model differ.

        Models that convert their inputs by themselves raise none.
        """
        try:
            yield
        except (RuntimeError, ValueError) as error:  # ValueError: of recurrent layers
            prepare, dtypes = self._prepare or Tensor.detach, set[torch.dtype]()
            map_tensors(self.batches[0][0], lambda tensor: dtypes.add(prepare(tensor).dtype))
            given = next((dtype for dtype in dtypes if dtype.is_floating_point and dtype != self.dtype), None)
            if given is None or "type" not in str(error):
                raise
            names = [str(dtype).removeprefix("torch.") for dtype in (given, self.dtype)]
            method = "double" if self.dtype == torch.float64 else "float"
            raise UserError(
                f"the inputs are {names[0]} but the model is {names[1]}; convert the inputs with .{method}()"
            ) from error


def _leaves(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the parameters as leaves of a new graph, so that a loss can be differentiated with respect to them."""
    return {name: tensor.detach().requires_grad_() for name, tensor in parameters.items()}
