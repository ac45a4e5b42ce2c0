"""Driver of FedJAX: its federated averaging, with the network translated from PyTorch to JAX layer by layer."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import fedjax
import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn

from fedflat.bench.drivers import client_tensors, connected_timer, plain_loop
from fedflat.bench.peers import Simulator
from fedflat.bench.plain import training_loss
from fedflat.engines.problem.problem import Problem
from fedflat.errors import UserError


def run(simulator: Simulator) -> None:
    """Train rounds with the cohorts of the plain loop; FedJAX draws the batches."""
    setting, loop, timer = simulator.setting, plain_loop(), connected_timer()
    if setting.on_gpu and jax.default_backend() == "cpu":
        raise UserError("jax finds no GPU; install jax with CUDA in the environment of fedjax, or use --device cpu")
    network = loop.new_model()
    layers = list(network) if isinstance(network, nn.Sequential) else []
    if not layers or not all(isinstance(layer, tuple(LAYERS)) for layer in layers):
        raise UserError("fedjax is measured only with models that are sequences of common layers: lenet5, cnn or mlp")

    def loss(parameters: Any, batch: Any) -> Any:
        """Return the mean cross-entropy of a batch."""
        values = batch["x"]
        for number, layer in enumerate(layers):
            apply = next(function for kind, function in LAYERS.items() if isinstance(layer, kind))
            values = apply(layer, values, parameters.get(f"{number}.weight"), parameters.get(f"{number}.bias"))
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(values), batch["y"][:, None], axis=1))

    gradient = jax.grad(loss)
    algorithm = fedjax.algorithms.fed_avg.federated_averaging(
        lambda parameters, batch, random_key: gradient(parameters, batch),
        fedjax.optimizers.sgd(setting.lr),
        fedjax.optimizers.sgd(1.0),
        fedjax.ShuffleRepeatBatchHParams(setting.batch_size, num_epochs=None, num_steps=setting.local_steps),
    )
    datasets = {}
    for client in range(simulator.clients):
        inputs, targets = client_tensors(simulator, client)
        datasets[client] = fedjax.ClientDataset({"x": inputs.numpy(force=True), "y": targets.numpy(force=True)})
    state = algorithm.init({name: jnp.asarray(tensor.numpy(force=True)) for name, tensor in loop.state.items()})
    for number in itertools.count():
        keys = jax.random.split(jax.random.PRNGKey(number), setting.clients_per_round)
        cohort = [(client, datasets[client], key) for client, key in zip(loop.cohort(number), keys, strict=True)]
        state, _ = algorithm.apply(state, cohort)
        timer.round_done(partial(loss_of, loop.problem, jax.block_until_ready(state.params)))


def loss_of(problem: Problem, parameters: Any) -> float:
    """Return the training loss of the model with these JAX parameters, computed by PyTorch."""
    return training_loss(problem, {name: torch.from_numpy(np.array(value)) for name, value in parameters.items()})


def convolve(layer: nn.Conv2d, values: Any, weight: Any, bias: Any) -> Any:
    """Apply a convolution to images of shape (batch, channels, height, width)."""
    padding = [(size, size) for size in layer.padding]
    return jax.lax.conv_general_dilated(values, weight, layer.stride, padding) + bias[:, None, None]


def pool(layer: nn.MaxPool2d, values: Any, weight: Any, bias: Any) -> Any:
    """Apply max-pooling whose stride equals its window size; ``weight`` and ``bias`` are unused."""
    window = (1, 1, layer.kernel_size, layer.kernel_size)
    return jax.lax.reduce_window(values, -jnp.inf, jax.lax.max, window, window, "VALID")


LAYERS: dict[type[nn.Module], Any] = {
    nn.Conv2d: convolve,
    nn.MaxPool2d: pool,
    nn.Linear: lambda layer, values, weight, bias: values @ weight.T + bias,
    nn.ReLU: lambda layer, values, weight, bias: jax.nn.relu(values),
    nn.Flatten: lambda layer, values, weight, bias: values.reshape(len(values), -1),
    nn.Identity: lambda layer, values, weight, bias: values,
}
