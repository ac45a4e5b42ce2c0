"""Networks with few channels, which store examples innermost, agree with torch."""

from __future__ import annotations

import os
import shutil

import pytest
import torch
from torch import nn

from fedflat import models
from fedflat.bench.setting import BenchmarkSetting, RandomImages
from fedflat.data import augmentation
from fedflat.engines.problem.compiled import CompiledGradient
from fedflat.engines.problem.narrow_networks import NarrowConvolution, NarrowMaxPool, NarrowReLU, is_narrow, narrowed
from fedflat.engines.problem.problem import Problem
from fedflat.engines.problem.task import Classification
from fedflat.experiment.run import Run

needs_compiler = pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "g++")) is None, reason="there is no C++ compiler"
)
needs_new_torch = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 10),
    reason="torch 2.9 and earlier cannot compile these kernels; fedflat warns and continues without compilation",
)


def gradients(
    model: nn.Module, images: torch.Tensor, weighting: torch.Tensor
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A model's output, and the gradients of a weighted sum of it: by the images first, then by the parameters."""
    images = images.clone().requires_grad_()
    output = model(images)
    return output.detach(), list(torch.autograd.grad((output * weighting).sum(), [images, *model.parameters()]))


@pytest.mark.parametrize(
    ("model", "examples", "narrow"),
    [("lenet5", 50, True), ("lenet5", 8, False), ("cnn", 50, False), ("resnet20", 50, False), ("mlp", 50, False)],
)
def test_which_models_are_narrow(model: str, examples: int, narrow: bool) -> None:
    assert is_narrow(models.build(model, (3, 32, 32), 10), examples) is narrow


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(3, 6, 3, stride=2),
        nn.Conv2d(3, 6, 3, dilation=2),
        nn.Conv2d(3, 6, 3, groups=3),
        nn.Conv2d(3, 6, 3, padding="same"),
        nn.Conv2d(3, 6, 3, padding=1, padding_mode="circular"),
        nn.Conv2d(16, 6, 3),
        nn.Conv1d(3, 6, 3),
        nn.Conv2d(3, 6, 3, dtype=torch.float64),
    ],
)
def test_other_convolutions_stay_with_torch(layer: nn.Module) -> None:
    assert is_narrow(nn.Sequential(nn.Conv2d(3, 6, 3)), 16)
    assert not is_narrow(nn.Sequential(nn.Conv2d(3, 6, 3), layer), 16)


def test_narrowed_models_keep_the_names_of_their_tensors() -> None:
    model = models.build("lenet5", (3, 32, 32), 10)
    changed = narrowed(model)
    assert [name for name, _ in changed.named_parameters()] == [name for name, _ in model.named_parameters()]
    assert [type(layer) for layer in changed][:3] == [NarrowConvolution, NarrowMaxPool, NarrowReLU]
    assert [type(layer) for layer in model][:3] == [nn.Conv2d, nn.ReLU, nn.MaxPool2d], "the model itself stays as it is"


@needs_compiler
@pytest.mark.parametrize(
    ("layers", "shape"),
    [
        (
            (nn.Conv2d(2, 5, (3, 2), padding=(1, 2)), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(5, 8, 3, bias=False)),
            (21, 2, 11, 9),
        ),
        ((nn.Conv2d(1, 12, 4), nn.MaxPool2d((3, 2)), nn.ReLU(), nn.Conv2d(12, 1, 1, padding=1)), (16, 1, 10, 9)),
    ],
)
def test_outputs_and_gradients_agree_with_torch(layers: tuple[nn.Module, ...], shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*layers)
    images = torch.randn(shape)
    weighting = torch.randn_like(model(images))
    expected = gradients(model.double(), images.double(), weighting.double())
    result = gradients(narrowed(model.float()), images, weighting)
    for here, there in zip([result[0], *result[1]], [expected[0], *expected[1]], strict=True):
        assert here.shape == there.shape
        assert torch.allclose(here.double(), there, rtol=1e-5, atol=1e-5 * float(there.abs().max()))


