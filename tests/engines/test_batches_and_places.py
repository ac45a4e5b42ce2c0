"""Optimisations of a CPU step are bit-identical."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from fedflat import models
from fedflat.algorithms.teacher import Teacher
from fedflat.data import Dataset, Examples, augmentation, batches
from fedflat.data.batches import Batch
from fedflat.engines.problem.parameters import FunctionalCall
from fedflat.engines.problem.problem import Problem
from fedflat.engines.problem.task import Classification


def problem_of(model: str, text: str = "none", dtype: torch.dtype = torch.float32) -> Problem:
    rng = torch.Generator().manual_seed(0)
    pixels, labels = torch.randint(0, 256, (30, 3, 16, 16), dtype=torch.uint8, generator=rng), torch.arange(30) % 4
    examples = Examples(pixels, labels)
    data = Dataset("images", examples, examples, tuple("abcd"), (0.1, 0.5, 0.7), (0.2, 0.3, 0.25))
    torch.manual_seed(1)
    return Problem(models.build(model, (3, 16, 16), 4), Classification(), data, augmentation(text), dtype)


@pytest.mark.parametrize("model", ["lenet5", "mlp"])
@pytest.mark.parametrize("small", [0, 10**9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_batches_are_normalised_examples(model, small, dtype, monkeypatch):
    monkeypatch.setattr(batches, "CACHE_BYTES", small)
    problem, raw = problem_of(model, dtype=dtype), problem_of("mlp", "crop-flip").data.train
    positions = torch.tensor([3, 29, 3, 0])
    batch = problem.batch(positions, {})
    mean, std = (torch.tensor(values, dtype=dtype).reshape(3, 1, 1) for values in (problem.data.mean, problem.data.std))
    assert torch.equal(batch.inputs, (raw.inputs[positions].to(dtype) / 255 - mean) / std)
    assert torch.equal(batch.targets, raw.targets[positions])
    assert batch.inputs.is_contiguous(
        memory_format=torch.channels_last if model == "lenet5" else torch.contiguous_format
    )
    assert torch.equal(problem.data.train.inputs, raw.inputs), "only the memory layout may change"
    assert torch.equal(problem.normalised(problem.train_examples(positions.numpy()).inputs), batch.inputs)


def test_augmented_images_stay_contiguous():
    problem = problem_of("lenet5", "crop-flip(padding=0)")
    draws = {"corner": torch.zeros(2, 2, dtype=torch.int64), "mirrored": torch.tensor([False, True])}
    batch = problem.batch(torch.tensor([4, 5]), draws)
    assert problem.data.train.inputs.is_contiguous()
    plain = problem.normalised(problem.data.train.inputs[[4, 5]])
    assert torch.equal(batch.inputs[0], plain[0]) and torch.equal(batch.inputs[1], plain[1].flip(-1))


class Checkpointed(nn.Sequential):
    """Recomputes its layers in the backward pass, as ``gradient_checkpointing_enable`` of ``transformers`` does."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, input, use_reentrant=False)


@pytest.mark.parametrize("arithmetic", [None, torch.bfloat16])
def test_gradient_checkpointing_recomputes_with_the_weights_of_the_step(arithmetic):
    rows = Examples(torch.rand(6, 3, generator=torch.Generator().manual_seed(0)), torch.arange(6) % 2)
    layers = nn.Linear(3, 4), nn.Linear(4, 4), nn.BatchNorm1d(4, affine=False), nn.Tanh(), nn.Linear(4, 2)
    layers[1].requires_grad_(False)
    results = []
    for kind in (nn.Sequential, Checkpointed):
        data = Dataset("rows", rows, rows, ("a", "b"))
        problem = Problem(kind(*layers), Classification(), data, augmentation("none"), arithmetic=arithmetic)
        point = torch.linspace(-1, 1, problem.layout.size)
        buffers = {**problem.buffer_layout.views(torch.zeros(8)), "2.num_batches_tracked": torch.tensor(0)}
        results.append(problem.loss_and_gradient(point, buffers, problem.batch(torch.arange(6), {})))
    assert torch.equal(results[0][1], results[1][1]) and results[0][1].norm() > 0


