"""The optimisation problem of a federation: a model, a task and data, and the gradient at any flat weight vector.

Weights live in flat vectors [parameters] of ``Problem.dtype`` on ``Problem.device``; ``Problem.layout`` maps them to
the model's tensors. Floating-point buffers (BatchNorm statistics) live in flat vectors [buffers], mapped by
``Problem.buffer_layout``. Integer buffers (BatchNorm's batch counters) are kept by name. A local step calls ``batch``
to build its batch and ``loss_and_gradient`` to differentiate it (``engines/round/client.py``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from math import ceil
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedflat.algorithms.teacher import Teacher
from fedflat.data import Augmentation, Dataset, Examples, normalise
from fedflat.data.batches import Batch, BatchLoader, move_examples
from fedflat.engines.problem.kernels import ChainKernels, KernelError, check_kernels, kernel_gradient
from fedflat.engines.problem.layer_chain import ChainSource, is_narrow, source_of_model
from fedflat.engines.problem.objective import PassResult, batch_loss, distillation_loss
from fedflat.engines.problem.parameters import (
    FrozenParameters,
    FunctionalCall,
    batch_counters,
    fails_in_channels_last,
    first_names,
    full_precision_parameters,
)
from fedflat.engines.problem.task import Task
from fedflat.flatness.precision import at_own_precision
from fedflat.models.layout import Layout


@dataclass(eq=False)
class Problem:
    """A model whose weights live in flat vectors, the task it is trained for, and the data.

    Args:
        model: the network. It is moved to ``device`` and ``dtype``; its own weights are the initial ones.
        task: loss and metrics.
        data: the training data of all clients; clients refer to positions in it.
        augmentation: random transformations of training inputs.
        dtype: precision of weights, losses and updates.
        arithmetic: lower precision of the forward and backward pass, if any.
        device: where to compute; the data are moved there.
        tf32: whether a GPU may round float32 matrix products to TF32.
        evaluation_batch: batch size of evaluations.
        evaluation_sets: sets to evaluate on, by name: the test set, and the validation split if there is one.
        batch_statistics: whether evaluation normalises by each batch's statistics, as SiLoBN does for unseen clients.

    Attributes:
        layout: maps flat weights [parameters] to the trained tensors.
        buffer_layout: maps flat statistics [buffers] to the floating-point buffers that training changes.
        whole_layout: maps a vector of weights followed by statistics to both kinds of tensors.
        frozen: parameters and statistics that are not trained.
        kernel_source: source of fedflat's own kernels for one batch size, if they are used.
    """

    model: nn.Module
    task: Task
    data: Dataset
    augmentation: Augmentation
    dtype: torch.dtype = torch.float32
    arithmetic: torch.dtype | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    evaluation_batch: int = 500
    evaluation_sets: dict[str, Examples] = field(default_factory=dict)
    batch_statistics: bool = False
    tf32: bool = False
    kernel_source: ChainSource | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        """Move model and data to the device, derive the layouts of flat vectors, and prepare what all steps reuse."""
        self.model.to(self.device, self.dtype)
        self.data = replace(self.data, train=move_examples(self.data.train, self.device, self.dtype))
        held_out = self.evaluation_sets.items()
        self.evaluation_sets = {name: move_examples(each, self.device, self.dtype) for name, each in held_out}
        self.layout = Layout.of_parameters(self.model)
        has_convolutions = any(parameter.ndim == 4 for parameter in self.model.parameters())
        self.channels_last = has_convolutions and not fails_in_channels_last(self.model)
        self.frozen = FrozenParameters(self.model, self.arithmetic, self.channels_last)
        self.buffer_layout = Layout.of_buffers(self.model, self.frozen.buffers)
        # Kept on the device, because a step captured as a CUDA graph must not copy from the host.
        self._mean = torch.tensor(self.data.mean, dtype=self.dtype, device=self.device)
        self._std = torch.tensor(self.data.std, dtype=self.dtype, device=self.device)
        self.whole_layout = Layout(
            self.layout.names + self.buffer_layout.names, self.layout.shapes + self.buffer_layout.shapes
        )
        self._first_names = first_names(self.model)  # of tied parameters, which have several names
        self._tied = any(name != first for name, first in self._first_names.items())
        self._functional_call = FunctionalCall(self.model)
        self._counters = batch_counters(self.model)
        self._full_precision = full_precision_parameters(self.model) & set(self.layout.names)
        self._cpu_weights_and_views: tuple[Tensor, dict[str, Tensor]] | None = None
        self._kernels: ChainKernels | None = None
        self._loader: BatchLoader | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Everything except scratch memory and the compiled kernels, which each worker process loads for itself."""
        return {**vars(self), "_cpu_weights_and_views": None, "_kernels": None}

    def suits_kernels(self, batch_size: int) -> bool:
        """Whether fedflat's own kernels support batches of this size and are faster than torch."""
        return self.arithmetic is None and is_narrow(self.model, batch_size) and self._source(batch_size) is not None

    def use_kernels(self, batch_size: int) -> None:
        """Compute the gradients of batches of this size with fedflat's own kernels, if they support the model.

        The kernels are compiled and compared with torch here, and only loaded in worker processes. If they do not work,
        a ``KernelError`` is raised, and torch computes the gradients.
        """
        source = self._source(batch_size)
        if source is None or batch_size > len(self.data.train):
            return
        inputs = self.normalised(self.data.train.take(torch.arange(batch_size)).inputs)
        self.model.train()
        check_kernels(source, partial(self.output, buffers={}), self.initial_state()[0], self.layout.sizes, inputs)
        self.kernel_source = source
        self._loader = None  # the kernels have a memory layout of their own

    def _source(self, batch_size: int) -> ChainSource | None:
        return source_of_model(self.model, self.data.input_shape, self.layout.offsets, batch_size)

    def prepare_batches(self) -> BatchLoader:
        """Return the batch loader; the first call converts the training images to its memory layout.

        Engines call this first, so that worker processes do not convert them again and compiled steps do not do it.
        """
        if self._loader is None:
            dtype, channels_last = self.arithmetic or self.dtype, self.channels_last and self.kernel_source is None
            self._loader = BatchLoader(self.data.train, self.augmentation, self._mean, self._std, dtype, channels_last)
            self.data = replace(self.data, train=self._loader.examples)
        return self._loader

    def initial_state(self) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return the weights and buffers that the network itself holds; a run starts from them.

        Returns:
            The trained weights as a flat vector [parameters], the floating-point buffers (BatchNorm statistics) as a
            flat vector [buffers], and copies of the integer buffers by name.
        """
        weights = self.layout.flatten({name: p.detach() for name, p in self.model.named_parameters()})
        buffers = dict(self.model.named_buffers())
        statistics = self.buffer_layout.flatten(buffers).to(self.device, self.dtype)
        integer_buffers = {name: b.clone() for name, b in buffers.items() if not b.is_floating_point()}
        return weights, statistics, integer_buffers

    def state_dict(self, weights: Tensor, buffers: Tensor, integer_buffers: dict[str, Tensor]) -> dict[str, Tensor]:
        """A model as a torch ``state_dict``, frozen tensors included.

        A tied tensor has several names in the model, but only the first one in the flat vectors; it is copied for
        each of the others.

        Args:
            weights: flat weights [parameters].
            buffers: flat floating-point buffers [buffers].
            integer_buffers: integer buffers by name.
        """
        tensors = {
            **self.frozen.tensors(),
            **self.layout.views(weights),
            **self.buffer_layout.views(buffers),
            **integer_buffers,
        }
        return {
            name: tensors[first] if name == first else tensors[first].clone()
            for name, first in self._first_names.items()
        }

    def set_training_mode(self) -> None:
        """Switch the model to training mode, except frozen BatchNorm layers."""
        self.model.train()
        self.frozen.use_running_statistics()

    def train_examples(self, indices: np.ndarray) -> Examples:
        """The training examples at ``indices``, neither augmented nor normalised."""
        return self.data.train.take(torch.from_numpy(indices).to(self.device))

    def normalised(self, raw: Tensor) -> Tensor:
        """Raw inputs as the model takes them: normalised, not augmented."""
        return self._to_memory_format(normalise(raw, self._mean, self._std, self.arithmetic or self.dtype))

    def _to_memory_format(self, inputs: Tensor) -> Tensor:
        """Convert images to the memory format of the model's convolutions."""
        if self.channels_last and inputs.ndim == 4:
            return inputs.contiguous(memory_format=torch.channels_last)
        return inputs

    def batch(self, positions: Tensor, draws: dict[str, Tensor]) -> Batch:
        """The training examples at ``positions`` as an augmented batch.

        With mixup, inputs are mixtures of two examples each, and the batch holds the targets of both.

        Args:
            positions: int64 positions in the whole training set [batch].
            draws: random numbers of the augmentation for this batch, by name.
        """
        loader = self.prepare_batches()
        inputs, targets = loader.inputs(positions, draws), loader.targets(positions, draws)
        mixing = self.augmentation.mix(draws, len(positions))
        if mixing is None:
            return Batch(inputs, targets)
        share, partners = mixing  # weight of the first example, and the position of the second one in the batch
        return Batch(inputs, targets, targets[partners], share)

    def output(self, vector: Tensor, buffers: dict[str, Tensor], inputs: Tensor, model: nn.Module | None = None) -> Any:
        """The model's output with weights from ``vector`` [parameters].

        Args:
            vector: flat weights.
            buffers: floating-point and integer buffers by name; changed in place in training mode.
            inputs: normalised inputs.
            model: a module to call instead of the problem's model, with tensors of the same names.

        Returns:
            A tensor; in training, a tuple of tensors for a model with several heads.
        """
        tensors = {**self.frozen.low_precision, **self._views(vector), **buffers}
        return self._to_loss_precision(functional_call(model or self.model, tensors, (inputs,), tie_weights=self._tied))

    def _views(self, vector: Tensor) -> dict[str, Tensor]:
        """The parameters in ``vector`` [parameters] by name, in the precision of the forward pass."""
        if self.arithmetic is None:
            return self.layout.views(vector)
        views = self.layout.views(vector.to(self.arithmetic))
        if self._full_precision:
            whole = self.layout.views(vector)
            views |= {name: whole[name] for name in self._full_precision}
        return views

    def _to_loss_precision(self, output: Any) -> Any:
        """Convert an output, a tensor or a tuple of them, from ``arithmetic`` to ``dtype``."""
        if self.arithmetic is None:
            return output
        return tuple(head.to(self.dtype) for head in output) if isinstance(output, tuple) else output.to(self.dtype)

    def loss_and_gradient(
        self, vector: Tensor, buffers: dict[str, Tensor], batch: Batch, teacher: Teacher | None = None
    ) -> tuple[Tensor, Tensor]:
        """Mean loss of a batch (scalar) and its gradient [parameters] at the weights ``vector`` [parameters].

        ``buffers`` (by name) are changed in place: BatchNorm statistics are updated as in ordinary training. With a
        ``teacher``, the gradient is that of the loss with its term; the returned loss is that of the task.
        """
        if (kernels := self._kernels_for(batch)) is not None:
            return kernel_gradient(kernels, self.task, vector, batch, teacher)
        leaves = self._leaves_for(vector)
        tensors = {**self.frozen.low_precision, **leaves, **buffers}
        inputs = self._to_memory_format(batch.inputs)
        output = self._to_loss_precision(self._functional_call.call(tensors, inputs))
        loss = objective = batch_loss(self.task, output, batch)
        if teacher is not None:
            with torch.no_grad():
                weights = self._views(teacher.model.to(self.dtype))
                copies = {name: buffer.clone() for name, buffer in buffers.items()}
                teacher_output = self._functional_call.call({**tensors, **weights, **copies}, inputs)
                teacher_output = self._to_loss_precision(teacher_output)
            objective = distillation_loss(self.task, loss, output, teacher_output, batch, teacher)
        with self._functional_call.replaced(tensors):  # gradient checkpointing calls layers again in the backward pass
            gradients = torch.autograd.grad(objective, list(leaves.values()), materialize_grads=True)
        return loss.detach(), self.layout.flatten(dict(zip(leaves, gradients, strict=True))).to(vector.dtype)

    def _kernels_for(self, batch: Batch) -> ChainKernels | None:
        """fedflat's own kernels, if they compute the gradient of this batch; otherwise None."""
        if self.kernel_source is None or not self.kernel_source.fits(batch.inputs):
            return None
        if self._kernels is None:
            try:
                self._kernels = ChainKernels(self.kernel_source)
            except KernelError as error:  # torch's kernels would give other results than the other processes
                raise KernelError(f"{error} in a worker process; continue with --workers 1") from None
        return self._kernels

    def _leaves_for(self, vector: Tensor) -> dict[str, Tensor]:
        """The weights in ``vector`` [parameters] as tensors by name, for which autograd computes gradients.

        A small model reuses its tensors on a CPU; otherwise they are views of ``vector``, which it must not change.
        """
        # On a GPU, several clients train at once and must not share tensors. Large tensors take longer to copy.
        if vector.is_cuda or self._full_precision or self.layout.size > 2**16 * len(self.layout.names):
            return _leaves(self._views(vector))
        if self._cpu_weights_and_views is None:
            flat = torch.empty_like(vector, dtype=self.arithmetic or vector.dtype)
            self._cpu_weights_and_views = flat, _leaves(self.layout.views(flat))
        flat, leaves = self._cpu_weights_and_views
        flat.copy_(vector)
        return leaves

    def functional_pass(
        self,
        vector: Tensor,
        statistics: Tensor,
        integer_buffers: dict[str, Tensor],
        batch: Batch,
        model: nn.Module | None = None,
        teacher: Teacher | None = None,
    ) -> PassResult:
        """``loss_and_gradient`` as a pure function, which can be compiled: nothing is changed in place.

        Args:
            vector: flat weights [parameters].
            statistics: flat floating-point buffers [buffers].
            integer_buffers: integer buffers by name.
            batch: the batch.
            model: a module to call instead of the problem's model, with tensors of the same names.
            teacher: adds a distillation term to the loss that is differentiated, or replaces it by that term.
        """

        def output_and_buffers(point: Tensor) -> tuple[Any, Tensor, dict[str, Tensor]]:
            """The output at ``point`` and the updated statistics and counters, which are copies of the given ones."""
            new_statistics = statistics.clone()
            new_counters = {name: integer_buffers[name].clone() for name in self._counters}
            buffers = {**self.buffer_layout.views(new_statistics), **integer_buffers, **new_counters}
            return self.output(point, buffers, batch.inputs, model), new_statistics, new_counters

        def loss_and_buffers(point: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor, dict[str, Tensor]]]:
            """The loss to differentiate and, as auxiliary output, the task's loss and the updated buffers."""
            output, new_statistics, new_counters = output_and_buffers(point)
            loss = objective = batch_loss(self.task, output, batch)
            if teacher is not None:
                teacher_output, *_ = output_and_buffers(teacher.model)
                objective = distillation_loss(self.task, loss, output, teacher_output, batch, teacher)
            return objective, (loss, new_statistics, new_counters)

        gradient, (loss, new_statistics, new_counters) = torch.func.grad(loss_and_buffers, has_aux=True)(vector)
        return PassResult(gradient, loss, new_statistics, new_counters)

    def predict(
        self, vector: Tensor, buffers: dict[str, Tensor], raw: Tensor, batch_statistics: bool | None = None
    ) -> Tensor:
        """The model's output in evaluation mode on ``raw`` inputs, which are normalised first.

        ``vector`` holds the flat weights, and ``buffers`` all buffers by name (see ``predict_normalised``).
        """
        return self.predict_normalised(vector, buffers, self.normalised(raw), batch_statistics)

    @torch.no_grad()
    @at_own_precision
    def predict_normalised(
        self, vector: Tensor, buffers: dict[str, Tensor], inputs: Tensor, batch_statistics: bool | None = None
    ) -> Tensor:
        """The model's output in evaluation mode on inputs that are already normalised.

        Args:
            vector: flat weights [parameters].
            buffers: floating-point and integer buffers by name; left unchanged.
            inputs: normalised inputs; the first dimension is the batch.
            batch_statistics: whether BatchNorm layers normalise by the batch's statistics; default: the problem's
                setting. Frozen layers always use their running statistics.
        """
        self.model.eval()
        if self.batch_statistics if batch_statistics is None else batch_statistics:
            buffers = {name: b.clone() for name, b in buffers.items()}  # the forward pass updates them
            for norm in self._norms():
                norm.train()
            self.frozen.use_running_statistics()
        output: Tensor = self.output(vector, buffers, inputs)
        return output

    def _norms(self) -> list[nn.modules.batchnorm._BatchNorm]:
        return [module for module in self.model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]

    def metric_sums(self, vector: Tensor, buffers: dict[str, Tensor], examples: Examples) -> dict[str, Tensor]:
        """The task's metrics, summed over ``examples``; evaluates the model as ``predict`` does."""
        return self.task.sums(self.predict(vector, buffers, examples.inputs), examples.targets)

    @torch.no_grad()
    @at_own_precision
    def estimate_buffers(
        self, vector: Tensor, integer_buffers: dict[str, Tensor], batches: Iterable[Tensor] | None = None
    ) -> Tensor:
        """Estimate BatchNorm statistics [buffers] anew for given weights, as plain means over batches.

        Args:
            vector: flat weights [parameters].
            integer_buffers: integer buffers by name; left unchanged.
            batches: normalised inputs; by default the whole training set.
        """
        norms = self._norms()
        original_momenta = [norm.momentum for norm in norms]
        flat = torch.zeros(self.buffer_layout.size, dtype=self.dtype, device=self.device)
        buffers = {
            **self.buffer_layout.views(flat),
            **{name: torch.zeros_like(value) for name, value in integer_buffers.items()},
        }
        if batches is None:
            batches = (
                self.normalised(self.data.train.take(part).inputs)
                for part in self.evaluation_batches(len(self.data.train))
            )
        self.set_training_mode()
        try:
            for count, inputs in enumerate(batches, 1):
                for norm in norms:
                    norm.momentum = 1 / count  # makes the running mean a plain mean, even without a batch counter
                self.output(vector, buffers, inputs)
        finally:
            for norm, momentum in zip(norms, original_momenta, strict=True):
                norm.momentum = momentum
        return flat

    def evaluation_batches(
        self, count: int, batch_statistics: bool | None = None, at_once: int = 1
    ) -> Iterator[Tensor]:
        """Yield the positions 0..count-1 in fixed batches, so that sums do not depend on the worker that computes them.

        Args:
            count: number of examples.
            batch_statistics: whether batches are normalised by their own statistics; default: the problem's setting.
                Each batch then takes examples from the whole set, because neighbours (frames of one video) are similar.
            at_once: number of consecutive batches to join into one; ignored with ``batch_statistics``.
        """
        positions = torch.arange(count, device=self.device)
        if batch_statistics is None:
            batch_statistics = self.batch_statistics
        if batch_statistics:
            batches = ceil(count / self.evaluation_batch)
            yield from (positions[first::batches] for first in range(batches))
        else:
            yield from torch.split(positions, at_once * self.evaluation_batch)


def _leaves(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors, detached, as leaves of an autograd graph."""
    return {name: tensor.detach().requires_grad_() for name, tensor in tensors.items()}
