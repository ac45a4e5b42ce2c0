"""The quadratic problems of the numpy reference as torch models and datasets, trained by a real engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedflat.algorithms import Algorithm, algorithm
from fedflat.algorithms.algorithm import States
from fedflat.algorithms.descent import Descent
from fedflat.algorithms.lr_schedule import Schedule
from fedflat.algorithms.teacher import Teacher
from fedflat.data import Augmentation, Dataset, Examples
from fedflat.data.batches import Batch
from fedflat.engines.cpu.engine import LoopEngine
from fedflat.engines.problem.problem import Problem
from fedflat.engines.round.aggregation import Aggregation
from fedflat.engines.round.contract import Client, Engine, ModelState, Outcome, Training
from fedflat.engines.round.plan import Plan
from fedflat.text import show

from .reference.problem import Linear
from .reference.softmax import Softmax
from .softmax import softmax_problem

RENAMED = {"sign": "perturb_sign", "signal": "alpha_signal", "asam_eta": "eta"}
"""Names in the reference -> names in fedflat."""


class Bowl(nn.Module):
    """f(x) = 0.5 (x - b)^T A (x - b); an input is A and b, concatenated."""

    def __init__(self, x0: np.ndarray, names: tuple[str, ...] = ("weight",)) -> None:
        super().__init__()
        for name, piece in zip(names, np.array_split(x0, len(names)), strict=True):
            self.register_parameter(name, nn.Parameter(torch.tensor(piece, dtype=torch.float64)))
        self.size = len(x0)

    def forward(self, inputs: Tensor) -> Tensor:
        """x - b and A (x - b), of which ``Value`` computes f(x), [n, 2, size]."""
        A, b = inputs.split([self.size**2, self.size], 1)
        off = torch.cat(list(self.parameters())) - b
        return torch.stack([off, torch.einsum("npq,nq->np", A.view(-1, self.size, self.size), off)], 1)


class Slope(Bowl):
    """f(x) = b^T x, for the same inputs."""

    def forward(self, inputs: Tensor) -> Tensor:
        b = inputs[:, self.size**2 :]
        return torch.stack([torch.cat(list(self.parameters())).expand_as(b), 2 * b], 1)


@dataclass(frozen=True)
class Value:
    """A task whose loss is half the product of the two halves of the model's output."""

    metric: str = "value"
    scale: float = 1.0

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return self.scale * _half_product(output).mean()

    def sums(self, output: Tensor, target: Tensor) -> dict[str, Tensor]:
        return {"loss": self.scale * _half_product(output).sum()}

    def distillation(self, output: Tensor, teacher_output: Tensor, target: Tensor, temperature: float) -> Tensor:
        """0.5 (y - e)^T A (y - e) / temperature^2, as the KL divergence is to second order."""
        return self.scale * _half_product(output - teacher_output).mean() / temperature**2


def _half_product(output: Tensor) -> Tensor:
    return 0.5 * (output[:, 0] * output[:, 1]).sum(1)


@dataclass(eq=False)
class Quick(Problem):
    """The same problem with an explicit gradient instead of autograd, for long runs."""

    def loss_and_gradient(
        self, vector: Tensor, buffers: dict[str, Tensor], batch: Batch, teacher: Teacher | None = None
    ) -> tuple[Tensor, Tensor]:
        size, first = len(vector), batch.inputs[0]
        A, off = first[: size**2].view(size, size), vector - first[size**2 :]
        A = self.task.scale * A  # type: ignore[attr-defined]
        gradient = A @ off
        loss = 0.5 * (off @ gradient)
        if teacher is not None:
            term = teacher.weight / teacher.temperature**2 * (A @ (vector - teacher.model))
            gradient = gradient + term if teacher.with_loss else term
        return loss, gradient


def text_of(method: str, **parameters: object) -> str:
    """A method of the reference and its parameters, in fedflat's notation, in which weight decay is a setting."""
    values = {RENAMED.get(key, key): value for key, value in parameters.items() if key != "weight_decay"}
    return show(method.replace("_", "-"), values)  # type: ignore[arg-type]


def descent_of(parameters: Mapping[str, object]) -> Descent:
    """The settings among the parameters of a method of the reference."""
    return Descent(weight_decay=parameters.get("weight_decay", 0.0))  # type: ignore[arg-type]


@dataclass
class Walk:
    """Results of a run by round: models x^1..x^T, states, outcomes and further models to evaluate."""

    x: list[np.ndarray] = field(default_factory=list)
    server: list[States] = field(default_factory=list)
    clients: list[dict[int, States]] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    evaluated: list[dict[str, np.ndarray]] = field(default_factory=list)
    gradients: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)
    """(point, gradient) of every backward pass, in order."""


