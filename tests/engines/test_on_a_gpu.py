"""GPU tests of every algorithm; run ``pytest tests/engines/test_on_a_gpu.py`` on a machine with a GPU."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedflat.algorithms import algorithm
from fedflat.bench.plain import PlainLoop, training_loss
from fedflat.bench.setting import BenchmarkSetting, RandomImages
from fedflat.data import Dataset, Examples
from fedflat.engines.cpu.engine import LoopEngine
from fedflat.engines.gpu.engine import LaneEngine
from fedflat.engines.gpu.lane import RESERVE
from fedflat.engines.gpu.step import LocalStep, compiled_step, eager_step
from fedflat.engines.problem.problem import Problem
from fedflat.engines.round.client_facts import label_scalars
from fedflat.engines.round.contract import Training
from fedflat.experiment.campaign.estimate import GpuForecast, forecast
from fedflat.experiment.config import Config, parse_config
from fedflat.experiment.run import Run
from fedflat.experiment.store.run_folder import RunFolder
from fedflat.flatness import Objective

from ..quadratics import descent_of, problem_of, text_of, walk
from ..reference import GOLDEN, GOLDEN_SOFTMAX, bed, golden, golden_softmax
from .test_engines_agree import TEXTS

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here")


STEPS = [pytest.param(eager_step, id="eager"), pytest.param(partial(compiled_step, strict=True), id="compiled")]


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("name", GOLDEN)
def test_golden(name: str, step: Callable[[Problem, Training], LocalStep]) -> None:
    """Golden iterates in float64, with captured and replayed steps."""
    row = GOLDEN[name]
    engine = LaneEngine(problem_of(golden(), device="cuda"), step=step)
    text, descent = text_of(row.method, **row.parameters), descent_of(row.parameters)
    assert row.error(walk(text, golden(), descent=descent, engine=engine, device="cuda").x) < 1e-9


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("name", GOLDEN_SOFTMAX)
def test_golden_of_softmax_regression(name: str, step: Callable[[Problem, Training], LocalStep]) -> None:
    method, parameters, eta, first, third = GOLDEN_SOFTMAX[name]
    setting = golden_softmax().but(eta=eta)
    engine = LaneEngine(problem_of(setting, device="cuda"), step=step)
    text, descent = text_of(method, **parameters), descent_of(parameters)
    x = walk(text, setting, descent=descent, engine=engine, device="cuda").x
    assert np.abs(np.array([x[0], x[2]]) - np.array([first, third])).max() < 1e-9


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("text", ["fedinit", "fedscam", "fedscam+relaxed", "feddisco"])
def test_one_lane_trains_clients_in_turn(text: str, step: Callable[[Problem, Training], LocalStep]) -> None:
    """A replayed graph reads the start, the pilot gradients and the labels of the client that is loaded now."""
    setting = bed(rounds=4, size=3).but(steps=[4, 3, 5, 1, 2])
    loop = walk(text, setting, engine=LoopEngine(problem_of(setting), workers=1))
    engine = LaneEngine(problem_of(setting, device="cuda"), lanes=1, step=step)
    lanes = walk(text, setting, engine=engine, device="cuda")
    assert np.abs(np.array(loop.x) - np.array(lanes.x)).max() < 1e-9


def test_labels_are_counted_without_waiting_for_the_gpu() -> None:
    setting = bed(rounds=1, size=3)
    problem, training = problem_of(setting, device="cuda"), SimpleNamespace(algorithm=algorithm("feddisco"))
    label_scalars(problem, training, np.arange(2))  # type: ignore[arg-type]
    torch.cuda.set_sync_debug_mode("error")
    try:
        scalars = label_scalars(problem, training, np.arange(3))  # type: ignore[arg-type]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert scalars["divergence"].is_cuda


def experiment(
    algorithm: str, engine: dict[str, str | int], steps: int = 5, partition: str = "iid", **more: str
) -> Config:
    """Two rounds of four clients; with larger learning rates, rounding errors dominate."""
    has_unit_steps = any(part in algorithm for part in ("adam", "muon", "sol"))  # whatever the gradient's size
    return parse_config(
        {
            "algorithm": algorithm,
            "data": {"clients": 10, "partition": partition, "augmentation": "crop-flip"},
            "federation": {"clients_per_round": 4},
            "training": {"rounds": 2, "local_steps": steps, "batch_size": 20, "lr": 1e-3 if has_unit_steps else 0.02},
            "evaluation": {"every": 2},
            "engine": {"precision": "float32", **engine},
            **more,
        }
    )


LOOP: dict[str, str | int] = {"name": "loop", "device": "cpu", "workers": 1}


@pytest.mark.parametrize("text", TEXTS)
def test_float32_agrees_with_the_loop(text: str) -> None:
    """A network in single precision without TF32."""
    data = RandomImages(size=1000).dataset()
    engines = (LOOP, {"name": "lanes", "device": "cuda", "compile": "off"})
    runs = [
        Run(experiment(text, engine, partition="dirichlet(alpha=0.5)", model="lenet5"), data=data) for engine in engines
    ]
    loop, lanes = (run.execute().models["server"].weights.cpu() for run in runs)
    assert (loop - lanes).norm() < 1e-3 * loop.norm()


@pytest.mark.parametrize("text", ["scaffold", "fedmoswa+sam"])
@pytest.mark.parametrize(
    "federation", [{"policy": "fedbuff(buffer=4)"}, {"clock": "lognormal(1)", "policy": "fedbuff(3)"}]
)
def test_asynchronous_runs_agree_with_the_loop(text: str, federation: dict[str, str]) -> None:
    """Also with clients that train in several groups; without latency, a buffer of cohort size is synchronous.

    The GPU sums in varying order. With SAM, a ReLU whose input is almost zero can then switch, and the results of equal
    runs differ by 3e-5, as they do on the CPU after a change of the initial weights by rounding.
    """
    data, models = RandomImages(size=1000).dataset(), []
    for device, changed in (("cpu", federation), ("cuda", federation), ("cuda", {})):
        base = experiment(text, LOOP if device == "cpu" else LANES, model="lenet5")
        settings = {
            "federation": base.federation.model_copy(update=changed),
            "training": base.training.model_copy(update={"rounds": 4}),
        }
        models.append(Run(base.model_copy(update=settings), data=data).execute().models["server"].weights.cpu())
    loop, lanes, synchronous = models
    assert (loop - lanes).norm() < 1e-3 * loop.norm()
    assert ((lanes - synchronous).norm() < 2e-4 * lanes.norm()) == ("clock" not in federation)


def test_a_compiled_step_agrees_with_the_loop() -> None:
    """With replaced GPU layers, and BatchNorm that counts batches."""
    torch.manual_seed(0)
    first = [nn.Conv2d(3, 8, 5, padding=2), nn.GroupNorm(2, 8), nn.ReLU(), nn.MaxPool2d(4)]
    second = [nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.Tanh(), nn.Flatten(), nn.Linear(288, 10)]
    data, models = RandomImages(size=1000).dataset(), []
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="the local step")
        for engine in (LOOP, {"name": "lanes", "device": "cuda", "compile": "on"}):
            models.append(
                Run(experiment("fedsam", engine), data=data, model=nn.Sequential(*first, *second))
                .execute()
                .models["server"]
            )
    loop, lanes = models
    assert (loop.weights - lanes.weights.cpu()).norm() < 1e-3 * loop.weights.norm()
    assert (loop.buffers - lanes.buffers.cpu()).norm() < 1e-3 * loop.buffers.norm()
    assert (
        {name: int(n) for name, n in lanes.integer_buffers.items()}
        == {name: int(n) for name, n in loop.integer_buffers.items()}
        != {}
    )


@pytest.mark.parametrize("precision", ["float32", "tf32", "bf16"])
@pytest.mark.parametrize(
    ("text", "model"),
    [*((text, "cnn") for text in ("fedavg", "fedsam", "fedwmsam", "scaffold", "fedmoswa")), ("fedavg", "resnet20")],
)
def test_compiled_steps_learn_equally_well(text: str, model: str, precision: str) -> None:
    """Over several steps. Rounding alone changes ten steps of FedSAM by a tenth, in bf16 by a fifth, and those of
    ResNet-20 by a third.
    """
    data, moved, steps = bright(RandomImages(size=2000).dataset()), [], 3 if model == "resnet20" else 10
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="the local step")
        for compile in ("off", "on"):
            engine = {"name": "lanes", "device": "cuda", "compile": compile, "precision": precision}
            run = Run(experiment(text, engine, steps=steps, model=model), data=data)
            start = run.server.model.weights.clone()
            moved.append(run.execute().models["server"].weights - start)
    plain, compiled = moved
    assert (plain - compiled).norm() < 0.4 * plain.norm()


def bright(data: Dataset) -> Dataset:
    """Dim images whose classes differ by the brightness of a colour, so that there is something to learn."""

    def lit(examples: Examples) -> Examples:
        images = examples.inputs // 4
        for label in range(10):
            images[examples.targets == label, label % 3] += 10 * label
        return Examples(images, examples.targets)

    return replace(data, train=lit(data.train), test=lit(data.test))


def test_a_compiled_hessian_product_agrees_with_the_eager_one() -> None:
    torch.manual_seed(0)
    layers = [
        nn.Conv2d(3, 8, 3),
        nn.GroupNorm(2, 8),
        nn.Tanh(),
        nn.BatchNorm2d(8),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(72, 3),
    ]
    network = nn.Sequential(*layers).double().cuda()
    inputs, targets = torch.randn(10, 3, 8, 8, dtype=torch.float64).cuda(), (torch.arange(10) % 3).cuda()
    plain, fast = (Objective(network, F.cross_entropy, (inputs, targets), batch_size=5) for _ in range(2))
    fast.compile()
    vector = torch.randn(plain.size, dtype=torch.float64).cuda()
    torch.testing.assert_close(
        fast.hessian_product(None, vector), plain.hessian_product(None, vector), rtol=1e-9, atol=1e-11
    )
    assert fast._compiled is not None and fast._compiled._usable


LANES: dict[str, str | int] = {"name": "lanes", "device": "cuda", "compile": "off"}


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0), reason="this GPU has no TF32"
)
def test_auto_is_tf32_and_a_resumed_run_keeps_its_precision(tmp_path: Path) -> None:
    data, weights, before = bright(RandomImages(size=1000).dataset()), {}, torch.backends.cuda.matmul.allow_tf32
    for precision in ("auto", "tf32", "float32"):
        run = Run(experiment("fedavg", LANES | {"precision": precision}, model="cnn"), tmp_path / precision, data=data)
        weights[precision] = run.execute().models["server"].weights
        assert RunFolder(tmp_path / precision).config().engine.precision == run.config.engine.precision
    assert RunFolder(tmp_path / "auto").config().engine.precision == "tf32"
    difference = (weights["auto"] - weights["float32"]).norm() / weights["float32"].norm()
    assert 1e-7 < difference < 1e-2, "TF32 rounds, but only a little"
    assert (weights["auto"] - weights["tf32"]).norm() < difference * weights["float32"].norm()
    auto = experiment("fedavg", LANES | {"precision": "auto"}, model="cnn")
    resumed = Run(auto, tmp_path / "float32", data=data, resume=True)
    assert resumed.config.engine.precision == "float32" and torch.backends.cuda.matmul.allow_tf32 == before


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0), reason="this GPU has no TF32"
)
def test_runs_in_turn_keep_their_precisions() -> None:
    """Rounds of a TF32 and a float32 run alternate, and in between the user changes torch's switch."""
    data, seen = bright(RandomImages(size=1000).dataset()), dict[str, set[bool]]()

    class Model(nn.Sequential):
        """Records torch's switch in every forward pass."""

        def __init__(self, precision: str) -> None:
            super().__init__(nn.Flatten(), nn.Linear(3072, 10))
            self.precision = precision

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.setdefault(self.precision, set()).add(torch.backends.cuda.matmul.allow_tf32)
            return super().forward(x)

    runs = [
        Run(experiment("fedavg", LANES | {"precision": precision}), data=data, model=Model(precision))
        for precision in ("tf32", "float32")
    ]
    for _ in zip(*(run.train_rounds() for run in runs), strict=True):
        torch.backends.cuda.matmul.allow_tf32 = not torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    assert seen == {"tf32": {True}, "float32": {False}}