@pytest.mark.parametrize("model", ["lenet5", "resnet20(norm=batch)", "mlp(hidden=400)"])
def test_gradients_do_not_depend_on_earlier_calls_or_pickling(model):
    """Small leaf tensors are reused between calls and left out of a pickled problem; large ones are views."""
    problem = problem_of(model)
    weights, statistics, integer_buffers = problem.initial_state()
    batch = Batch(problem.normalised(problem.data.train.inputs[:8]), problem.data.train.targets[:8])

    def gradient(of: Problem, point: torch.Tensor) -> torch.Tensor:
        buffers = {
            **of.buffer_layout.views(statistics.clone()),
            **{name: value.clone() for name, value in integer_buffers.items()},
        }
        return of.loss_and_gradient(point, buffers, batch)[1]

    first = gradient(problem, weights)
    elsewhere = gradient(problem, weights + 0.01)
    traveller = pickle.loads(pickle.dumps(problem))
    assert traveller._cpu_weights_and_views is None
    assert torch.equal(gradient(problem, weights), first) and torch.equal(gradient(traveller, weights), first)
    assert not torch.equal(elsewhere, first)
    pure = problem.functional_pass(weights, statistics, integer_buffers, batch).gradient
    assert torch.allclose(pure, first, rtol=1e-4, atol=1e-6)


def test_a_teacher_sees_the_batch_as_in_training_and_changes_no_statistics():
    """BatchNorm normalises the teacher's features by the batch, so at its own weights the gradient is 0."""
    problem = problem_of("resnet20(norm=batch)")
    weights, statistics, integer_buffers = problem.initial_state()
    batch = Batch(problem.normalised(problem.data.train.inputs[:8]), problem.data.train.targets[:8])
    point = weights + 0.01 * torch.randn_like(weights)
    results = []
    for teacher in (None, Teacher(weights, 2.0, 0.7), Teacher(point, 2.0, with_loss=False)):
        changed = statistics.clone()
        loss, gradient = problem.loss_and_gradient(point, problem.buffer_layout.views(changed), batch, teacher)
        pure = problem.functional_pass(point, statistics, integer_buffers, batch, teacher=teacher)
        assert torch.allclose(pure.gradient, gradient, rtol=1e-3, atol=1e-5) and torch.isclose(pure.loss, loss)
        assert torch.allclose(pure.statistics, changed) and not torch.equal(changed, statistics)
        results.append((loss, gradient, changed))
    (loss, plain, changed), (taught_loss, taught, taught_changed), (_, nothing, _) = results
    assert torch.equal(taught_loss, loss) and torch.equal(taught_changed, changed)
    assert (taught - plain).norm() > 1e-2 * plain.norm() and nothing.norm() < 1e-4 * plain.norm()


class Tied(nn.Module):
    """A tied weight, and a buffer that counts calls."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(3, 3), nn.Linear(3, 3, bias=False)
        self.other.weight = self.one.weight
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("nothing", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls > 8:
            raise ValueError
        return self.other(self.one(x))


def test_functional_call_agrees_with_torch():
    model, x = Tied(), torch.randn(2, 3)
    own = dict(model.named_parameters())
    tensors = {"one.weight": torch.randn(3, 3), "one.bias": torch.randn(3)}
    calls = torch.zeros(())
    assert torch.equal(
        FunctionalCall(model).call({**tensors, "calls": calls}, x),
        functional_call(model, tensors, (x,), tie_weights=True),
    )
    assert calls == 1 and model.calls == 1, "the buffer passed in changes, not the model's own"
    with pytest.raises(ValueError):
        FunctionalCall(model).call({**tensors, "calls": torch.full((), 8.0)}, x)
    assert (
        all(model.get_parameter(name) is tensor for name, tensor in own.items())
        and model.other.weight is model.one.weight
    )
