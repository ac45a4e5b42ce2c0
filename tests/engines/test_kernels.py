"""fedflat's own kernels for networks with few channels agree with torch."""

from __future__ import annotations

import copy
import pickle
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fedflat
from fedflat import models
from fedflat.algorithms.teacher import Teacher
from fedflat.bench.setting import BenchmarkSetting, RandomImages
from fedflat.data import augmentation
from fedflat.data.batches import BatchLoader
from fedflat.engines.problem import kernels
from fedflat.engines.problem.kernels import ChainKernels, KernelError
from fedflat.engines.problem.layer_chain import Pool, Relu, layer_chain, source_of_model
from fedflat.engines.problem.problem import Problem
from fedflat.engines.problem.task import Classification
from fedflat.errors import UserError
from fedflat.experiment.campaign.compare import comparison_folders
from fedflat.experiment.run import Run
from fedflat.experiment.setup import engine
from fedflat.experiment.store.run_folder import RunFolder
from fedflat.models.layout import Layout


@pytest.fixture
def without_kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[], None]]:
    """A function that breaks the compiler and empties the cache, as in a new process on another machine."""

    def remove() -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "empty"))
        monkeypatch.setattr(kernels, "compiler", lambda: "false")
        kernels._library.cache_clear()

    yield remove
    kernels._library.cache_clear()


needs_compiler = pytest.mark.skipif(kernels.compiler() is None, reason="there is no C++ compiler")
DATA = RandomImages(size=200, side=20).dataset()


def a_problem(model: nn.Module, side: int = 8) -> Problem:
    return Problem(model, Classification(), RandomImages(size=40, side=side, classes=4).dataset(), augmentation("none"))


@pytest.mark.parametrize(
    ("model", "examples", "suitable"),
    [("lenet5", 10, True), ("lenet5", 7, False), ("cnn", 50, False), ("resnet20", 50, False), ("mlp", 50, False)],
)
def test_which_models_use_the_kernels(model: str, examples: int, suitable: bool) -> None:
    assert a_problem(models.build(model, (3, 32, 32), 4), side=32).suits_kernels(examples) is suitable


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(4, 4, 3, stride=2),
        nn.Conv2d(4, 4, 3, dilation=2),
        nn.Conv2d(4, 4, 3, groups=2),
        nn.Conv2d(4, 4, 3, padding="same"),
        nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular"),
        nn.Conv2d(4, 4, 1, padding=1),
        nn.Conv2d(4, 4, 3, dtype=torch.float64),
        nn.MaxPool2d(2, stride=1),
        nn.MaxPool2d(2, padding=1),
        nn.MaxPool2d(9),
        nn.Flatten(2),
        nn.Linear(6, 4),
        nn.Dropout(0.0),
        nn.BatchNorm2d(4),
        nn.LazyLinear(4),
        nn.Sequential(nn.Flatten(), nn.Conv2d(4, 4, 3)),
    ],
    ids=str,
)
def test_other_layers_stay_with_torch(layer: nn.Module) -> None:
    def suits(*between: nn.Module) -> bool:
        model = nn.Sequential(nn.Conv2d(3, 4, 3), *between, nn.Flatten(), nn.Linear(144, 4))
        offsets = {name: 0 for name, _ in model.named_parameters()}
        return source_of_model(model, (3, 8, 8), offsets, 16) is not None

    assert suits(nn.Identity(), nn.ReLU())
    assert not suits(layer)


class Tutorial(nn.Module):
    """A network in the style of PyTorch's tutorials."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(2, 6, 3, padding=(0, 1)), nn.Conv2d(6, 5, 2)
        self.hidden, self.last = nn.Linear(10, 7), nn.Linear(7, 3, bias=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        images = F.max_pool2d(F.relu(self.first(images)), 2)
        images = self.second(images).relu().view(-1, 10)
        return self.last(torch.relu(self.hidden(torch.flatten(images, 1))))


class Viewed(nn.Module):
    """Returns rows of eight numbers, however many numbers an example has."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(2, 2, 3)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.convolution(images).view(-1, 8)


