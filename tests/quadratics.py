"""The quadratic problems of the numpy reference, run through the real pipeline: a torch model, a data set, the loop engine."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from fedflat.algorithms import Algorithm, algorithm
from fedflat.algorithms.algorithm import States
from fedflat.algorithms.descent import Descent
from fedflat.algorithms.rate import Schedule
from fedflat.data import Augmentation, Dataset, Examples
from fedflat.engines.aggregation import Aggregation
from fedflat.engines.contract import Client, Engine, ModelState, Outcome, Training
from fedflat.engines.loop import LoopEngine
from fedflat.engines.plan import Plan
from fedflat.engines.problem import Problem
from fedflat.text import show


class Bowl(nn.Module):
    """f(x) = 0.5 (x - b)^T A (x - b); an input is A and b, laid end to end."""

    def __init__(self, x0: np.ndarray, names: tuple[str, ...] = ("x",)) -> None:
        super().__init__()
        for name, piece in zip(names, np.array_split(x0, len(names)), strict=True):
            self.register_parameter(name, nn.Parameter(torch.tensor(piece, dtype=torch.float64)))
        self.size = len(x0)

    def forward(self, inputs: Tensor) -> Tensor:
        A, b = inputs.split([self.size**2, self.size], 1)
        off = torch.cat(list(self.parameters())) - b
        return 0.5 * torch.einsum("np,npq,nq->n", off, A.view(-1, self.size, self.size), off)


@dataclass(frozen=True)
class Value:
    """The model's output is its loss."""

    metric: str = "value"
    scale: float = 1.0

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return self.scale * output.mean()

    def sums(self, output: Tensor, target: Tensor) -> dict[str, Tensor]:
        return {"loss": self.scale * output.sum()}


def text_of(method: str, **parameters: object) -> str:
    """A method of the reference with its parameters, as fedflat names it."""
    renamed = {"sign": "perturb_sign", "signal": "alpha_signal"}
    return show(method.replace("_", "-"), {renamed.get(key, key): value for key, value in parameters.items()})  # type: ignore[misc]


@dataclass
class Walk:
    """What a run of rounds leaves behind."""

    x: list[np.ndarray] = field(default_factory=list)
    server: list[States] = field(default_factory=list)
    clients: list[dict[int, States]] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)


def problem_of(setting, names: tuple[str, ...] = ("x",), scale: float = 1.0) -> Problem:
    """A setting of the reference as a problem: client i's data is one sample, (A_i, b_i), as often as it has samples."""
    q = setting.problem
    rows = np.concatenate([q.A.reshape(q.N, -1), q.b], 1)
    inputs = torch.tensor(np.repeat(rows, q.n.astype(int), 0))
    examples = Examples(inputs, torch.zeros(len(inputs), dtype=torch.int64))
    data = Dataset("quadratics", examples, examples, ("value",), kind="vector")
    return Problem(Bowl(setting.x0, names), Value(scale=scale), data, Augmentation(), torch.float64)


def walk(
    text: str | Algorithm,
    setting,
    *,
    weighting: str = "uniform",
    decay: float = 1.0,
    descent: Descent | None = None,
    engine: Engine | None = None,
    names: tuple[str, ...] = ("x",),
    scale: float = 1.0,
) -> Walk:
    """Run an algorithm over a setting's cohorts, as an experiment would."""
    built = algorithm(text) if isinstance(text, str) else text
    problem = problem_of(setting, names, scale)
    engine = engine or LoopEngine(problem, workers=1)
    counts = setting.problem.n.astype(int)
    starts = np.cumsum([0, *counts])
    training = Training(
        built,
        descent or Descent(),
        Schedule(setting.eta, decay, len(setting.cohorts)),
        Plan(batch=int(counts.max()), steps=setting.steps),
        seed=0,
        clients=setting.problem.N,
        aggregation=Aggregation(weighting),  # type: ignore[arg-type]
    )
    weights, buffers, integers = problem.initial()
    model, server = ModelState(weights, buffers, integers), built.new_server(weights)
    states = {i: built.new_client(weights) for i in range(setting.problem.N)}
    done = Walk()
    for round, cohort in enumerate(setting.cohorts):
        members = [Client(i, np.arange(starts[i], starts[i + 1]), states[i]) for i in cohort]
        outcome = engine.train(training, round, model, server, members)
        x, server = built.aggregate(outcome.returned, outcome.means, server)
        model = ModelState(x, outcome.buffers, outcome.integers)
        states = states | {client.number: client.state for client in outcome.clients}
        done.x.append(x.numpy().copy())
        done.server.append(server)
        done.clients.append(states)
        done.outcomes.append(outcome)
    return done
