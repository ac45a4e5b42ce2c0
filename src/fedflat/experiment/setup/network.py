"""From a config to its network: built, extended by adapters, initialised and partly frozen."""

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
    """The network of a config, initialised with its seed.

    Args:
        config: the experiment.
        input_shape: shape of one example, without the batch dimension.
        classes: number of classes.
        model: a user-supplied network to copy instead of building ``config.model``.
    """
    parts = models.trained_parts(config.training.train)
    with torch.random.fork_rng(devices=[]):
        seed_torch(config.seed, "weights")
        network = models.build(config.model, input_shape, classes) if model is None else copy.deepcopy(model)
        _check_shapes(network, config.model)
        seed_torch(config.seed, "adapters")
        for part in parts:
            part.extend(network)
    if config.engine.precision == "float64":
        network = network.double()
    if config.init is not None:
        load_weights(network, config.model, config.init, fresh_head=config.init_head == "fresh")
    models.freeze(network, parts)
    if not any(parameter.requires_grad for parameter in network.parameters()):
        raise UserError(f"all parameters of {config.model} are frozen; let at least one require gradients")
    return network


def _check_shapes(network: nn.Module, name: str) -> None:
    tensors = (*network.named_parameters(), *network.named_buffers())
    lazy = next((key for key, tensor in tensors if is_lazy(tensor)), None)
    if lazy is not None:
        raise UserError(
            f"{lazy} of {name} has no shape yet (as in nn.LazyLinear); pass one batch through the model first"
        )
