"""Permutation of a model's hidden units so that they match those of another model (Ainsworth et al. 2022).

Permuting the units of a hidden layer, and the inputs of the next layer in the same way, does not change the function.
Weight matching chooses the permutations that maximise the inner product of both models' weights. Given the other
layers, the best permutation of one layer is a linear assignment problem; layers are visited until nothing changes.

Models must be chains of linear and convolutional layers, with elementwise activations, pooling, BatchNorm and dropout
between them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from fedflat.errors import UserError
from fedflat.flatness.landscapes.points import require_same_shapes
from fedflat.models.layout import Layout
from fedflat.randomness import generator

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
WEIGHTED = (nn.Linear, *CONVOLUTIONS)
NORMALISED = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
POOLING = (
    *(nn.MaxPool1d, nn.MaxPool2d, nn.AvgPool1d, nn.AvgPool2d),
    *(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d),
)
"""Layers through which the order of channels passes unchanged, but which mix the units of a linear layer."""
PASSING = (
    *(nn.ReLU, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Softplus, nn.Identity, nn.Flatten),
    *(nn.Dropout, nn.Dropout2d),
)
"""Layers through which the order of channels or units passes unchanged."""
MAX_SWEEPS = 100


@dataclass
class HiddenLayer:
    """Tensors that a permutation of the units of one hidden layer changes, by name."""

    units: int
    outputs: list[str] = field(default_factory=list)
    """Parameters and buffers whose first dimension is the units."""
    next_weight: str = ""
    """Weights of the next layer, whose second dimension is the units, each repeated for all its positions."""


def aligned(model: nn.Module, reference: nn.Module, seed: int = 0) -> nn.Module:
    """Return a copy of ``model`` with the same function, whose hidden units are permuted to match ``reference``.

    Args:
        model: the model to permute, e.g. an ``nn.Sequential`` of linear layers and activations.
        reference: a model with the same architecture.
        seed: seed of the order in which layers are visited.

    >>> first, second = (nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)) for _ in range(2))
    >>> inputs = torch.ones(1, 2)
    >>> bool((aligned(first, second)(inputs) - first(inputs)).abs() < 1e-6)
    True
    """
    states = {name: dict(part.state_dict()) for name, part in (("the model", model), ("the reference", reference))}
    require_same_shapes({name: Layout.of(state) for name, state in states.items()}, "one path")
    permuted = aligned_tensors(reference, states["the reference"], states["the model"], seed)
    result = copy.deepcopy(model)
    result.load_state_dict(permuted)
    return result


def aligned_tensors(
    module: nn.Module, reference: Mapping[str, Tensor], tensors: Mapping[str, Tensor], seed: int = 0
) -> dict[str, Tensor]:
    """Permute the hidden units of a model's tensors to match those of ``reference``.

    Args:
        module: the architecture; its own weights are not used.
        reference: parameters and buffers by name.
        tensors: parameters and buffers of the model to permute, by name.
        seed: seed of the order in which layers are visited.
    """
    layers = hidden_layers(module)
    names = {name for layer in layers for name in (*layer.outputs, layer.next_weight)}
    missing = sorted(names - set(tensors))
    if missing:
        raise UserError(f"models cannot be aligned if {missing[0]} is not trained; align models with all their weights")
    result, parameters = dict(tensors), dict(module.named_parameters())
    rng = generator(seed, "alignment")
    for _ in range(MAX_SWEEPS):
        changed = False
        for index in rng.permutation(len(layers)):
            layer = layers[index]
            changed_names = [name for name in parameters if name in (*layer.outputs, layer.next_weight)]
            pairs = ([_rows(layer, name, state[name]) for state in (reference, result)] for name in changed_names)
            order = _best_order(sum((first @ second.T for first, second in pairs), start=torch.zeros(()).double()))
            if order is not None:
                changed = True
                for name in layer.outputs:
                    result[name] = result[name][order.to(result[name].device)]
                weights = result[layer.next_weight]
                grouped = weights.reshape(len(weights), layer.units, -1, *weights.shape[2:])
                result[layer.next_weight] = grouped[:, order.to(weights.device)].flatten(1, 2)
        if not changed:
            break
    return result


def hidden_layers(module: nn.Module) -> list[HiddenLayer]:
    """Return the hidden layers of a chain of layers; raise a ``UserError`` if the module is no such chain."""
    layers: list[HiddenLayer] = []
    used: set[int] = set()  # identities of the tensors of previous layers
    output, ndim = "", 0  # of the layers so far: units of a linear layer, channels of a convolution, or flat channels
    for name, part in _chain("", module):
        tensors = dict((*part.named_parameters(name), *part.named_buffers(name)))
        if used & set(map(id, tensors.values())):  # one permutation cannot serve both places
            raise _not_alignable(f"{name} shares its weights with a previous layer")
        used.update(map(id, tensors.values()))
        names = [key for key in tensors if not key.endswith("num_batches_tracked")]
        if isinstance(part, WEIGHTED):
            if getattr(part, "groups", 1) != 1:
                raise _not_alignable(f"{name} is a grouped convolution")
            # Positions of a linear layer's output come before its units, so that flattening interleaves the units.
            if output == "units" and part.weight.shape[1] != layers[-1].units:
                raise _not_alignable(f"{name} has {part.weight.shape[1]} inputs for {layers[-1].units} linear units")
            if isinstance(part, nn.Linear) and output == "channels":
                raise _not_alignable(f"{name} is applied to the positions of a convolution's output, not its channels")
            if layers:
                layers[-1].next_weight = names[0]
            output, ndim = "units" if isinstance(part, nn.Linear) else "channels", part.weight.ndim
            layers.append(HiddenLayer(len(part.weight), names))
        elif isinstance(part, NORMALISED):
            if not layers or part.num_features != layers[-1].units:
                raise _not_alignable(f"{name} does not normalise the units of a hidden layer")
            layers[-1].outputs += names
        elif isinstance(part, nn.Flatten):
            if output == "channels" and (part.start_dim % ndim, part.end_dim % ndim) == (1, ndim - 1):
                output = "flat"  # each example of a batch becomes a vector
        elif isinstance(part, POOLING):
            if output in ("units", "flat"):
                raise _not_alignable(f"{name} pools over units instead of positions")
        elif not isinstance(part, PASSING):
            raise _not_alignable(f"{name or 'the model'} is of class {type(part).__name__}")
    if len(layers) < 2:
        raise _not_alignable("the model has no hidden layer")
    return layers[:-1]  # outputs of the last layer are classes, whose order is fixed


def _chain(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the layers of nested ``nn.Sequential`` modules in the order in which they are applied."""
    if type(module) is not nn.Sequential:
        yield name, module
        return
    for key, part in module._modules.items():  # named_children() skips repeated modules
        if part is not None:
            yield from _chain(f"{name}.{key}" if name else key, part)


