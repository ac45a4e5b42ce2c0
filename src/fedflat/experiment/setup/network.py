"""From a config to its network: built, adapted, started from given weights, and frozen where it is not to be trained."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from fedflat import models
from fedflat.engines.round.randomness import seed_torch
from fedflat.errors import UserError
from fedflat.experiment.config import Config
from fedflat.experiment.setup.weights import load_weights


def network_of(config: Config, input_shape: tuple[int, ...], classes: int, model: nn.Module | None = None) -> nn.Module:
    """The network of a config, or a copy of the user's own; all random numbers come from the config's seed."""
    parts = models.trained_parts(config.training.train)
    with torch.random.fork_rng(devices=[]):
        seed_torch(config.seed, "weights")
        network = models.build(config.model, input_shape, classes) if model is None else copy.deepcopy(model)
        _have_shapes(network, config.model)
        seed_torch(config.seed, "adapters")
        for part in parts:
            part.extend(network)
    if config.engine.precision == "float64":
        network = network.double()
    if config.init is not None:
        load_weights(network, config.model, config.init, fresh_head=config.init_head == "fresh")
    models.freeze(network, parts)
    if not any(parameter.requires_grad for parameter in network.parameters()):
        raise UserError(
            f"all parameters of {config.model} are frozen, so there is nothing to train; let some require gradients"
        )
    return network


def _have_shapes(network: nn.Module, name: str) -> None:
    tensors = (*network.named_parameters(), *network.named_buffers())
    lazy = next((key for key, tensor in tensors if is_lazy(tensor)), None)
    if lazy is not None:
        raise UserError(
            f"{lazy} of {name} has no shape yet, as in nn.LazyLinear; pass a batch through the model once, then give it to fedflat"
        )
