"""Contenders of this package: fedflat itself, a plain PyTorch loop, and a bound on the speed of any simulator."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

from fedflat.bench.plain import PlainLoop
from fedflat.bench.stage import Contender, Stage
from fedflat.engines.gpu.layers import with_gpu_layers
from fedflat.errors import UserError
from fedflat.experiment.callback import Callback, RunView
from fedflat.experiment.config import Config
from fedflat.experiment.run import Run
from fedflat.experiment.setup.problem import build_problem

WARM_UPS = 3
"""Steps before a step is captured as a CUDA graph."""


@dataclass(frozen=True)
class Fedflat(Contender):
    """A complete run, except for evaluation."""

    name = "fedflat"

    def perform(self, stage: Stage) -> None:
        config = self.setting.config(self.algorithm, self.precision, self.engine, self.clients)
        record = Run(config, data=self.setting.load_data(), callbacks=(StageCallback(stage),)).execute()
        raise UserError(f"{self.algorithm} stopped: {record.reason}; measure with a lower --lr")


class StageCallback(Callback):
    """Reports every completed round to the stage."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage

    def round_done(self, run: RunView) -> None:
        self.stage.round_done()


@dataclass(frozen=True)
class Plain(Contender):
    """A straightforward loop in PyTorch."""

    name = "plain loop"

    def perform(self, stage: Stage) -> None:
        config = self.setting.config(self.algorithm, self.precision, "loop", self.clients)
        loop = PlainLoop(config, self.setting.load_data())
        for number in itertools.count():
            loop.round(number)
            stage.round_done()


@dataclass(frozen=True)
class SpeedBound(Contender):
    """One model on the concatenated batches of a cohort: only forward, backward and SGD, for a client's local steps."""

    name = "bound"
    compiled: bool = False

    def perform(self, stage: Stage) -> None:
        step = self.step(self.setting.config(precision=self.precision, clients=self.clients))
        while True:
            for _ in range(self.setting.local_steps):
                step()
            stage.round_done()

    def step(self, config: Config) -> Callable[[], None]:
        """Build a function that does one training step on a constant batch; on a GPU it replays a CUDA graph."""
        problem, _ = build_problem(config, data=self.setting.load_data())
        on_gpu = problem.device.type == "cuda"
        model = problem.model.train().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        if self.compiled and on_gpu:
            model = with_gpu_layers(model)  # as the lanes engine does, so that the bound is no slower
        trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        weights = [parameter.detach().clone().requires_grad_() for parameter in trained.values()]
        size = self.setting.clients_per_round * self.setting.batch_size
        batch = problem.data.train.take(torch.arange(size, device=problem.device) % len(problem.data.train))
        inputs = problem.normalised(batch.inputs).to(problem.dtype)
        use_bf16 = config.engine.precision == "bf16"

        def loss_of(weights: list[Tensor]) -> Tensor:
            with torch.autocast(problem.device.type, torch.bfloat16, enabled=use_bf16):
                output = functional_call(model, dict(zip(trained, weights, strict=True)), (inputs,))
                return F.cross_entropy(output.to(problem.dtype), batch.targets)

        loss = torch.compile(loss_of) if self.compiled else loss_of

        def step() -> None:
            gradients = torch.autograd.grad(loss(weights), weights)
            with torch.no_grad():
                torch._foreach_sub_(weights, [self.setting.lr * gradient for gradient in gradients])

        return capture(step) if on_gpu else step


def capture(step: Callable[[], None]) -> Any:
    """Capture a step as a CUDA graph; returns a function that replays it."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UPS):
            step()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay
