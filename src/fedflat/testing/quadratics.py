"""A federated problem in closed form: client i minimises f_i(x) = 0.5 (x - b_i)^T A_i (x - b_i)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from fedflat.algorithms import Algorithm
from fedflat.algorithms.descent import Descent
from fedflat.algorithms.lr_schedule import Schedule
from fedflat.algorithms.state import State
from fedflat.algorithms.teacher import Teacher
from fedflat.data import Augmentation, Dataset, Examples
from fedflat.data.batches import Batch
from fedflat.engines.cpu.engine import LoopEngine
from fedflat.engines.problem.problem import Problem
from fedflat.engines.round.aggregation import Aggregation
from fedflat.engines.round.contract import Client, Engine, ModelState, Outcome, Training
from fedflat.engines.round.plan import Plan

LOCAL_STEPS = 3
"""Local steps per round, unless a check needs another number."""


class QuadraticModel(nn.Module):
    """A model whose only parameter, ``weight``, is the point x of shape (P,), and whose inputs are quadratics.

    A quadratic is f(x) = 0.5 (x - b)^T A (x - b), with the matrix A of shape (P, P) and the centre b of shape (P,). An
    input of shape (n, P^2 + P) has one row per quadratic: A, flattened, then b. The output of shape (n, 2, P) holds
    x - b and A (x - b) for each of the n quadratics; half their product is the value at x.
    """

    def __init__(self, x: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(x.clone())  # ASAM recognises weights by this name

    def forward(self, inputs: Tensor) -> Tensor:
        """Compute x - b and A (x - b) for the A and b in each row of ``inputs``."""
        size = len(self.weight)
        matrices, centres = inputs[:, : size**2].reshape(-1, size, size), inputs[:, size**2 :]
        offsets = self.weight - centres
        return torch.stack([offsets, torch.einsum("npq,nq->np", matrices, offsets)], 1)


@dataclass(frozen=True)
class ValueTask:
    """A task whose loss is the value of a :class:`QuadraticModel`."""

    metric: str = "value"

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the mean value of a batch of quadratics."""
        return _values(output).mean()

    def sums(self, output: Tensor, target: Tensor) -> dict[str, Tensor]:
        """Return the summed value of a batch of quadratics, as loss and as metric."""
        return {"loss": _values(output).sum(), "value": _values(output).sum()}

    def distillation(self, output: Tensor, teacher_output: Tensor, target: Tensor, temperature: float) -> Tensor:
        """Return the mean of 0.5 (x - e)^T A (x - e) / temperature^2, like a KL divergence near the teacher e."""
        return _values(output - teacher_output).mean() / temperature**2


def _values(output: Tensor) -> Tensor:
    """Return the values of n quadratics, shape (n,): half the product of the two vectors in each row (n, 2, P)."""
    return 0.5 * (output[:, 0] * output[:, 1]).sum(1)