@needs_compiler
def test_the_gradient_of_pooling_goes_to_the_first_maximum() -> None:
    """Integer inputs, so that windows have many ties and sums are exact."""
    rng = torch.Generator().manual_seed(0)
    images = torch.randint(-2, 3, (17, 3, 7, 8), generator=rng).float()
    images.requires_grad_()
    layers = nn.Sequential(nn.ReLU(), nn.MaxPool2d((2, 3)))
    expected = layers(images)
    weighting = torch.randint(1, 9, expected.shape, generator=rng).float()
    changed = narrowed(layers)
    assert [type(layer) for layer in changed] == [NarrowMaxPool, NarrowReLU]
    result = changed(images)
    assert torch.equal(result, expected)
    one, other = (torch.autograd.grad((output * weighting).sum(), images)[0] for output in (result, expected))
    assert torch.equal(one, other)


@needs_compiler
@needs_new_torch
def test_a_compiled_narrow_gradient_agrees() -> None:
    setting = BenchmarkSetting("lenet5", local_steps=2, batch_size=16, compile="on", workers=1)
    run = Run(setting.config("fedavg", "float32", "loop", 10), data=RandomImages(size=200, side=20).dataset())
    problem = run.problem
    assert problem.data.train.inputs.is_contiguous()
    weights, batch = problem.initial_state()[0], problem.batch(torch.arange(16), {})
    result = CompiledGradient(problem.model, problem.plain_loss, 16, backend="aot_eager")(weights, batch)
    assert result is not None
    problem.compiled_size = None
    loss, gradient = problem.loss_and_gradient(weights, {}, batch)
    assert float(result[0]) == pytest.approx(float(loss), rel=1e-5)
    assert torch.allclose(result[1], gradient, rtol=1e-4, atol=1e-6)


class Shaded(nn.Module):
    """A network whose convolution input depends on a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.shade, self.convolution = nn.Parameter(torch.full((3, 1, 1), 0.5)), nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.convolution(images * self.shade).relu().mean((2, 3))


@needs_compiler
@needs_new_torch
def test_gradients_reach_parameters_before_a_convolution() -> None:
    data = RandomImages(size=32, side=6, classes=4).dataset()
    torch.manual_seed(0)
    problem = Problem(Shaded(), Classification(), data, augmentation("none"))
    weights, batch = problem.initial_state()[0], problem.batch(torch.arange(16), {})
    result = CompiledGradient(problem.model, problem.plain_loss, 16, backend="aot_eager")(weights, batch)
    _, gradient = problem.loss_and_gradient(weights, {}, batch)
    assert result is not None and float(gradient[:3].norm()) > 0
    assert torch.allclose(result[1], gradient, rtol=1e-4, atol=1e-6)


def test_compiling_keeps_the_order_of_examples() -> None:
    run = Run(
        BenchmarkSetting("lenet5", batch_size=16, compile="off", workers=1).config("fedavg", "float32", "loop", 10),
        data=RandomImages(size=40).dataset(),
    )
    before = run.problem.batch(torch.arange(16), {})
    assert before.inputs.is_contiguous(memory_format=torch.channels_last)
    run.problem.compile(16)
    after = run.problem.batch(torch.arange(16), {})
    assert after.inputs.is_contiguous()
    assert torch.equal(before.inputs, after.inputs)
    assert torch.equal(before.targets, after.targets)


class Tapped(nn.Module):
    """Uses the activations between its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2))
        self.last = nn.Linear(4 * 3 * 3 + 4, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        seen = []
        for layer in self.features:
            images = layer(images)
            seen.append(images)
        return self.last(torch.cat([images.flatten(1), seen[1].mean((2, 3))], 1))


@needs_new_torch
def test_a_model_that_depends_on_layer_order_is_not_rearranged() -> None:
    torch.manual_seed(0)
    data = RandomImages(size=40, side=8).dataset()
    problem = Problem(Tapped(), Classification(), data, augmentation("none"))
    fast = CompiledGradient(problem.model, problem.plain_loss, 16, backend="eager")
    assert is_narrow(problem.model, 16)
    with pytest.warns(UserWarning, match="another loss"):
        assert fast(problem.initial_state()[0], problem.batch(torch.arange(16), {})) is None
