"""Networks with few channels, which store examples innermost, agree with torch."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fedflat import models
from fedflat.algorithms.teacher import Teacher
from fedflat.bench.setting import BenchmarkSetting, RandomImages
from fedflat.data import augmentation
from fedflat.engines.problem import kernels
from fedflat.engines.problem.narrow_networks import NarrowConvolution, NarrowMaxPool, is_narrow, narrowed
from fedflat.engines.problem.problem import Problem
from fedflat.engines.problem.task import Classification
from fedflat.experiment.run import Run
from fedflat.experiment.setup import engine

needs_compiler = pytest.mark.skipif(kernels.compiler() is None, reason="there is no C++ compiler")


def gradients(
    model: nn.Module, images: torch.Tensor, weighting: torch.Tensor
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A model's output, and the gradients of a weighted sum of it: by the images first, then by the parameters."""
    images = images.clone().requires_grad_()
    output = model(images)
    return output.detach(), list(torch.autograd.grad((output * weighting).sum(), [images, *model.parameters()]))


@pytest.mark.parametrize(
    ("model", "examples", "narrow"),
    [("lenet5", 10, True), ("lenet5", 7, False), ("cnn", 50, False), ("resnet20", 50, False), ("mlp", 50, False)],
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
    assert [type(layer) for layer in changed][:3] == [NarrowConvolution, NarrowMaxPool, nn.ReLU]
    assert [type(layer) for layer in model][:3] == [nn.Conv2d, nn.ReLU, nn.MaxPool2d], "the model itself stays as it is"


@needs_compiler
@pytest.mark.parametrize(
    ("layers", "shape"),
    [
        (
            (nn.Conv2d(2, 5, (3, 2), padding=(1, 2)), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(5, 8, 3, bias=False)),
            (21, 2, 11, 9),
        ),
        ((nn.Conv2d(1, 12, 4), nn.MaxPool2d((3, 2)), nn.ReLU(), nn.Conv2d(12, 1, 1, padding=1)), (9, 1, 10, 9)),
        # rows and examples shorter than the vectors of some processors
        ((nn.Conv2d(2, 3, 3), nn.MaxPool2d(2), nn.Conv2d(3, 2, 2)), (8, 2, 7, 6)),
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
    assert [type(layer) for layer in changed] == [NarrowMaxPool, nn.ReLU]
    result = changed(images)
    assert torch.equal(result, expected)
    with_nan = images.detach().where(images > -2, torch.nan)
    assert torch.equal(changed(with_nan).isnan(), layers(with_nan).isnan())
    one, other = (torch.autograd.grad((output * weighting).sum(), images)[0] for output in (result, expected))
    assert torch.equal(one, other)


def a_run(compiled: str = "on", model: str = "lenet5", batch_size: int = 16, local_steps: int = 2) -> Run:
    setting = BenchmarkSetting(model, local_steps=local_steps, batch_size=batch_size, compile=compiled, workers=1)
    return Run(setting.config("fedsam", "float32", "loop", 10), data=RandomImages(size=200, side=20).dataset())


def a_problem(model: nn.Module, side: int = 8) -> Problem:
    return Problem(model, Classification(), RandomImages(size=40, side=side, classes=4).dataset(), augmentation("none"))


def assert_gradients_agree(problem: Problem, size: int = 16) -> torch.Tensor:
    """The kernels compute the gradient of the problem, which is returned, as torch does."""
    weights, positions = problem.initial_state()[0], torch.arange(size)
    expected_loss, expected = problem.loss_and_gradient(weights, {}, problem.batch(positions, {}))
    problem.use_narrow_kernels(size)
    loss, gradient = problem.loss_and_gradient(weights, {}, problem.batch(positions, {}))
    assert float(loss) == pytest.approx(float(expected_loss), rel=1e-5)
    assert torch.allclose(gradient, expected, rtol=1e-4, atol=1e-6)
    # A teacher uses the kernels, too, so that it agrees with itself up to the rounding of the softmax.
    itself = Teacher(weights, 1.0, with_loss=False)
    assert (
        problem.loss_and_gradient(weights, {}, problem.batch(positions, {}), itself)[1].norm() < 1e-6 * expected.norm()
    )
    return gradient


@needs_compiler
def test_gradients_of_lenet5_agree_with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[torch.Size] = []
    real = NarrowConvolution.forward
    monkeypatch.setattr(
        NarrowConvolution, "forward", lambda self, images: calls.append(images.shape) or real(self, images)
    )
    problem = a_run("off").problem
    assert_gradients_agree(problem)
    assert (16, 3, 20, 20) in calls
    calls.clear()
    problem.loss_and_gradient(problem.initial_state()[0], {}, problem.batch(torch.arange(5), {}))
    assert not calls, "kernels are compiled for one batch size"


class Shaded(nn.Module):
    """A network whose convolution input depends on a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.shade, self.convolution = nn.Parameter(torch.full((3, 1, 1), 0.5)), nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.convolution(images * self.shade).relu().mean((2, 3))


@needs_compiler
def test_gradients_reach_parameters_before_a_convolution() -> None:
    assert float(assert_gradients_agree(a_problem(Shaded(), side=6))[:3].norm()) > 0


def test_the_order_of_examples_is_kept() -> None:
    problem = a_run("off").problem
    before = problem.batch(torch.arange(16), {})
    assert before.inputs.is_contiguous(memory_format=torch.channels_last)
    problem.use_narrow_kernels(16)
    after = problem.batch(torch.arange(16), {})
    assert after.inputs.is_contiguous()
    assert torch.equal(before.inputs, after.inputs)
    assert torch.equal(before.targets, after.targets)


class Tapped(nn.Module):
    """Uses the activations between its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2))
        self.last = nn.Linear(4 * 3 * 3 + 4, 4)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        seen = []
        for layer in self.features:
            images = layer(images)
            seen.append(images)
        return self.last(torch.cat([images.flatten(1), seen[1].mean((2, 3))], 1))


@needs_compiler
def test_a_model_that_depends_on_layer_order_is_left_to_torch() -> None:
    problem = a_problem(Tapped())
    assert problem.suits_narrow_kernels(16)
    with pytest.warns(UserWarning, match="different output"):
        assert_gradients_agree(problem)


def test_without_a_working_compiler_torch_computes_the_gradient(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(kernels, "compiler", lambda: "false")
    problem = a_problem(nn.Sequential(nn.Conv2d(3, 5, 4), nn.Flatten(), nn.Linear(125, 4)))
    with pytest.warns(UserWarning, match="could not be compiled"):
        assert_gradients_agree(problem)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        problem.loss_and_gradient(problem.initial_state()[0], {}, problem.batch(torch.arange(16), {}))


@needs_compiler
def test_compiled_kernels_are_cached_and_damaged_files_replaced(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source = 'extern "C" int answer() { return 42; }'
    compile_anew = kernels._library.__wrapped__
    assert compile_anew(source).answer() == 42
    (file,) = (tmp_path / "fedflat" / "kernels").iterdir()
    content = file.read_bytes()
    file.unlink()  # this process has loaded it
    file.write_bytes(content[:1000])
    unreadable = file.with_name(f"{file.stem.partition('-')[0]}-folder.so")
    unreadable.mkdir()
    assert compile_anew(source).answer() == 42
    unreadable.rmdir()
    monkeypatch.setattr(kernels.subprocess, "run", None)
    assert compile_anew(source).answer() == 42, "loaded from the cache, without a compiler"


@needs_compiler
def test_an_unwritable_cache_is_no_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert kernels._library.__wrapped__('extern "C" int answer() { return 7; }').answer() == 7


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "on"),
        ({"compiled": "off"}, "off"),
        ({"model": "cnn"}, "off"),  # too many channels
        ({"batch_size": 32}, "off"),  # the clients have 20 examples
        ({"local_steps": 1, "rounds": 40}, "off"),  # too short
        ({"compiler": None}, "off"),
    ],
)
def test_long_runs_of_narrow_networks_use_the_kernels(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, changes: dict[str, Any], expected: str
) -> None:
    monkeypatch.setattr(engine, "compiler", lambda: changes.get("compiler", "c++"))
    setting = BenchmarkSetting(
        changes.get("model", "lenet5"),
        local_steps=changes.get("local_steps", 2),
        batch_size=changes.get("batch_size", 16),
        compile=changes.get("compiled", "auto"),
        workers=1,
    )
    config = setting.config("fedavg", "float32", "loop", 10)
    training = config.training.model_copy(update={"rounds": changes.get("rounds", 1000)})
    run = Run(
        config.model_copy(update={"training": training}),
        tmp_path / "run",
        data=RandomImages(size=200, side=20).dataset(),
    )
    run._open()
    run.folder.release_lock()
    assert (run.problem.narrow_size == 16) == (expected == "on")
    assert run.folder.config().engine.compile == expected, "recorded, so that a resumed run keeps it"


