"""Networks with few channels, whose examples lie innermost, compute what torch computes."""

from __future__ import annotations

import os
import shutil

import pytest
import torch
from torch import nn

from fedflat import models
from fedflat.bench.setting import BenchmarkSetting, RandomImages
from fedflat.data import augmentation
from fedflat.engines.cpu.narrow_networks import Convolution, Pooling, Rectifier, is_narrow, narrowed
from fedflat.engines.problem.compiled import CompiledGradient
from fedflat.engines.problem.problem import Problem
from fedflat.engines.problem.task import Classification
from fedflat.experiment.run import Run

needs_compiler = pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "g++")) is None, reason="there is no C++ compiler"
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


def test_a_model_is_changed_and_its_tensors_keep_their_names() -> None:
    model = models.build("lenet5", (3, 32, 32), 10)
    changed = narrowed(model)
    assert [name for name, _ in changed.named_parameters()] == [name for name, _ in model.named_parameters()]
    assert [type(layer) for layer in changed][:3] == [Convolution, Pooling, Rectifier]
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
def test_outputs_and_gradients_are_torchs(layers: tuple[nn.Module, ...], shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*layers)
    images = torch.randn(shape)
    weighting = torch.randn_like(model(images))
    expected = gradients(model.double(), images.double(), weighting.double())
    found = gradients(narrowed(model.float()), images, weighting)
    for here, there in zip([found[0], *found[1]], [expected[0], *expected[1]], strict=True):
        assert here.shape == there.shape
        assert torch.allclose(here.double(), there, rtol=1e-5, atol=1e-5 * float(there.abs().max()))


@needs_compiler
def test_the_gradient_of_pooling_goes_to_the_first_of_equals() -> None:
    """Whole numbers: windows are full of ties, and every sum is exact."""
    rng = torch.Generator().manual_seed(0)
    images = torch.randint(-2, 3, (17, 3, 7, 8), generator=rng).float()
    images.requires_grad_()
    layers = nn.Sequential(nn.ReLU(), nn.MaxPool2d((2, 3)))
    expected = layers(images)
    weighting = torch.randint(1, 9, expected.shape, generator=rng).float()
    changed = narrowed(layers)
    assert [type(layer) for layer in changed] == [Pooling, Rectifier]
    found = changed(images)
    assert torch.equal(found, expected)
    one, other = (torch.autograd.grad((output * weighting).sum(), images)[0] for output in (found, expected))
    assert torch.equal(one, other)


@needs_compiler
def test_a_compiled_gradient_is_narrow_and_the_same() -> None:
    setting = BenchmarkSetting("lenet5", local_steps=2, batch_size=16, compile="on", workers=1)
    run = Run(setting.config("fedavg", "float32", "loop", 10), data=RandomImages(size=200, side=20).dataset())
    problem = run.problem
    assert problem.data.train.inputs.is_contiguous()
    weights, batch = problem.initial()[0], problem.batch(torch.arange(16), {})
    found = CompiledGradient(problem, 16, backend="aot_eager")(weights, batch)
    assert found is not None
    problem.compiled_size = None
    loss, gradient = problem.loss_and_gradient(weights, {}, batch)
    assert float(found[0]) == pytest.approx(float(loss), rel=1e-5)
    assert torch.allclose(found[1], gradient, rtol=1e-4, atol=1e-6)


class Shaded(nn.Module):
    """A network in which the convolution's input is computed from a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.shade, self.convolution = nn.Parameter(torch.full((3, 1, 1), 0.5)), nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.convolution(images * self.shade).relu().mean((2, 3))


@needs_compiler
def test_gradients_flow_through_what_comes_before_a_convolution() -> None:
    data = RandomImages(size=32, side=6, classes=4).dataset()
    torch.manual_seed(0)
    problem = Problem(Shaded(), Classification(), data, augmentation("none"))
    weights, batch = problem.initial()[0], problem.batch(torch.arange(16), {})
    found = CompiledGradient(problem, 16, backend="aot_eager")(weights, batch)
    _, gradient = problem.loss_and_gradient(weights, {}, batch)
    assert found is not None and float(gradient[:3].norm()) > 0
    assert torch.allclose(found[1], gradient, rtol=1e-4, atol=1e-6)


def test_images_lie_in_the_same_order_of_examples_after_compiling() -> None:
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
    """Looks at what is between its layers."""

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


def test_a_model_that_rearranging_would_change_is_left_as_it_is() -> None:
    torch.manual_seed(0)
    data = RandomImages(size=40, side=8).dataset()
    problem = Problem(Tapped(), Classification(), data, augmentation("none"))
    fast = CompiledGradient(problem, 16, backend="eager")
    assert is_narrow(problem.model, 16)
    with pytest.warns(UserWarning, match="found another loss than the step as it is"):
        assert fast(problem.initial()[0], problem.batch(torch.arange(16), {})) is None
