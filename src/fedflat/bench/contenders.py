"""Contenders that need no other package: fedflat itself, a plain PyTorch loop, and a bound on any simulator's speed."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

from fedflat.bench.contender_process import LocalContender, RoundTimer
from fedflat.bench.plain import PlainLoop, problem_at_precision, training_loss
from fedflat.engines.gpu.layers import with_gpu_layers
from fedflat.errors import UserError
from fedflat.experiment.callback import Callback, RunView
from fedflat.experiment.config import Config
from fedflat.experiment.run import Run

WARM_UPS = 3
"""Steps before a step is captured as a CUDA graph."""


@dataclass(frozen=True)
class Fedflat(LocalContender):
    """A run of fedflat, complete except for evaluation."""

    name = "fedflat"

    def run_rounds(self, timer: RoundTimer) -> None:
        """Train until the timer's callback stops the run with ``NoMoreRounds``; any other end is an error."""
        config = self.setting.config(self.algorithm, self.precision, self.engine, self.clients)
        record = Run(config, data=self.setting.random_data(), callbacks=(TimerCallback(timer),)).execute()
        raise UserError(f"{self.algorithm} stopped: {record.reason}; measure with a lower --lr")


class TimerCallback(Callback):
    """Reports every completed round to the timer."""

    def __init__(self, timer: RoundTimer) -> None:
        self.timer = timer

    def round_done(self, run: RunView) -> None:
        problem, model = run.problem, run.server.model
        tensors = {**problem.layout.views(model.weights), **problem.buffer_layout.views(model.buffers)}
        self.timer.round_done(lambda: training_loss(problem, tensors))


@dataclass(frozen=True)
class Plain(LocalContender):
    """A straightforward loop over the clients in PyTorch, without fedflat's engines."""

    name = "plain loop"

    def run_rounds(self, timer: RoundTimer) -> None:
        """Train rounds until ``timer.round_done`` raises ``NoMoreRounds``."""
        config = self.setting.config(self.algorithm, self.precision, "loop", self.clients)
        loop = PlainLoop(config, self.setting.load_data())
        for number in itertools.count():
            loop.round(number)
            timer.round_done(loop.loss)


@dataclass(frozen=True)
class SpeedBound(LocalContender):
    """The least time that a round could take: one model trains on the concatenated batches of a cohort.

    A round is only forward, backward and SGD, repeated for a client's number of local steps.
    """

    name = "bound"
    compiled: bool = False

    def run_rounds(self, timer: RoundTimer) -> None:
        """Repeat rounds of ``local_steps`` steps until ``timer.round_done`` raises ``NoMoreRounds``."""
        step = self.build_step(self.setting.config(precision=self.precision, clients=self.clients))
        # ``step`` keeps the tensors alive that a captured graph reads and writes.
        repeat = capture(step) if self.setting.on_gpu else step
        while True:
            for _ in range(self.setting.local_steps):
                repeat()
            timer.round_done()

    def build_step(self, config: Config) -> Callable[[], None]:
        """Build a function that takes one training step on a constant batch.

        The batch is as large as all batches of a cohort's local step together, with repeated examples if necessary.
        """
        problem, _ = problem_at_precision(config, self.setting.load_data())
        on_gpu = problem.device.type == "cuda"
        model = problem.model.train().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        if self.compiled and on_gpu:
            model = with_gpu_layers(model)  # as the lanes engine does, so that the bound is no slower
        trainable = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        weights = [parameter.detach().clone().requires_grad_() for parameter in trainable.values()]  # in the same order
        size = self.setting.clients_per_round * self.setting.batch_size
        batch = problem.data.train.take(torch.arange(size, device=problem.device) % len(problem.data.train))
        inputs = problem.normalised(batch.inputs).to(problem.dtype)
        use_bf16 = config.engine.precision == "bf16"

        def loss_of(weights: list[Tensor]) -> Tensor:
            """Cross-entropy on the constant batch, with ``weights`` in place of the model's trainable parameters."""
            with torch.autocast(problem.device.type, torch.bfloat16, enabled=use_bf16):
                output = functional_call(model, dict(zip(trainable, weights, strict=True)), (inputs,))
                return F.cross_entropy(output.to(problem.dtype), batch.targets)

        loss = torch.compile(loss_of) if self.compiled else loss_of

        def step() -> None:
            """One step of SGD, which changes ``weights`` in place."""
            gradients = torch.autograd.grad(loss(weights), weights)
            with torch.no_grad():
                torch._foreach_sub_(weights, [self.setting.lr * gradient for gradient in gradients])

        return step


def capture(step: Callable[[], None]) -> Any:
    """Capture a step as a CUDA graph; returns a function that replays it, as long as ``step`` exists."""
    # A capture needs warm-up steps on another stream (see the notes on CUDA graphs in PyTorch's documentation).
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
