"""The quadratic problems of the numpy reference as torch models and datasets, trained by a real engine."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from fedflat.algorithms import Algorithm, algorithm
from fedflat.algorithms.algorithm import Descent, States
from fedflat.algorithms.lr_schedule import Schedule
from fedflat.data import Augmentation, Dataset, Examples
from fedflat.data.batches import Batch
from fedflat.engines.cpu.engine import LoopEngine
from fedflat.engines.problem.problem import Problem
from fedflat.engines.round.contract import Aggregation, Client, Engine, ModelState, Outcome, Training
from fedflat.engines.round.plan import Plan
from fedflat.text import show

from .reference.problem import Linear

RENAMED = {"sign": "perturb_sign", "signal": "alpha_signal", "asam_eta": "eta"}
"""Names in the reference -> names in fedflat."""


class Bowl(nn.Module):
    """f(x) = 0.5 (x - b)^T A (x - b); an input is A and b, concatenated."""

    def __init__(self, x0: np.ndarray, names: tuple[str, ...] = ("x",)) -> None:
        super().__init__()
        for name, piece in zip(names, np.array_split(x0, len(names)), strict=True):
            self.register_parameter(name, nn.Parameter(torch.tensor(piece, dtype=torch.float64)))
        self.size = len(x0)

    def forward(self, inputs: Tensor) -> Tensor:
        A, b = inputs.split([self.size**2, self.size], 1)
        off = torch.cat(list(self.parameters())) - b
        return 0.5 * torch.einsum("np,npq,nq->n", off, A.view(-1, self.size, self.size), off)


class Slope(Bowl):
    """f(x) = b^T x, for the same inputs."""

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs[:, self.size**2 :] @ torch.cat(list(self.parameters()))


@dataclass(frozen=True)
class Value:
    """A task whose loss is the model's output."""

    metric: str = "value"
    scale: float = 1.0

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return self.scale * output.mean()

    def sums(self, output: Tensor, target: Tensor) -> dict[str, Tensor]:
        return {"loss": self.scale * output.sum()}


@dataclass(eq=False)
class Quick(Problem):
    """The same problem with an explicit gradient instead of autograd, for long runs."""

    def loss_and_gradient(self, vector: Tensor, buffers: dict[str, Tensor], batch: Batch) -> tuple[Tensor, Tensor]:
        size, first = len(vector), batch.inputs[0]
        off = vector - first[size**2 :]
        gradient = self.task.scale * (first[: size**2].view(size, size) @ off)  # type: ignore[attr-defined]
        return 0.5 * (off @ gradient), gradient


def text_of(method: str, **parameters: object) -> str:
    """A method of the reference and its parameters, in fedflat's notation."""
    return show(method.replace("_", "-"), {RENAMED.get(key, key): value for key, value in parameters.items()})  # type: ignore[misc]


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
    setting, names: tuple[str, ...] = ("x",), scale: float = 1.0, quick: bool = False, device: str = "cpu"
) -> Problem:
    """A setting of the reference as a problem: all samples of client i are (A_i, b_i)."""
    q = setting.problem
    rows = np.concatenate([q.A.reshape(q.N, -1), q.b], 1)
    inputs = torch.tensor(np.repeat(rows, counts_of(setting), 0))
    examples = Examples(inputs, torch.zeros(len(inputs), dtype=torch.int64))
    data = Dataset("quadratics", examples, examples, ("value",), kind="vector")
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
    names: tuple[str, ...] = ("x",),
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
        x, server = built.aggregate(outcome.returned, outcome.means, server)
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

    def recorded(vector: Tensor, buffers: dict[str, Tensor], batch: Batch) -> tuple[Tensor, Tensor]:
        loss, gradient = inner(vector, buffers, batch)
        done.gradients.append((vector.numpy().copy(), gradient.numpy().copy()))
        return loss, gradient

    problem.loss_and_gradient = recorded  # type: ignore[method-assign]
