"""GPU tests of every algorithm; run ``pytest tests/engines/test_on_a_gpu.py`` on a machine with a GPU."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedflat.bench.setting import RandomImages
from fedflat.data import Dataset, Examples
from fedflat.engines.gpu.engine import LaneEngine
from fedflat.engines.gpu.step import LocalStep, compiled_step, eager_step
from fedflat.engines.problem.problem import Problem
from fedflat.engines.round.contract import Training
from fedflat.experiment.config import Config, config
from fedflat.experiment.run import Run
from fedflat.flatness import Objective

from ..quadratics import problem_of, text_of, walk
from ..reference import GOLDEN, golden
from .test_engines_agree import TEXTS

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here")


@pytest.mark.parametrize(
    "step", [pytest.param(eager_step, id="eager"), pytest.param(partial(compiled_step, strict=True), id="compiled")]
)
@pytest.mark.parametrize("name", GOLDEN)
def test_golden(name: str, step: Callable[[Problem, Training], LocalStep]) -> None:
    """Golden iterates in float64, with captured and replayed steps."""
    method, parameters, expected = GOLDEN[name]
    engine = LaneEngine(problem_of(golden(), device="cuda"), step=step)
    found = walk(text_of(method, **parameters), golden(), engine=engine, device="cuda").x
    assert np.abs(np.array(found) - np.array(expected)).max() < 1e-9


def experiment(
    algorithm: str, engine: dict[str, str | int], steps: int = 5, partition: str = "iid", **more: str
) -> Config:
    """Two rounds of four clients; with larger learning rates, rounding errors dominate."""
    return config(
        {
            "algorithm": algorithm,
            "data": {"clients": 10, "partition": partition, "augmentation": "crop-flip"},
            "federation": {"clients_per_round": 4},
            "training": {"rounds": 2, "local_steps": steps, "batch_size": 20, "lr": 0.02},
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


@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize("text", ["fedavg", "fedsam", "fedwmsam", "scaffold", "fedmoswa"])
def test_compiled_steps_learn_equally_well(text: str, precision: str) -> None:
    """Over many steps and batches; rounding alone changes FedSAM by a tenth, in bf16 by a fifth."""
    data, moved = bright(RandomImages(size=2000).dataset()), []
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="the local step")
        for compile in ("off", "on"):
            engine = {"name": "lanes", "device": "cuda", "compile": compile, "precision": precision}
            run = Run(experiment(text, engine, steps=10, model="cnn"), data=data)
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
    plain, fast = (Objective(network, F.cross_entropy, (inputs, targets), batch=5) for _ in range(2))
    fast.compile()
    vector = torch.randn(plain.size, dtype=torch.float64).cuda()
    torch.testing.assert_close(
        fast.hessian_product(None, vector), plain.hessian_product(None, vector), rtol=1e-9, atol=1e-11
    )
    assert fast._compiled is not None and fast._compiled._usable
