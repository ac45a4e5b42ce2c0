"""fedflat itself, the plain loop, and the bound."""

from __future__ import annotations

import itertools
from contextlib import AbstractContextManager, nullcontext
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
from fedflat.experiment.setup.problem import federation

WARM_UPS = 3
"""Steps before a step is captured as a CUDA graph."""


@dataclass(frozen=True)
class Fedflat(Contender):
    """A run as any other, with everything a round has but evaluation."""

    name = "fedflat"

    def perform(self, stage: Stage) -> None:
        config = self.setting.config(self.algorithm, self.precision, self.engine, self.clients)
        record = Run(config, data=self.setting.dataset(), callbacks=(Pace(stage),)).go()
        raise UserError(f"{self.algorithm} stopped: {record.reason}; measure with a lower --lr")


class Pace(Callback):
    """Tells the stage of every round."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage

    def round_done(self, run: RunView) -> None:
        self.stage.round_done()


@dataclass(frozen=True)
class Plain(Contender):
    """The loop that everyone writes first."""

    name = "plain loop"

    def perform(self, stage: Stage) -> None:
        loop = PlainLoop(
            self.setting.config(self.algorithm, self.precision, "loop", self.clients), self.setting.dataset()
        )
        for number in itertools.count():
            loop.round(number)
            stage.round_done()


@dataclass(frozen=True)
class Bound(Contender):
    """One model on the cohort's batches put together: forward, backward, SGD, and nothing else, for as many steps as a client has."""

    name = "bound"
    compiled: bool = False

    def perform(self, stage: Stage) -> None:
        step = self.step(self.setting.config(precision=self.precision, clients=self.clients))
        while True:
            for _ in range(self.setting.local_steps):
                step()
            stage.round_done()

    def step(self, config: Config) -> Any:
        """One step on a batch that never changes, on a GPU as a CUDA graph."""
        problem, _ = federation(config, data=self.setting.dataset())
        model = problem.model.train().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        if (
            self.compiled and problem.device.type == "cuda"
        ):  # as the lanes have it: a bound should be the least there is
            model = with_gpu_layers(model)
        weights = [p.detach().clone().requires_grad_() for p in model.parameters() if p.requires_grad]
        names = [name for name, p in model.named_parameters() if p.requires_grad]
        chosen = torch.arange(self.setting.clients_per_round * self.setting.batch_size, device=problem.device) % len(
            problem.data.train
        )
        batch = problem.data.train.take(chosen)
        inputs = problem.normalised(batch.inputs).to(problem.dtype)

        def loss_of(weights: list[Tensor]) -> Tensor:
            with lower(config.engine.precision, problem.device):
                output = functional_call(model, dict(zip(names, weights, strict=True)), (inputs,))
                return F.cross_entropy(output.to(problem.dtype), batch.targets)

        loss = torch.compile(loss_of) if self.compiled else loss_of

        def step() -> None:
            gradients = torch.autograd.grad(loss(weights), weights)
            with torch.no_grad():
                torch._foreach_sub_(weights, [self.setting.lr * gradient for gradient in gradients])

        return captured(step) if problem.device.type == "cuda" else step


def lower(precision: str, device: torch.device) -> AbstractContextManager[Any]:
    """Arithmetic in bf16 where that is asked for, as torch does it by itself."""
    return torch.autocast(device.type, torch.bfloat16) if precision == "bf16" else nullcontext()


def captured(step: Any) -> Any:
    """A step as a CUDA graph, to be replayed."""
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
