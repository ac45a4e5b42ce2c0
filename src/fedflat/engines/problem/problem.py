"""The problem that a federation solves: a model, a task and data; and its gradient at any flat vector."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedflat.data import Augmentation, Dataset, Examples, normalise
from fedflat.engines.cpu.narrow_networks import is_narrow
from fedflat.engines.problem.batches import BatchLoader
from fedflat.engines.problem.compiled import CompiledGradient
from fedflat.engines.problem.frozen import FrozenParameters, must_be_plain
from fedflat.engines.problem.functional_call import FunctionalCall
from fedflat.engines.problem.task import Task
from fedflat.errors import UserError
from fedflat.models.layout import Layout
from fedflat.models.norms import BatchNorm


@dataclass(eq=False)
class Problem:
    """A model whose weights live in flat vectors, what it is trained for, and on what."""

    model: nn.Module
    task: Task
    data: Dataset
    augmentation: Augmentation
    dtype: torch.dtype = torch.float32
    arithmetic: torch.dtype | None = None
    """A lower precision for the passes through the model; weights, losses and updates keep ``dtype``."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    evaluation_batch: int = 500
    held_out: dict[str, Examples] = field(default_factory=dict)
    """What models are evaluated on, by name: the test set, and a validation split where there is one."""
    batch_statistics: bool = False
    """Whether evaluation normalises by each batch's own statistics, as SiLoBN does for clients it has not seen."""
    compiled_size: int | None = field(default=None, init=False)
    """The size of batches whose gradient is compiled on a CPU."""

    def __post_init__(self) -> None:
        self.model.to(self.device, self.dtype)
        self.data = replace(self.data, train=moved(self.data.train, self.device))
        self.held_out = {name: moved(examples, self.device) for name, examples in self.held_out.items()}
        self.layout = Layout.of_parameters(self.model)
        self.channels_last = any(parameter.ndim == 4 for parameter in self.model.parameters()) and not must_be_plain(
            self.model
        )
        self.still = FrozenParameters(self.model, self.arithmetic, self.channels_last)
        self.buffers = Layout.of_buffers(self.model, self.still.buffers)
        # On the device, so that normalising copies nothing there while a step is captured.
        self._mean, self._std = (
            torch.tensor(v, dtype=self.dtype, device=self.device) for v in (self.data.mean, self.data.std)
        )
        self.whole_layout = Layout(self.layout.names + self.buffers.names, self.layout.shapes + self.buffers.shapes)
        self._saved = saved_names(self.model)
        self._tied = any(name != first for name, first in self._saved.items())
        self._places = FunctionalCall(self.model)
        still = {prefix for prefix, module in self.model.named_modules() if isinstance(module, BatchNorm)}
        self._counters = [
            n for n, b in self.model.named_buffers() if not b.is_floating_point() and n.rpartition(".")[0] not in still
        ]
        self._leaves: tuple[Tensor, dict[str, Tensor]] | None = None
        self._compiled: CompiledGradient | None = None
        self._feed_images(self.channels_last)

    def __getstate__(self) -> dict[str, Any]:
        """What a worker process receives: all but the memory in which this process differentiates, and what it has compiled."""
        return {**vars(self), "_leaves": None, "_compiled": None}

    def compile(self, size: int) -> None:
        """Have the gradient of batches of one size compiled, and let training images lie as that wants them."""
        self.compiled_size = size
        if is_narrow(self.model, size) and not self.buffers.names:
            self._feed_images(channels_last=False)

    def _feed_images(self, channels_last: bool) -> None:
        self._feed = BatchLoader(
            self.data.train, self.augmentation, self._mean, self._std, self.arithmetic or self.dtype, channels_last
        )
        self.data = replace(self.data, train=self._feed.examples)

    def initial(self) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """The model's own weights, floating buffers and integer buffers, as flat vectors and a dictionary."""
        weights = self.layout.flatten({name: p.detach() for name, p in self.model.named_parameters()})
        named = dict(self.model.named_buffers())
        integers = {name: b.clone() for name, b in named.items() if not b.is_floating_point()}
        return weights, self.buffers.flatten(named).to(self.device, self.dtype), integers

    def named(self, weights: Tensor, buffers: Tensor, integers: dict[str, Tensor]) -> dict[str, Tensor]:
        """A whole model by the names of its ``state_dict``, with what is frozen; tied tensors are copied for each of their names."""
        found = {**self.still.tensors(), **self.layout.views(weights), **self.buffers.views(buffers), **integers}
        return {name: found[first] if name == first else found[first].clone() for name, first in self._saved.items()}

    def training_mode(self, on: bool = True) -> None:
        """Let the model behave as in training, or as in evaluation; what is frozen normalises as in evaluation either way."""
        self.model.train(on)
        self.still.rest()

    def train_examples(self, indices: np.ndarray) -> Examples:
        """The training examples at some positions."""
        return self.data.train.take(torch.from_numpy(indices).to(self.device))

    def normalised(self, raw: Tensor) -> Tensor:
        """Inputs as the model wants them, without augmentation."""
        return self._arranged(normalise(raw, self._mean, self._std, self.arithmetic or self.dtype))

    def _arranged(self, inputs: Tensor) -> Tensor:
        return (
            inputs.contiguous(memory_format=torch.channels_last) if self.channels_last and inputs.ndim == 4 else inputs
        )

    def output(self, vector: Tensor, buffers: dict[str, Tensor], inputs: Tensor, model: nn.Module | None = None) -> Any:
        """The model's output with weights from a flat vector: a tensor, or in training a tuple where the model has several heads.

        Another ``model`` with the same tensors may stand for it.
        """
        weights = vector if self.arithmetic is None else vector.to(self.arithmetic)
        tensors = {**self.still.rounded, **self.layout.views(weights), **buffers}
        return self._widened(functional_call(model or self.model, tensors, (inputs,), tie_weights=self._tied))

    def _widened(self, output: Any) -> Any:
        """An output, or each of several, in the precision of losses."""
        if self.arithmetic is None:
            return output
        return tuple(one.to(self.dtype) for one in output) if isinstance(output, tuple) else output.to(self.dtype)

    def _loss(self, output: Any, batch: Batch) -> Tensor:
        loss = self.task.loss(output, batch.targets)
        if batch.mixed_targets is None:
            return loss
        return batch.share * loss + (1 - batch.share) * self.task.loss(output, batch.mixed_targets)

    def loss_and_gradient(self, vector: Tensor, buffers: dict[str, Tensor], batch: Batch) -> tuple[Tensor, Tensor]:
        """The batch's mean loss and its gradient, as a flat vector. BatchNorm statistics in ``buffers`` change in place."""
        if self.compiled_size is not None:
            self._compiled = self._compiled or CompiledGradient(self, self.compiled_size)
            found = self._compiled(vector, batch)
            if found is not None:
                return found
        leaves = self._leaves_of(vector)
        output = self._places.call({**self.still.rounded, **leaves, **buffers}, self._arranged(batch.inputs))
        loss = self._loss(self._widened(output), batch)
        gradients = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
        return loss.detach(), self.layout.flatten(dict(zip(leaves, gradients, strict=True))).to(vector.dtype)

    def _leaves_of(self, vector: Tensor) -> dict[str, Tensor]:
        """The weights of a flat vector as tensors to differentiate by: on a CPU always the same ones, which need not be cut out anew."""
        if vector.is_cuda:  # several clients at once, each in tensors of its own
            return self._cut_out(vector if self.arithmetic is None else vector.to(self.arithmetic))
        if self._leaves is None:
            own = torch.empty_like(vector, dtype=self.arithmetic or vector.dtype)
            self._leaves = own, self._cut_out(own)
        own, leaves = self._leaves
        own.copy_(vector)
        return leaves

    def _cut_out(self, vector: Tensor) -> dict[str, Tensor]:
        return {name: view.detach().requires_grad_() for name, view in self.layout.views(vector).items()}

    def functional_pass(
        self,
        vector: Tensor,
        statistics: Tensor,
        integers: dict[str, Tensor],
        batch: Batch,
        model: nn.Module | None = None,
    ) -> Pass:
        """The same as a pure function, which can be compiled. Another ``model`` with the same tensors may stand for it."""

        def loss_and_buffers(point: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor, dict[str, Tensor]]]:
            moved, counted = statistics.clone(), {name: integers[name].clone() for name in self._counters}
            buffers = {**self.buffers.views(moved), **integers, **counted}
            loss = self._loss(self.output(point, buffers, batch.inputs, model), batch)
            return loss, (loss, moved, counted)

        gradient, seen = torch.func.grad(loss_and_buffers, has_aux=True)(vector)
        return Pass(gradient, *seen)

    def batch(self, positions: Tensor, draws: dict[str, Tensor]) -> Batch:
        """The training examples at some positions as one augmented batch."""
        inputs, targets = self._feed(positions, draws), self._feed.targets(positions, draws)
        mixing = self.augmentation.mix(draws, len(positions))
        if mixing is None:
            return Batch(inputs, targets)
        share, permutation = mixing
        return Batch(inputs, targets, targets[permutation], share)

    @torch.no_grad()
    def predicted(
        self, vector: Tensor, buffers: dict[str, Tensor], raw: Tensor, batch_statistics: bool | None = None
    ) -> Tensor:
        """The model's output on raw inputs, in evaluation mode; with ``batch_statistics``, all but its normalisations are."""
        return self.evaluated(vector, buffers, self.normalised(raw), batch_statistics)

    @torch.no_grad()
    def evaluated(
        self, vector: Tensor, buffers: dict[str, Tensor], inputs: Tensor, batch_statistics: bool | None = None
    ) -> Tensor:
        """The same on inputs that are normalised already."""
        self.model.eval()
        if self.batch_statistics if batch_statistics is None else batch_statistics:
            buffers = {name: b.clone() for name, b in buffers.items()}
            for norm in self._norms():
                norm.train()
            self.still.rest()
        output: Tensor = self.output(vector, buffers, inputs)
        return output

    def _norms(self) -> list[nn.modules.batchnorm._BatchNorm]:
        return [module for module in self.model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]

    def sum_tensors(self, vector: Tensor, buffers: dict[str, Tensor], examples: Examples) -> dict[str, Tensor]:
        """The task's metrics, summed over some examples, with the model in evaluation mode."""
        return self.task.sums(self.predicted(vector, buffers, examples.inputs), examples.targets)

    @torch.no_grad()
    def estimated_buffers(
        self, vector: Tensor, integers: dict[str, Tensor], batches: Iterable[Tensor] | None = None
    ) -> Tensor:
        """BatchNorm statistics of given weights, estimated anew: the plain mean over batches of inputs, by default the training set's."""
        norms = self._norms()
        momenta = [norm.momentum for norm in norms]
        flat = torch.zeros(self.buffers.size, dtype=self.dtype, device=self.device)
        buffers = {**self.buffers.views(flat), **{name: torch.zeros_like(value) for name, value in integers.items()}}
        if batches is None:
            batches = (
                self.normalised(self.data.train.take(part).inputs)
                for part in self.evaluation_batches(len(self.data.train))
            )
        self.training_mode()
        try:
            for number, inputs in enumerate(batches, 1):
                for norm in norms:
                    norm.momentum = (
                        1 / number
                    )  # a running mean is then the plain mean; layers that count no batches know no other
                self.output(vector, buffers, inputs)
        finally:
            for norm, momentum in zip(norms, momenta, strict=True):
                norm.momentum = momentum
        return flat

    def evaluation_batches(
        self, count: int, batch_statistics: bool | None = None, at_once: int = 1
    ) -> Iterator[Tensor]:
        """The positions of a set's examples in fixed batches, so that sums do not depend on who computes them.

        Batches that are normalised by their own statistics are spread over the set, so that each of them looks like all of it: neighbours,
        such as the frames of one drive, are too much alike. Of others, several may be taken ``at_once``.
        """
        positions = torch.arange(count, device=self.device)
        if self.batch_statistics if batch_statistics is None else batch_statistics:
            batches = ceil(count / self.evaluation_batch)
            yield from (positions[first::batches] for first in range(batches))
        else:
            yield from torch.split(positions, at_once * self.evaluation_batch)


