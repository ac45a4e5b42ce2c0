"""Small networks and their full Hessians, computed independently."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from fedflat import models
from fedflat.engines.problem.text import TokenPrediction
from fedflat.flatness import Objective


class Attention(nn.Module):
    """Two heads over a short sequence, and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.MultiheadAttention(4, 2, batch_first=True)
        self.classifier = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.mix(x, x, x, need_weights=False)[0].mean(1))


@dataclass(frozen=True)
class Case:
    """A network with its loss and its data."""

    network: nn.Module
    loss: Callable[[Tensor, Tensor], Tensor]
    inputs: Tensor
    targets: Tensor

    def objective(self, batch: int = 13, **more) -> Objective:
        return Objective(self.network, self.loss, (self.inputs, self.targets), batch_size=batch, **more)


def _network(name: str) -> tuple[nn.Module, Callable[[Tensor, Tensor], Tensor], Tensor, Tensor]:
    images, labels = torch.randn(24, 2, 6, 6), torch.randint(3, (24,))
    conv = [nn.Conv2d(2, 4, 3), nn.Tanh(), nn.Conv2d(4, 2, 3), nn.Flatten(), nn.Linear(8, 3)]
    if name == "mlp":
        return models.build("mlp(hidden=6)", (5,), 3), F.cross_entropy, torch.randn(24, 5), labels
    if name == "group norm":
        return nn.Sequential(conv[0], nn.GroupNorm(2, 4), *conv[1:]), F.cross_entropy, images, labels
    if name == "batch norm":
        return nn.Sequential(conv[0], nn.BatchNorm2d(4), *conv[1:]), F.cross_entropy, images, labels
    if name in ("lstm", "fused lstm"):
        text = f"char-lstm(embedding=2,hidden=3,layers=1,fused={str(name.startswith('fused')).lower()})"
        return models.build(text, (5,), 6), TokenPrediction().loss, torch.randint(6, (9, 5)), torch.randint(6, (9, 5))
    return Attention(), F.cross_entropy, torch.randn(24, 3, 4), labels


NETWORKS = ("mlp", "group norm", "batch norm", "lstm", "fused lstm", "attention")


@cache
def case(name: str) -> Case:
    """A network in float64, away from its initial weights; running statistics are not those of a fresh BatchNorm."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        network, loss, inputs, targets = _network(name)
        network = network.double()
        inputs = inputs.double() if inputs.is_floating_point() else inputs
        network.train()
        network(inputs)
        with torch.no_grad():
            for parameter in network.parameters():
                parameter += 0.3 * torch.randn_like(parameter)
    return Case(network, loss, inputs, targets)


@cache
def true_hessian(name: str) -> Tensor:
    """The full Hessian, computed by torch on all data in one batch."""
    example = case(name)
    objective = example.objective()
    network = example.network.eval()

    def loss(w: Tensor) -> Tensor:
        with nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):
            return example.loss(functional_call(network, objective.layout.views(w), (example.inputs,)), example.targets)

    found = torch.autograd.functional.hessian(loss, objective.weights)
    network.train()
    return (found + found.T) / 2


def symmetric(values: Tensor, seed: int = 0) -> Tensor:
    """A symmetric matrix with given eigenvalues, in a random basis."""
    drawn = torch.randn(len(values), len(values), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    basis, _ = torch.linalg.qr(drawn)
    return basis @ torch.diag(values.double()) @ basis.T


class Quadratic(nn.Module):
    """f(w) = 1/2 (w - c)' A (w - c), as a module whose output is its own loss."""

    def __init__(self, matrix: Tensor, centre: Tensor, at: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(at.clone())
        self.register_buffer("matrix", matrix)
        self.register_buffer("centre", centre)

    def forward(self, x: Tensor) -> Tensor:
        offset = self.weight - self.centre
        return (offset @ self.matrix @ offset / 2).expand(len(x))

    def objective(self) -> Objective:
        return Objective(self, lambda output, target: output.mean(), (torch.zeros(4, 1), torch.zeros(4)), batch_size=3)