class Unusual(nn.Module):
    """Drops activations, reads its layers' attributes and returns more than a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.last = nn.Conv2d(3, 4, 3), nn.Linear(4, 4)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        assert self.convolution.kernel_size == (3, 3)
        features = self.convolution(images).relu().amax((2, 3))
        return self.last(nn.functional.dropout(features, 0.5, self.training))


@needs_compiler
def test_the_first_call_draws_no_random_numbers() -> None:
    problem = a_problem(Unusual())
    problem.use_narrow_kernels(16)
    problem.model.train()
    weights, batch = problem.initial_state()[0], problem.batch(torch.arange(16), {})
    gradients = []
    for _ in range(2):
        torch.manual_seed(0)
        gradients.append(problem.loss_and_gradient(weights, {}, batch)[1].clone())
    assert problem._narrow_call is not None and problem._narrow_call._is_usable
    assert torch.equal(*gradients)


class Uncopyable(nn.Sequential):
    def __deepcopy__(self, _: object) -> None:
        raise RuntimeError("do not copy")


@needs_compiler
def test_a_model_that_cannot_be_copied_is_left_to_torch() -> None:
    model = Uncopyable(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 4))
    with pytest.warns(UserWarning, match="do not work with this model"):
        assert_gradients_agree(a_problem(model))


def test_a_resumed_run_keeps_the_recorded_decision(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(engine, "compiler", lambda: None)
    config = BenchmarkSetting("lenet5", local_steps=2, batch_size=16, workers=1).config("fedavg", "float32", "loop", 10)
    data = RandomImages(size=200, side=20).dataset()
    run = Run(config, tmp_path / "run", data=data)
    run._open()
    run.folder.release_lock()
    monkeypatch.setattr(engine, "compiler", lambda: "c++")
    assert Run(config, data=data).config.engine.compile == "on"
    assert Run(config, tmp_path / "run", data=data, resume=True).config.engine.compile == "off"