@pytest.mark.parametrize(("model", "side", "suits"), [(Viewed(), 4, True), (Viewed(), 6, False)])
def test_examples_must_not_be_mixed(model: nn.Module, side: int, suits: bool) -> None:
    offsets = Layout.of_parameters(model).offsets
    assert (source_of_model(model, (2, side, side), offsets, 16) is not None) is suits


CHAINS = {
    "padding": (
        nn.Sequential(
            nn.Sequential(nn.Conv2d(2, 5, (3, 2), padding=(1, 1)), nn.ReLU(), nn.MaxPool2d(2)),
            nn.Conv2d(5, 8, 3, padding=(0, 2), bias=False),
            nn.Identity(),
            nn.Flatten(),
            nn.Linear(168, 3),
        ),
        (21, 2, 11, 9),
    ),
    "window": (
        nn.Sequential(
            nn.ReLU(inplace=True), nn.Conv2d(1, 12, 4), nn.MaxPool2d((3, 2)), nn.ReLU(), nn.Conv2d(12, 1, 1),
            nn.Flatten(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 130, bias=False),
        ),
        (9, 1, 10, 9),
    ),
    # rows and examples shorter than the vectors of some processors
    "short": (nn.Sequential(nn.Conv2d(2, 3, 3), nn.MaxPool2d(2), nn.Conv2d(3, 2, 2), nn.Flatten()), (8, 2, 7, 6)),
    "linear": (nn.Sequential(nn.Flatten(), nn.Linear(24, 30), nn.ReLU(), nn.Linear(30, 2)), (11, 1, 4, 6)),
    "tutorial": (Tutorial(), (18, 2, 8, 4)),
}  # fmt: skip


def passes(model: nn.Module, images: torch.Tensor, weighting: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The output of a model, and the gradient of a weighted sum of it, computed by the kernels."""
    layout = Layout.of_parameters(model)
    source = source_of_model(model, images.shape[1:], layout.offsets, len(images))
    assert source is not None
    weights = layout.flatten({name: parameter.detach() for name, parameter in model.named_parameters()})
    compiled = ChainKernels(source)
    output, memory = compiled.forward(weights, images)
    return output, compiled.backward(weights, memory, weighting)


@needs_compiler
@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("channels_last", [False, True])
def test_outputs_and_gradients_agree_with_torch(name: str, channels_last: bool) -> None:
    torch.manual_seed(0)
    model, shape = copy.deepcopy(CHAINS[name][0]), CHAINS[name][1]
    images = torch.randn(shape)
    weighting = torch.randn(shape[0], model(images.clone()).shape[1])
    if channels_last:
        images = images.contiguous(memory_format=torch.channels_last)
    result = passes(model, images, weighting)
    expected = model.double()(images.double().contiguous())
    gradients = torch.autograd.grad((expected * weighting).sum(), list(model.parameters()))
    named = zip((name for name, _ in model.named_parameters()), gradients, strict=True)
    for here, there in zip(result, (expected, Layout.of_parameters(model).flatten(dict(named))), strict=True):
        assert here.shape == there.shape
        assert torch.allclose(here.double(), there, rtol=1e-5, atol=1e-5 * float(there.detach().abs().max()))


@needs_compiler
def test_two_batch_sizes_in_one_process() -> None:
    """Rows of the output have fewer numbers than a vector at batch size 8."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 4), nn.Flatten())
    for examples in (8, 16, 32, 8):
        images, weighting = torch.randn(examples, 3, 4, 4), torch.randn(examples, 8)
        expected = torch.autograd.grad((model(images) * weighting).sum(), list(model.parameters()))
        gradient = passes(model, images, weighting)[1]
        assert torch.allclose(gradient[-8:], expected[1], rtol=1e-5, atol=1e-5)
        assert torch.allclose(gradient[:-8].view(8, 4, 4, 3).permute(0, 3, 1, 2), expected[0], rtol=1e-5, atol=1e-5)


@needs_compiler
@pytest.mark.parametrize("pooled_first", [False, True])
def test_the_gradient_of_pooling_goes_to_the_first_maximum(pooled_first: bool) -> None:
    """Integer weights and inputs, so that windows have many ties and sums are exact."""
    rng = torch.Generator().manual_seed(0)
    layers = [nn.MaxPool2d((2, 3)), nn.ReLU()] if pooled_first else [nn.ReLU(), nn.MaxPool2d((2, 3))]
    model = nn.Sequential(nn.Conv2d(3, 3, 1), *layers, nn.Flatten())
    for parameter in model.parameters():
        parameter.data = torch.randint(-2, 3, parameter.shape, generator=rng).float()
    images = torch.randint(-2, 3, (17, 3, 7, 8), generator=rng).float()
    expected = model(images)
    weighting = torch.randint(1, 9, expected.shape, generator=rng).float()
    output, gradient = passes(model, images, weighting)
    assert torch.equal(output, expected)
    gradients = torch.autograd.grad((expected * weighting).sum(), list(model.parameters()))
    assert torch.equal(gradient, torch.cat([each.flatten() for each in gradients]))
    with_nan = images.where(images > -2, torch.nan)
    assert torch.equal(passes(model, with_nan, weighting)[0].isnan(), model(with_nan).isnan())


def test_pooling_comes_before_relu() -> None:
    chain = layer_chain(nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.MaxPool2d(2)))
    assert chain is not None
    assert chain[1:] == [Pool((2, 2)), Relu()]