def saved_names(model: nn.Module) -> dict[str, str]:
    """For each tensor of a model's ``state_dict`` the name it goes by here: of several that are tied, the first.

    >>> tied = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    >>> tied[1].weight = tied[0].weight
    >>> saved_names(tied)
    {'0.weight': '0.weight', '1.weight': '0.weight'}
    """
    every = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    saved, firsts = model.state_dict(), dict[int, str]()
    names = {name: firsts.setdefault(id(tensor), name) for name, tensor in every}
    return {name: first for name, first in names.items() if name in saved}


def moved(examples: Examples, device: torch.device) -> Examples:
    """Examples on a device."""
    try:
        return Examples(**{name: tensor.to(device) for name, tensor in examples.tensors().items()})
    except torch.OutOfMemoryError:
        size = examples.inputs.numel() * examples.inputs.element_size() / 1e9
        raise UserError(
            f"the dataset does not fit on the GPU, where its {len(examples):,} inputs take {size:.1f} GB; "
            "take a smaller size, for example landmarks(size=64), or engine.device=cpu, which reads it from its file"
        ) from None


@dataclass(frozen=True)
class Batch:
    """Inputs and targets of one step; with mixup, the targets of the batch's other half and the share of the first."""

    inputs: Tensor
    targets: Tensor
    mixed_targets: Tensor | None = None
    share: float | Tensor = 1.0


class Pass(NamedTuple):
    """What a pass through a model and back finds."""

    gradient: Tensor
    loss: Tensor
    statistics: Tensor
    """BatchNorm's, moved."""
    integers: dict[str, Tensor]
    """BatchNorm's counters, moved: those that count, which our own do not."""
