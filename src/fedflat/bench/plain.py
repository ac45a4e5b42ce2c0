"""The plain loop: a straightforward FedAvg in PyTorch, which loops over clients in one process without compilation.

It uses the same data, cohorts, batches and augmentation as fedflat and ends with the same model, which makes the
comparison fair. The clients of some other simulators train with the same function.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from fedflat import models
from fedflat.bench.setting import plan_of
from fedflat.data import Dataset, Partition
from fedflat.data.batches import move_examples
from fedflat.engines.problem.problem import Problem
from fedflat.experiment.config import Config
from fedflat.experiment.setup.engine import sampler_of
from fedflat.experiment.setup.problem import build_problem
from fedflat.flatness.precision import allow_tf32, at_own_precision
from fedflat.randomness import generator

StateDict = dict[str, Tensor]
LOSS_EXAMPLES = 1000
"""Training examples on which the losses of contenders are compared."""


def problem_at_precision(config: Config, data: Dataset) -> tuple[Problem, Partition]:
    """Build the problem and partition of a config, and set torch's global precision to the config's.

    A contender's process is its own, and other simulators train with torch's global setting.
    """
    problem, partition = build_problem(config, data=data)
    if problem.device.type == "cuda":
        allow_tf32(problem.tf32)
    return problem, partition


class PlainLoop:
    """A model, and clients that train copies of it one after another."""

    def __init__(self, config: Config, data: Dataset) -> None:
        self.config = config
        self.problem, self.partition = problem_at_precision(config, data)
        # in torch's default memory format
        self._train = move_examples(data.train, self.problem.device, self.problem.dtype)
        self.state: StateDict = {name: tensor.clone() for name, tensor in self.problem.model.state_dict().items()}
        # These draw the same batches and cohorts as a run of fedflat.
        self._plan, self._sampler = plan_of(config), sampler_of(config, len(self.partition.clients))

    def round(self, number: int) -> None:
        """Train the cohort of round ``number`` and average its models, weighted by numbers of examples."""
        trained = [self.train(self.state, client, number) for client in self.cohort(number)]
        total = sum(examples for _, examples in trained)
        mean = {name: torch.zeros_like(tensor) for name, tensor in self.state.items()}
        for state, examples in trained:
            for name, tensor in state.items():
                if tensor.is_floating_point():
                    mean[name] += tensor * (examples / total)
                else:  # integer buffers, such as BatchNorm's counter of batches: those of the last client
                    mean[name] = tensor
        self.state = mean

    def cohort(self, number: int) -> list[int]:
        """Return the numbers of the clients that train in round ``number``."""
        return self._sampler(self.config.seed, number)

    def train(self, state: StateDict, client: int, number: int) -> tuple[StateDict, int]:
        """Train a client from ``state`` in round ``number``; returns its model and its number of examples."""
        model = self.new_model()
        model.load_state_dict(state)
        model.train()
        optimiser = torch.optim.SGD(model.parameters(), lr=self.config.training.lr)
        indices = self.partition.clients[client]
        for inputs, targets in self.batches(indices, client, number):
            optimiser.zero_grad()
            with torch.autocast(inputs.device.type, torch.bfloat16, enabled=self.config.engine.precision == "bf16"):
                loss = F.cross_entropy(model(inputs), targets)
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
        return model.state_dict(), len(indices)

    def loss(self) -> float:
        """Return the training loss of the current model."""
        return training_loss(self.problem, self.state)

    def new_model(self) -> nn.Module:
        """Return a new model on the device of the benchmark."""
        data = self.problem.data
        model = models.build(self.config.model, data.input_shape, data.num_classes)
        return model.to(self.problem.device, self.problem.dtype)

    def batches(self, indices: np.ndarray, client: int, number: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the augmented batches of a client in round ``number``, as inputs and targets.

        Args:
            indices: the client's examples, as rows of the training set.
            client: the client's number.
            number: the round's number.
        """
        problem, seed = self.problem, self.config.seed
        batches = self._plan.batches(seed, number, client, len(indices))  # as positions in ``indices``
        rng = generator(seed, "augment", number, client)
        # All of the client's random numbers at once, as in fedflat's engines: by name, one row per batch.
        draws = problem.augmentation.draw(rng, len(batches), self._plan.batch_size, problem.data.input_shape)
        for step, positions in enumerate(batches):
            rows = torch.from_numpy(indices[positions]).to(problem.device)
            draw = {name: values[step].to(problem.device) for name, values in draws.items()}
            inputs = problem.augmentation.inputs(
                self._train.inputs[rows], draw, problem.data.mean, problem.data.std, problem.dtype
            )
            yield inputs, self._train.targets[rows]


@torch.no_grad()
@at_own_precision
def training_loss(problem: Problem, state: StateDict) -> float:
    """Return the mean cross-entropy of the model with weights ``state`` on the first ``LOSS_EXAMPLES`` examples.

    The examples are those of the training set. The tensors in ``state`` may be on any device.
    """
    sample = problem.data.train.take(torch.arange(min(LOSS_EXAMPLES, len(problem.data.train)), device=problem.device))
    model = copy.deepcopy(problem.model).eval()
    tensors = {name: tensor.to(problem.device) for name, tensor in state.items()}
    output = functional_call(model, tensors, (problem.normalised(sample.inputs).to(problem.dtype),))
    return float(F.cross_entropy(output, sample.targets))