@dataclass(eq=False)
class QuadraticProblem(Problem):
    """A problem with a :class:`QuadraticModel`, whose gradient A (x - b) is faster to compute without autograd."""

    def loss_and_gradient(
        self, vector: Tensor, buffers: dict[str, Tensor], batch: Batch, teacher: Teacher | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the mean value of a batch of quadratics, and its gradient of shape (P,), at the point ``vector``."""
        if teacher is not None:
            return super().loss_and_gradient(vector, buffers, batch, teacher)
        size = len(vector)
        matrices, centres = batch.inputs[:, : size**2].reshape(-1, size, size), batch.inputs[:, size**2 :]
        offsets = vector - centres
        gradients = (matrices @ offsets.unsqueeze(2)).squeeze(2)
        return 0.5 * (offsets * gradients).sum() / len(gradients), gradients.mean(0)


@dataclass
class Quadratics:
    """One random quadratic f_i(x) = 0.5 (x - b_i)^T A_i (x - b_i) per client i.

    Args:
        clients: number of clients N.
        size: number of parameters P.
        seed: seed of the matrices, centres and initial point.
        alike: give all clients the same quadratic.
        examples: number of examples n_i of each client, all of them its quadratic; empty means one each. A client with
            more examples has a larger weight and, in ``run_rounds``, takes more local steps.
    """

    clients: int = 4
    size: int = 5
    seed: int = 0
    alike: bool = False
    examples: tuple[int, ...] = ()
    matrices: Tensor = field(init=False)
    """A_i, shape (N, P, P)."""
    centres: Tensor = field(init=False)
    """b_i, shape (N, P)."""

    def __post_init__(self) -> None:
        """Draw A_i, b_i and the initial point; if ``alike``, all clients get those of client 0."""
        rng = np.random.default_rng(self.seed)
        roots = rng.normal(size=(self.clients, self.size, self.size)) / np.sqrt(self.size)
        matrices = roots @ roots.transpose(0, 2, 1) + 0.3 * np.eye(self.size)  # positive definite
        centres = rng.normal(size=(self.clients, self.size))
        if self.alike:
            matrices = np.repeat(matrices[:1], self.clients, 0)
            centres = np.repeat(centres[:1], self.clients, 0)
        self.matrices, self.centres = torch.from_numpy(matrices), torch.from_numpy(centres)
        self.start = torch.from_numpy(rng.normal(size=self.size)) + 2.0  # away from the centres

    def optimum(self) -> Tensor:
        """Return the minimiser of the mean of the clients' f_i, weighted by n_i, shape (P,)."""
        matrices = self.matrices[self.owners]
        right_side = torch.einsum("npq,nq->p", matrices, self.centres[self.owners])  # (sum A_i) x = sum A_i b_i
        minimiser: Tensor = torch.linalg.solve(matrices.sum(0), right_side)
        return minimiser

    @property
    def owners(self) -> Tensor:
        """The client that owns each example, in order, shape (sum of n_i,)."""
        counts = self.examples or (1,) * self.clients
        return torch.arange(self.clients).repeat_interleave(torch.tensor(counts))

    def value(self, x: Tensor) -> float:
        """Return the unweighted mean of the clients' f_i at a point x of shape (P,)."""
        offsets = x - self.centres
        return float(0.5 * torch.einsum("np,npq,nq->n", offsets, self.matrices, offsets).mean())

    def problem(self) -> Problem:
        """Return the problem for engines: every example of client i holds A_i and b_i."""
        inputs = torch.cat([self.matrices.flatten(1), self.centres], 1)[self.owners]
        examples = Examples(inputs, torch.zeros(len(inputs), dtype=torch.int64))
        data = Dataset("quadratics", examples, examples, ("value",), kind="vector")
        return QuadraticProblem(QuadraticModel(self.start), ValueTask(), data, Augmentation(), torch.float64)


@dataclass
class Trajectory:
    """The rounds of a run."""

    x: list[Tensor]
    """Server models x^0, ..., x^T, each of shape (P,)."""
    states: list[dict[int, Mapping[str, State]]]
    """Client states by client number, before each round and after the last."""
    outcomes: list[Outcome] = field(default_factory=list)
    """What the engine returned in each round."""


def run_rounds(
    algorithm: Algorithm,
    quadratics: Quadratics,
    cohorts: Sequence[Sequence[int]],
    *,
    steps: int = LOCAL_STEPS,
    lr: float = 0.05,
    engine: Callable[[Problem], Engine] = lambda problem: LoopEngine(problem, workers=1),
) -> Trajectory:
    """Run one round per cohort with a real engine, as an experiment does.

    Args:
        algorithm: the algorithm to run.
        quadratics: the clients' quadratics.
        cohorts: numbers of the participating clients in each round.
        steps: local steps K; clients with unequal numbers of examples take one step per example instead.
        lr: learning rate.
        engine: creates the engine for a problem; by default the CPU's, in this process.

    Returns:
        The server models, client states and outcomes of all rounds.
    """
    problem = quadratics.problem()
    runner = engine(problem)
    training = Training(
        algorithm,
        Descent(),
        Schedule(lr, decay=1.0, rounds=len(cohorts)),
        Plan(1, steps=None if quadratics.examples else steps),  # batches of one example
        seed=0,
        clients=quadratics.clients,
        aggregation=Aggregation("samples"),
    )
    weights, buffers, integer_buffers = problem.initial_state()
    model, server = ModelState(weights, buffers, integer_buffers), algorithm.new_server(weights)
    states: dict[int, Mapping[str, State]] = {
        number: algorithm.new_client(weights) for number in range(quadratics.clients)
    }
    trajectory = Trajectory([weights.clone()], [states])
    owners = quadratics.owners.numpy()
    for round, cohort in enumerate(cohorts):
        members = [Client(number, np.flatnonzero(owners == number), states[number]) for number in cohort]
        with torch.random.fork_rng(devices=[]):  # training seeds torch's generator, which belongs to the caller
            outcome = runner.train(training, round, model, server, members)
        weights, server = algorithm.aggregate(outcome.cohort_means, outcome.message_means, server)
        model = ModelState(weights, outcome.buffers, outcome.integer_buffers)
        states = states | {client.number: client.state for client in outcome.clients}
        trajectory.x.append(weights.clone())
        trajectory.states.append(states)
        trajectory.outcomes.append(outcome)
    return trajectory