def test_the_plan_counts_the_lanes_that_fit() -> None:
    """With less free memory, the engine gets about as many lanes as the plan of a run with enough memory predicts."""
    data = RandomImages(size=2000).dataset()

    def planned(clients: int) -> GpuForecast:
        base = experiment("scaffold", LANES, steps=2, model="cnn")
        update = {
            "federation": base.federation.model_copy(update={"clients_per_round": clients}),
            "training": base.training.model_copy(update={"rounds": 1, "batch_size": 200}),
            "data": base.data.model_copy(update={"clients": 10}),
        }
        run = Run(base.model_copy(update=update), data=data)
        run.execute()
        plan = forecast(run, 1.0).gpu
        assert plan is not None
        return plan

    plenty = planned(4)
    assert plenty.lanes == 4 < plenty.fitting and plenty.precision == "float32"
    assert plenty.lane > 2**22 and 4 * plenty.lane < plenty.reserved < plenty.total
    gc.collect()
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    ballast = torch.empty(free - RESERVE - 6 * plenty.lane - 2**28, dtype=torch.uint8, device="cuda")
    little = planned(10)
    del ballast
    assert 2 <= little.lanes <= 9 and little.fitting == little.lanes


def test_the_loss_of_a_benchmark_takes_tensors_on_the_cpu() -> None:
    setting = BenchmarkSetting("lenet5", "random(size=200)", device="cuda")
    loop = PlainLoop(setting.config(), setting.load_data())
    on_cpu = {name: tensor.cpu() for name, tensor in loop.state.items()}
    assert training_loss(loop.problem, on_cpu) == pytest.approx(loop.loss())