def a_run(compiled: str = "on", model: str = "lenet5", batch_size: int = 16, local_steps: int = 2) -> Run:
    setting = BenchmarkSetting(model, local_steps=local_steps, batch_size=batch_size, compile=compiled, workers=1)
    return Run(setting.config("fedsam", "float32", "loop", 10), data=RandomImages(size=200, side=20).dataset())


def assert_gradients_agree(problem: Problem, size: int = 16) -> torch.Tensor:
    """The kernels compute the gradient of the problem, which is returned, as torch does."""
    weights, positions = problem.initial_state()[0], torch.arange(size)
    expected_loss, expected = problem.loss_and_gradient(weights, {}, problem.batch(positions, {}))
    problem.use_kernels(size)
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
    sizes: list[int] = []
    real = ChainKernels.forward
    monkeypatch.setattr(
        ChainKernels, "forward", lambda self, weights, inputs: sizes.append(len(inputs)) or real(self, weights, inputs)
    )
    problem = a_run("off").problem
    assert_gradients_agree(problem)
    assert set(sizes) == {16}
    sizes.clear()
    problem.loss_and_gradient(problem.initial_state()[0], {}, problem.batch(torch.arange(5), {}))
    assert not sizes, "kernels are compiled for one batch size"


class InPlace(Classification):
    """A loss that changes the model's output."""

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return super().loss(output.div_(2), target)


@needs_compiler
def test_a_loss_may_change_the_output_in_place() -> None:
    problem = a_run("off").problem
    problem.task = InPlace()
    weights, batch = problem.initial_state()[0], problem.batch(torch.arange(16), {})
    _, expected = problem.loss_and_gradient(weights, {}, batch)
    problem.use_kernels(16)
    assert torch.allclose(problem.loss_and_gradient(weights, {}, batch)[1], expected, rtol=1e-4, atol=1e-6)