def counts_of(setting) -> np.ndarray:
    """Samples of each client: one per step if the numbers of steps differ (batches of one, one epoch)."""
    if isinstance(setting.problem, Softmax):
        return np.array([len(labels) for labels in setting.problem.labels])
    return setting.problem.n.astype(int) if np.isscalar(setting.steps) else np.asarray(setting.steps)


def schedule_of(setting, decay: float = 1.0) -> Schedule:
    """The schedule of a setting: a constant learning rate, or one that decays by a factor per round."""
    rounds = len(setting.cohorts)
    if np.isscalar(setting.eta):
        return Schedule(float(setting.eta), decay, rounds)
    factors = np.divide(setting.eta[1:], setting.eta[:-1])
    assert np.ptp(factors) < 1e-12
    return Schedule(float(setting.eta[0]), float(factors[0]), rounds)


def problem_of(
    setting, names: tuple[str, ...] = ("weight",), scale: float = 1.0, quick: bool = False, device: str = "cpu"
) -> Problem:
    """A setting of the reference as a problem: all samples of client i are (A_i, b_i)."""
    q = setting.problem
    if isinstance(q, Softmax):
        return softmax_problem(q, setting.x0, device)
    rows = np.concatenate([q.A.reshape(q.N, -1), q.b], 1)
    inputs = torch.tensor(np.repeat(rows, counts_of(setting), 0))
    labels = q.labels(counts_of(setting))
    targets = np.concatenate([np.repeat(np.arange(len(counts)), counts) for counts in labels])
    examples = Examples(inputs, torch.from_numpy(targets))
    data = Dataset("quadratics", examples, examples, tuple(map(str, range(labels.shape[1]))), kind="vector")
    model = Slope if isinstance(q, Linear) else Bowl
    assert not (quick and model is Slope)
    kind = Quick if quick else Problem
    return kind(
        model(setting.x0, names), Value(scale=scale), data, Augmentation(), torch.float64, device=torch.device(device)
    )


def walk(
    text: str | Algorithm,
    setting,
    *,
    weighting: str = "uniform",
    decay: float = 1.0,
    descent: Descent | None = None,
    engine: Engine | None = None,
    names: tuple[str, ...] = ("weight",),
    scale: float = 1.0,
    quick: bool = False,
    record: bool = False,
    forget: bool = False,
    device: str = "cpu",
) -> Walk:
    """Run an algorithm over a setting's cohorts.

    ``record`` keeps every gradient; with ``forget``, clients lose their state after every round.
    """
    built = algorithm(text) if isinstance(text, str) else text
    problem = problem_of(setting, names, scale, quick, device)
    done = Walk()
    if record:
        _record(problem, done)
    engine = engine or LoopEngine(problem, workers=1)
    counts = counts_of(setting)
    starts = np.cumsum([0, *counts])
    training = Training(
        built,
        descent or Descent(),
        schedule_of(setting, decay),
        Plan(batch_size=int(counts.max()), steps=setting.steps) if np.isscalar(setting.steps) else Plan(batch_size=1),
        seed=0,
        clients=setting.problem.N,
        aggregation=Aggregation(weighting),  # type: ignore[arg-type]
    )
    weights, buffers, integer_buffers = problem.initial_state()
    model, server = ModelState(weights, buffers, integer_buffers), built.new_server(weights)
    states = {i: built.new_client(weights) for i in range(setting.problem.N)}
    for round, cohort in enumerate(setting.cohorts):
        members = [Client(i, np.arange(starts[i], starts[i + 1]), states[i]) for i in cohort]
        outcome = engine.train(training, round, model, server, members)
        x, server = built.aggregate(outcome.cohort_means, outcome.message_means, server)
        model = ModelState(x, outcome.buffers, outcome.integer_buffers)
        if not forget:
            states = states | {client.number: client.state for client in outcome.clients}
        done.x.append(x.cpu().numpy().copy())
        done.server.append(server)
        done.clients.append(states)
        done.outcomes.append(outcome)
        done.evaluated.append(
            {name: w.cpu().numpy().copy() for name, w in built.drift.evaluated(server["drift"]).items()}
        )
    return done


def _record(problem: Problem, done: Walk) -> None:
    inner = problem.loss_and_gradient

    def recorded(vector: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        loss, gradient = inner(vector, *rest)
        done.gradients.append((vector.numpy().copy(), gradient.numpy().copy()))
        return loss, gradient

    problem.loss_and_gradient = recorded  # type: ignore[method-assign]
