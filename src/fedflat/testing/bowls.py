"""A federation whose every quantity is known in closed form: client i has f_i(x) = 0.5 (x - b_i)^T A_i (x - b_i)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from fedflat.algorithms import Algorithm
from fedflat.algorithms.descent import Descent
from fedflat.algorithms.lr_schedule import Schedule
from fedflat.algorithms.slot import State
from fedflat.data import Augmentation, Dataset, Examples
from fedflat.engines.cpu.engine import LoopEngine
from fedflat.engines.problem.problem import Problem
from fedflat.engines.round.aggregation import Aggregation
from fedflat.engines.round.contract import Client, Engine, ModelState, Outcome, Training
from fedflat.engines.round.plan import Plan


class Bowl(nn.Module):
    """A model that is a point x, and whose output on an input (A, b) is the value of that bowl at x."""

    def __init__(self, x: Tensor) -> None:
        super().__init__()
        self.x = nn.Parameter(x.clone())

    def forward(self, inputs: Tensor) -> Tensor:
        """The value of each bowl at x."""
        size = len(self.x)
        matrices, centres = inputs[:, : size**2], inputs[:, size**2 :]
        off = self.x - centres
        return 0.5 * torch.einsum("np,npq,nq->n", off, matrices.reshape(-1, size, size), off)


@dataclass(frozen=True)
class Value:
    """The task whose loss is the model's output."""

    metric: str = "value"

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """The mean value."""
        return output.mean()

    def sums(self, output: Tensor, target: Tensor) -> dict[str, Tensor]:
        """The summed value."""
        return {"loss": output.sum(), "value": output.sum()}


@dataclass
class Bowls:
    """Some clients' bowls, drawn by a seed; with ``alike``, the same bowl for all of them."""

    clients: int = 4
    size: int = 5
    seed: int = 0
    alike: bool = False
    matrices: Tensor = field(init=False)
    centres: Tensor = field(init=False)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        roots = rng.normal(size=(self.clients, self.size, self.size)) / np.sqrt(self.size)
        matrices = roots @ roots.transpose(0, 2, 1) + 0.3 * np.eye(self.size)
        centres = rng.normal(size=(self.clients, self.size))
        if self.alike:
            matrices, centres = (np.repeat(some[:1], self.clients, 0) for some in (matrices, centres))
        self.matrices, self.centres = torch.from_numpy(matrices), torch.from_numpy(centres)
        self.start = torch.from_numpy(rng.normal(size=self.size)) + 2.0

    def optimum(self) -> Tensor:
        """Where the clients' mean is least."""
        pulled = torch.einsum("npq,nq->p", self.matrices, self.centres)
        found: Tensor = torch.linalg.solve(self.matrices.sum(0), pulled)
        return found

    def value(self, x: Tensor) -> float:
        """The clients' mean at x."""
        off = x - self.centres
        return float(0.5 * torch.einsum("np,npq,nq->n", off, self.matrices, off).mean())

    def problem(self) -> Problem:
        """The federation as any other: one example per client."""
        inputs = torch.cat([self.matrices.flatten(1), self.centres], 1)
        examples = Examples(inputs, torch.zeros(self.clients, dtype=torch.int64))
        data = Dataset("bowls", examples, examples, ("value",), kind="vector")
        return Problem(Bowl(self.start), Value(), data, Augmentation(), torch.float64)


@dataclass
class Walk:
    """What some rounds leave behind: the models x^0, x^1, ..., the clients' states, and what came back in each round."""

    x: list[Tensor]
    states: list[dict[int, Mapping[str, State]]]
    outcomes: list[Outcome] = field(default_factory=list)


def walk(
    method: Algorithm,
    bowls: Bowls,
    cohorts: Sequence[Sequence[int]],
    *,
    steps: int = 3,
    lr: float = 0.05,
    engine: Callable[[Problem], Engine] = lambda problem: LoopEngine(problem, workers=1),
) -> Walk:
    """Rounds of an algorithm with given cohorts, through a real engine, as an experiment does them."""
    problem = bowls.problem()
    trains = engine(problem)
    training = Training(
        method,
        Descent(),
        Schedule(lr, 1.0, len(cohorts)),
        Plan(1, steps=steps),
        0,
        bowls.clients,
        Aggregation("uniform"),
    )
    weights, buffers, integers = problem.initial()
    model, server = ModelState(weights, buffers, integers), method.new_server(weights)
    states: dict[int, Mapping[str, State]] = {number: method.new_client(weights) for number in range(bowls.clients)}
    done = Walk([weights.clone()], [states])
    for round, cohort in enumerate(cohorts):
        members = [Client(number, np.array([number]), states[number]) for number in cohort]
        with torch.random.fork_rng(devices=[]):  # training seeds it, and it is the caller's
            outcome = trains.train(training, round, model, server, members)
        weights, server = method.aggregate(outcome.returned, outcome.means, server)
        model = ModelState(weights, outcome.buffers, outcome.integers)
        states = states | {client.number: client.state for client in outcome.clients}
        done.x.append(weights.clone())
        done.states.append(states)
        done.outcomes.append(outcome)
    return done