@needs_compiler
@pytest.mark.parametrize(("compiled", "layout"), [("on", torch.contiguous_format), ("off", torch.channels_last)])
def test_the_images_that_workers_receive_are_in_the_layout_of_their_batches(
    compiled: str, layout: torch.memory_format, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are converted once, before they are sent."""
    created: list[bool] = []
    real = BatchLoader.__init__
    monkeypatch.setattr(BatchLoader, "__init__", lambda self, *given: created.append(given[-1]) or real(self, *given))
    problem = pickle.loads(pickle.dumps(a_run(compiled).problem))
    assert problem.batch(torch.arange(16), {}).inputs.is_contiguous(memory_format=layout)
    assert problem.data.train.inputs.is_contiguous(memory_format=layout)
    assert created == [compiled == "off"]


def test_the_order_of_examples_is_kept() -> None:
    problem = a_run("off").problem
    before = problem.batch(torch.arange(16), {})
    assert before.inputs.is_contiguous(memory_format=torch.channels_last)
    problem.use_kernels(16)
    after = problem.batch(torch.arange(16), {})
    assert after.inputs.is_contiguous()
    assert torch.equal(before.inputs, after.inputs)
    assert torch.equal(before.targets, after.targets)


class Tapped(nn.Module):
    """Uses an activation twice."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.last = nn.Conv2d(3, 4, 3), nn.Linear(8, 4)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        images = self.convolution(images)
        return self.last(torch.cat([images.mean((2, 3)), images.amax((2, 3))], 1))


class Branching(Tapped):
    """Cannot be traced."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return super().forward(images if images.sum() > 0 else -images)


class Storing(Tapped):
    """Stores what it computes."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.features = self.convolution(images).mean((2, 3))
        return self.last(torch.cat([self.features, self.features], 1))


class Shared(nn.Module):
    """Applies the same layer twice."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.last = nn.Conv2d(3, 3, 3, padding=1), nn.Linear(192, 4)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.last(self.convolution(self.convolution(images)).flatten(1))


def with_a_hook() -> nn.Module:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 4))
    model[0].register_forward_hook(lambda module, inputs, output: 2 * output)
    return model


def with_a_frozen_layer() -> nn.Module:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 4))
    model[0].requires_grad_(False)
    return model


def with_a_forward_of_its_own() -> nn.Module:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 4))
    model[2].forward = lambda inputs: 2 * nn.functional.linear(inputs, model[2].weight)
    return model


@pytest.mark.parametrize(
    "model", [Tapped, Branching, Storing, Shared, with_a_hook, with_a_frozen_layer, with_a_forward_of_its_own]
)
def test_models_that_are_no_chain_are_left_to_torch(model: Any) -> None:
    problem = a_problem(model())
    before = set(vars(problem.model))
    assert not problem.suits_kernels(16)
    assert set(vars(problem.model)) == before, "tracing leaves nothing behind"


class Doubled(nn.Sequential):
    """Computes something else when it is called than its ``forward`` does."""

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        return 2 * super().__call__(inputs)


class Detached(nn.Sequential):
    """Does not train its convolution, which a trace does not show."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            images = self[0](images)
        return self[2](self[1](images))


@needs_compiler
@pytest.mark.parametrize("model_class", [Doubled, Detached])
def test_differences_are_noticed_even_if_the_last_layer_is_zero(model_class: Any) -> None:
    model = model_class(nn.Conv2d(3, 5, 4), nn.Flatten(), nn.Linear(125, 4))
    nn.init.zeros_(model[2].weight)
    nn.init.zeros_(model[2].bias)
    problem = a_problem(model)
    assert problem.suits_kernels(16)
    with pytest.raises(KernelError, match="output or gradient differs"):
        problem.use_kernels(16)
    assert problem.kernel_source is None


@needs_compiler
def test_unused_parameters_have_no_gradient() -> None:
    model = Tutorial()
    model.auxiliary = nn.Linear(30, 20)
    for _ in range(3):
        torch.empty_like(torch.nn.utils.parameters_to_vector(model.parameters())).fill_(torch.nan)  # memory to reuse
        gradient = passes(model, torch.randn(18, 2, 8, 4), torch.ones(18, 3))[1]
        assert torch.equal(gradient[-620:], torch.zeros(620))
        assert float(gradient[:-620].abs().sum()) > 0


def test_without_a_working_compiler_torch_computes_the_gradient(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(kernels, "compiler", lambda: "false")
    problem = a_problem(nn.Sequential(nn.Conv2d(3, 6, 4), nn.Flatten(), nn.Linear(150, 4)))
    with pytest.raises(KernelError, match=r"could not be compiled \(false failed\)"):
        assert_gradients_agree(problem)
    assert problem.kernel_source is None
    assert problem.batch(torch.arange(16), {}).inputs.is_contiguous(memory_format=torch.channels_last)


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
    monkeypatch.setattr(kernels.subprocess, "Popen", None)
    assert compile_anew(source).answer() == 42, "loaded from the cache, without a compiler"


@needs_compiler
def test_an_unwritable_cache_is_no_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert kernels._library.__wrapped__('extern "C" int answer() { return 7; }').answer() == 7


@needs_compiler
def test_a_cache_that_forbids_execution_is_no_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    forbidden = [str(tmp_path / "cache")]
    load = kernels.CDLL

    def load_elsewhere(path: str) -> Any:
        if any(path.startswith(folder) for folder in forbidden):
            raise OSError(f"{path}: failed to map segment from shared object")
        return load(path)

    monkeypatch.setattr(kernels, "CDLL", load_elsewhere)
    source = 'extern "C" int answer() { return 3; }'
    compile_anew = kernels._library.__wrapped__
    assert compile_anew(source).answer() == 3
    with monkeypatch.context() as patch:
        patch.setattr(kernels.subprocess, "Popen", None)
        assert compile_anew(source).answer() == 3, "a copy of the cached file"
    forbidden.append("/")
    with pytest.raises(KernelError, match=r"could not be loaded \(.*failed to map segment"):
        compile_anew(source)


def test_an_interruption_ends_the_compiler_and_removes_its_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The compiler is a script that starts another process and writes a temporary file, as g++ does."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(kernels.tempfile, "tempdir", str(tmp_path / "temporary"))
    script = tmp_path / "c++"
    script.write_text(f'#!/bin/sh\nsleep 600 &\ntouch "$TMPDIR/part.s"\necho $! > {tmp_path}/new\nmv new pid\nwait\n')
    script.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(kernels, "compiler", lambda: str(script))

    def interrupt(process: Any, source: str) -> None:
        while not (tmp_path / "pid").exists():
            time.sleep(0.01)
        assert len(list((tmp_path / "temporary").glob("*/part.s"))) == 1
        raise KeyboardInterrupt

    monkeypatch.setattr(kernels.subprocess.Popen, "communicate", interrupt)
    with pytest.raises(KeyboardInterrupt):
        kernels._library.__wrapped__("")
    assert is_gone(int((tmp_path / "pid").read_text()))
    assert not list((tmp_path / "temporary").iterdir())


def is_gone(pid: int) -> bool:
    """Whether a killed process ends within seconds; until its parent reads its exit code, it is a zombie."""
    for _ in range(500):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        time.sleep(0.01)
    return False


@needs_compiler
def test_a_worker_without_the_kernels_of_the_main_process_stops(without_kernels: Callable[[], None]) -> None:
    problem = a_run("on").problem
    assert problem.kernel_source is not None
    without_kernels()
    received = pickle.loads(pickle.dumps(problem))
    with pytest.raises(KernelError, match=r"could not be compiled \(false failed\) in a worker process"):
        received.loss_and_gradient(received.initial_state()[0], {}, received.batch(torch.arange(16), {}))


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
    assert (run.problem.kernel_source is not None) == (expected == "on")
    assert run.folder.config().engine.compile == expected, "recorded, so that a resumed run keeps it"


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


TINY = {"dataset": DATA, "clients": 10, "clients_per_round": 2, "partition": "iid", "model": "lenet5"}
TINY |= {"batch_size": 16, "local_steps": 2, "rounds": 3, "workers": 1, "device": "cpu"}


def begin(folder: Path, compiled: str = "on") -> None:
    """Run one of three rounds."""
    rounds = fedflat.rounds("fedavg", out=folder, engine__compile=compiled, **TINY)
    next(rounds)
    rounds.close()


@needs_compiler
def test_a_compiled_run_is_not_resumed_without_its_kernels(
    without_kernels: Callable[[], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    begin(tmp_path / "run")
    without_kernels()
    expected = r"cannot resume the run in .*run: .*engine.compile=on.*false failed.*restore .* engine.compile=off"
    with pytest.raises(UserError, match=expected):
        fedflat.resume(tmp_path / "run", dataset=DATA)
    monkeypatch.undo()
    assert fedflat.resume(tmp_path / "run", dataset=DATA).config.engine.compile == "on"


@needs_compiler
@pytest.mark.parametrize("compiled", ["on", "auto"])
def test_a_run_records_off_if_its_kernels_fail_and_is_resumed_without_them(
    without_kernels: Callable[[], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, compiled: str
) -> None:
    begin(tmp_path / "off", "off")
    monkeypatch.setattr(engine, "MIN_STEPS_TO_COMPILE", 1)
    without_kernels()
    with pytest.warns(UserWarning, match="training continues with torch's kernels"):
        begin(tmp_path / "run", compiled)
    monkeypatch.undo()
    kernels._library.cache_clear()
    assert RunFolder(tmp_path / "run").config().engine.compile == "off"
    for name in ("off", "run"):
        fedflat.resume(tmp_path / name, dataset=DATA)
    files = [tmp_path / name / "model.safetensors" for name in ("off", "run")]
    assert files[0].read_bytes() == files[1].read_bytes()


@needs_compiler
@pytest.mark.parametrize(("recorded", "given"), [("on", "off"), ("off", "on")])
def test_a_repeated_comparison_keeps_the_recorded_compile(tmp_path: Path, recorded: str, given: str) -> None:
    (folder,) = comparison_folders(tmp_path, ["fedavg"], [0])
    begin(folder, recorded)
    if recorded == "on":
        with pytest.raises(UserError, match=r"recorded engine\.compile=on, but engine\.compile=off is given"):
            fedflat.compare(["fedavg"], seeds=1, out=tmp_path, engine__compile=given, **TINY)
    else:  # the run may have begun without a compiler, although it was given on
        fedflat.compare(["fedavg"], seeds=1, out=tmp_path, engine__compile=given, **TINY)
    (result,) = fedflat.compare(["fedavg"], seeds=1, out=tmp_path, **TINY)
    assert result.config.engine.compile == recorded
    config = result.config.changed(engine={"compile": given, "device": "cuda"})
    engine.require_same_compile(folder, config, result.config)  # on a GPU, repeated runs differ by rounding, too


def test_a_model_without_kernels_is_not_compiled(tmp_path: Path) -> None:
    """Both values give the same result, so a repeated command may change it."""
    options: dict[str, Any] = {"rounds": 1, "local_steps": 1, "workers": 1, "device": "cpu", "out": tmp_path}
    first = fedflat.compare(["fedavg"], seeds=1, engine__compile="on", **options)
    (again,) = fedflat.compare(["fedavg"], seeds=1, engine__compile="off", **options)
    assert [result.config.engine.compile for result in (*first, again)] == ["off", "off"]


@needs_compiler
def test_a_run_compiled_on_a_gpu_continues_without_cpu_kernels(
    without_kernels: Callable[[], None], tmp_path: Path
) -> None:
    begin(tmp_path / "run", "off")
    file = tmp_path / "run" / "config.yaml"
    file.write_text(file.read_text().replace("compile: 'off'", "compile: 'on'"))  # as recorded on a GPU
    without_kernels()
    with pytest.warns(UserWarning, match="training continues with torch's kernels"):
        assert fedflat.resume(tmp_path / "run", dataset=DATA).status == "finished"


@needs_compiler
def test_a_changed_config_does_not_turn_the_kernels_off(tmp_path: Path) -> None:
    begin(tmp_path / "run")
    file = tmp_path / "run" / "config.yaml"
    file.write_text(file.read_text().replace("compile: 'on'", "compile: 'off'"))
    with pytest.raises(UserError, match=r"the checkpoint was written with engine.compile=on"):
        fedflat.resume(tmp_path / "run", dataset=DATA)