def _rows(layer: HiddenLayer, name: str, tensor: Tensor) -> Tensor:
    """Return a tensor as one row of numbers per hidden unit, [units, n], in double precision on the CPU."""
    tensor = tensor.detach().double().cpu()
    if name == layer.next_weight:
        return tensor.reshape(len(tensor), layer.units, -1).transpose(0, 1).flatten(1)
    return tensor.reshape(layer.units, -1)


def _best_order(products: Tensor) -> Tensor | None:
    """Return the order of units that maximises the sum of products [units, units]; None if the present one does."""
    from scipy.optimize import linear_sum_assignment

    rows, columns = linear_sum_assignment(products.numpy(), maximize=True)
    gain = float(products[rows, columns].sum() - products.trace())
    return torch.from_numpy(columns) if gain > 1e-12 * float(products.abs().max()) else None


def _not_alignable(reason: str) -> UserError:
    return UserError(
        f"the hidden units of this model cannot be aligned: {reason}; expected an nn.Sequential of linear or "
        "convolutional layers, activations, pooling and BatchNorm, e.g. mlp or cnn. If another module applies its "
        "children one after another, rebuild it as nn.Sequential(OrderedDict(features=m.features, "
        "flatten=nn.Flatten(), head=m.head)), which keeps the names of the weights"
    )
