"""Models that are a chain of layers, each computed from the one before, as C++ calls of ``kernels.cpp``."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

Window = tuple[int, int]


@dataclass(frozen=True)
class Pool:
    """Max-pooling with a stride equal to the window."""

    window: Window


@dataclass(frozen=True)
class Relu:
    """ReLU."""


@dataclass(frozen=True)
class Flatten:
    """Each example's channels, rows and columns in a single axis, of length ``features`` if it is given."""

    features: int | None = None


Layer = Pool | Relu | Flatten | tuple[str, nn.Conv2d] | tuple[str, nn.Linear]
"""A layer with parameters is a pair of the module's name and the module."""

NARROW_CHANNELS = 16
"""A convolution with fewer input channels is narrow."""
MIN_EXAMPLES = 8
"""Smallest batch for which the kernels save clearly more time than their calls from Python cost."""


def is_narrow(model: nn.Module, examples: int) -> bool:
    """Whether fedflat's kernels are faster than torch's for batches of ``examples`` examples.

    torch vectorises convolutions over channels, so it is slow if there are few, and fast if there are many.
    """
    convolutions = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    return (
        examples >= MIN_EXAMPLES
        and bool(convolutions)
        and all(layer.in_channels < NARROW_CHANNELS for layer in convolutions)
    )


def source_of_model(
    model: nn.Module, shape: Sequence[int], offsets: Mapping[str, int], batch_size: int
) -> ChainSource | None:
    """The source of a model's kernels; None if it is not a chain of layers that they compute, in float32 on a CPU.

    Args:
        model: the network.
        shape: shape of one example.
        offsets: position of each parameter in the flat vector of weights, by name.
        batch_size: number of examples.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))  # tied parameters have several names
    if parameters.keys() != offsets.keys() or any(True for _ in model.buffers()):
        return None
    if any(parameter.dtype != torch.float32 or parameter.device.type != "cpu" for parameter in parameters.values()):
        return None
    layers = layer_chain(model)
    return None if layers is None else chain_source(layers, shape, offsets, batch_size)


def layer_chain(model: nn.Module) -> list[Layer] | None:
    """The layers of a model in order; None if it is not a chain of layers that the kernels compute."""
    if any(is_changed(module) for module in model.modules()):
        return None
    try:
        # ``forward`` runs on a copy, because it may store what it computes.
        nodes = list(fx.symbolic_trace(copy.deepcopy(model).train()).graph.nodes)
    except Exception:  # models fail in many ways if they are copied or traced
        return None
    layers: list[Layer] = []
    for before, node in pairwise(nodes):
        if node.all_input_nodes != [before]:
            return None
        if node.op != "output":
            layer = _layer(model, node)
            if layer is None:
                return None
            layers += [] if isinstance(layer, nn.Identity) else [layer]
    modules = [id(layer[1]) for layer in layers if isinstance(layer, tuple)]
    if nodes[-1].args != (nodes[-2],) or len(modules) != len(set(modules)):
        return None
    return _pooled_before_relu(layers)


def is_changed(module: nn.Module) -> bool:
    """Whether a module has hooks, or a ``forward`` of its own."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(hooks) or "forward" in vars(module)


def _layer(model: nn.Module, node: fx.Node) -> Layer | nn.Identity | None:
    """The layer of a node in a model's graph; None if there is no kernel for it."""
    if node.op == "call_module":
        return _module_layer(str(node.target), model.get_submodule(str(node.target)))
    others, options = node.args[1:], node.kwargs
    if node.target in (torch.relu, F.relu, "relu"):  # an activation is used only once, so it may change in place
        return Relu()
    if node.target in (torch.flatten, "flatten"):
        return Flatten() if (others, options) in (((1,), {}), ((), {"start_dim": 1})) else None
    if node.target in ("view", "reshape") and others[:1] == (-1,) and len(others) == 2 and not options:
        return Flatten(others[1] if isinstance(others[1], int) else -1)
    if node.target is F.max_pool2d:
        window, stride = (*others, *(options[name] for name in ("kernel_size", "stride") if name in options), None)[:2]
        rest = {"padding": 0, "dilation": 1, "ceil_mode": False, "return_indices": False}
        is_plain = len(others) < 3 and all(options.get(name, value) == value for name, value in rest.items())
        return Pool(_pair(window)) if is_plain and stride in (None, window, _pair(window)) else None
    return None


def _module_layer(name: str, module: nn.Module) -> Layer | nn.Identity | None:
    """The layer of a module; a subclass may compute something else."""
    if type(module) is nn.Conv2d and _is_plain(module):
        return name, module
    if type(module) is nn.Linear:
        return name, module
    if type(module) is nn.ReLU:
        return Relu()
    if type(module) is nn.Flatten and (module.start_dim, module.end_dim) == (1, -1):
        return Flatten()
    if type(module) is nn.MaxPool2d and (
        _pair(module.kernel_size) == _pair(module.stride)
        and (_pair(module.padding), _pair(module.dilation)) == ((0, 0), (1, 1))
        and not module.ceil_mode
        and not module.return_indices
    ):
        return Pool(_pair(module.kernel_size))
    return module if type(module) is nn.Identity else None


def _is_plain(layer: nn.Conv2d) -> bool:
    """Whether a convolution has stride 1 and zero padding smaller than its kernel."""
    return (
        layer.stride == layer.dilation == (1, 1)
        and layer.groups == 1
        and layer.padding_mode == "zeros"
        and not isinstance(layer.padding, str)
        and all(padding < size for padding, size in zip(_pair(layer.padding), layer.kernel_size, strict=True))
    )


def _pooled_before_relu(layers: list[Layer]) -> list[Layer]:
    """Swap each ReLU with a max-pooling layer after it: bit-identical, and the ReLU has fewer numbers to process."""
    for i in range(len(layers) - 1):
        if isinstance(layers[i], Relu) and isinstance(layers[i + 1], Pool):
            layers[i], layers[i + 1] = layers[i + 1], layers[i]
    return layers


@dataclass(frozen=True)
class ChainSource:
    """The forward and backward pass of a chain of layers, in C++.

    Attributes:
        batch_size: number of examples.
        shape: shape of one example.
        text: the C++ functions ``forward`` and ``backward``, to be compiled after ``kernels.cpp``.
        classes: length of the output of each example.
        memory: floats that the forward pass keeps for the backward pass.
        scratch: floats that the backward pass needs in addition.
    """

    batch_size: int
    shape: tuple[int, ...]
    text: str
    classes: int
    memory: int
    scratch: int

    def fits(self, inputs: Tensor) -> bool:
        """Whether a batch has the shape and type that the functions read."""
        return inputs.shape == (self.batch_size, *self.shape) and inputs.dtype == torch.float32


class _Writer:
    """Writes the calls of a chain's layers.

    Activations lie in ``memory``, one after another; the gradients of a layer's output and input are ``down`` and
    ``up``.
    """

    def __init__(self, shape: Sequence[int], offsets: Mapping[str, int], examples: int) -> None:
        self.shape, self.offsets, self.examples = tuple(shape), offsets, examples
        self.forward: list[str] = []
        self.backward: list[list[str]] = []
        self.largest, self.extra = 0, 0  # floats of the largest activation, and of ``extra``
        self.needs_gradient = False  # whether a layer so far has parameters
        self.memory = 0
        self.position = self.reserve(*shape)
        self.forward.append(f"transpose<EXAMPLES, {math.prod(shape)}>(images, memory);")

    def reserve(self, *shape: int) -> int:
        """Reserve memory for an activation, and return its position."""
        size = math.prod(shape) * self.examples
        self.memory, self.largest = self.memory + size, max(self.largest, size)
        return self.memory - size

    def reserve_extra(self, *shape: int) -> None:
        """Reserve ``extra`` for the duration of a layer's backward pass."""
        self.extra = max(self.extra, math.prod(shape) * self.examples)

    def move_to(self, *shape: int) -> tuple[str, str]:
        """Continue with an activation of another shape; return the pointers to the one before and to it."""
        before, self.position, self.shape = self.position, self.reserve(*shape), shape
        return f"memory + {before}", f"memory + {self.position}"

    def parameters(self, name: str, module: nn.Conv2d | nn.Linear) -> tuple[int, int | None]:
        """Positions of a layer's weight and bias in the flat vector."""
        return self.offsets[f"{name}.weight"], None if module.bias is None else self.offsets[f"{name}.bias"]

    def convolution(self, name: str, layer: nn.Conv2d) -> None:
        (channels, height, width), (kernel_height, kernel_width) = self.shape, layer.kernel_size
        padding_rows, padding_columns = _pair(layer.padding)
        if padding_columns:
            image, padded = self.move_to(channels, height, width + 2 * padding_columns)
            self.forward.append(f"pad_columns<{channels * height}, {width}, {padding_columns}>({image}, {padded});")
        wide, out = width + 2 * padding_columns, layer.out_channels
        out_height, out_width = height + 2 * padding_rows - kernel_height + 1, wide - kernel_width + 1
        image, output = self.move_to(out, out_height, out_width)
        weight, bias = self.parameters(name, layer)
        kernel = f"{kernel_height}, {kernel_width}"
        convolution = f"Convolution<{channels}, {height}, {wide}, {out}, {kernel}, {padding_rows}>"
        bias_pointer = "nullptr" if bias is None else f"weights + {bias}"
        self.forward.append(f"{convolution}::convolve<false>({image}, weights + {weight}, {bias_pointer}, {output});")
        calls = [f"{convolution}::weight_gradient({image}, down, gradient + {weight});"]
        if bias is not None:
            calls.append(f"{convolution}::bias_gradient(down, gradient + {bias});")
        if self.needs_gradient:
            border = kernel_width - 1 - padding_columns
            self.reserve_extra(out, out_height, out_width + 2 * border)
            transposed = (
                f"Convolution<{out}, {out_height}, {out_width + 2 * border}, {channels}, {kernel}, "
                f"{kernel_height - 1 - padding_rows}>"
            )
            calls.append(f"pad_columns<{out * out_height}, {out_width}, {border}>(down, extra);")
            calls.append(f"{transposed}::convolve<true>(extra, weights + {weight}, nullptr, up);")
        self.finish(calls)

    def linear(self, name: str, layer: nn.Linear) -> None:
        (features,), out = self.shape, layer.out_features
        inputs, output = self.move_to(out)
        weight, bias = self.parameters(name, layer)
        bias_pointer = "nullptr" if bias is None else f"weights + {bias}"
        multiply = f"multiply<{out}, {features}, EXAMPLES, {features}, 1>"
        self.forward.append(f"{multiply}(weights + {weight}, {inputs}, {bias_pointer}, {output});")
        self.reserve_extra(features)
        calls = [
            f"transpose<{features}, EXAMPLES>({inputs}, extra);",
            f"multiply<{out}, EXAMPLES, {features}, EXAMPLES, 1>(down, extra, nullptr, gradient + {weight});",
        ]
        if bias is not None:
            calls.append(f"sum_over_examples<{out}>(down, gradient + {bias});")
        if self.needs_gradient:
            calls.append(
                f"multiply<{features}, {out}, EXAMPLES, 1, {features}>(weights + {weight}, down, nullptr, up);"
            )
        self.finish(calls)

    def finish(self, calls: list[str]) -> None:
        """Add the backward pass of a layer with parameters; the first one's inputs need no gradient."""
        self.backward.append([*calls, "swap(down, up);"])
        self.needs_gradient = True

    def pool(self, layer: Pool) -> None:
        (channels, height, width), (window_height, window_width) = self.shape, layer.window
        image, output = self.move_to(channels, height // window_height, width // window_width)
        max_pool = f"MaxPool<{channels}, {height}, {width}, {window_height}, {window_width}>"
        self.forward.append(f"{max_pool}::pool({image}, {output});")
        self.backward.append(
            [f"{max_pool}::gradient({image}, down, up);", "swap(down, up);"] if self.needs_gradient else []
        )

    def relu(self) -> None:
        """In place: no layer needs its own output for its gradient."""
        size = f"{math.prod(self.shape)} * EXAMPLES"
        self.forward.append(f"relu<{size}>(memory + {self.position});")
        self.backward.append([f"relu_gradient<{size}>(memory + {self.position}, down);"] if self.needs_gradient else [])


def chain_source(
    layers: Sequence[Layer], shape: Sequence[int], offsets: Mapping[str, int], examples: int
) -> ChainSource | None:
    """Write the forward and backward pass of a chain of layers; None if a layer does not fit the one before.

    Args:
        layers: the layers in order.
        shape: shape of one example.
        offsets: position of each parameter in the flat vector of weights, by name.
        examples: batch size.
    """
    writer = _Writer(shape, offsets, examples)
    for layer in layers:
        if isinstance(layer, Relu):
            writer.relu()
        elif not _fits(layer, writer.shape):
            return None
        elif isinstance(layer, Flatten):
            writer.shape = (math.prod(writer.shape),)
        elif isinstance(layer, Pool):
            writer.pool(layer)
        elif isinstance(layer[1], nn.Linear):
            writer.linear(layer[0], layer[1])
        else:
            writer.convolution(layer[0], layer[1])
    if len(writer.shape) != 1 or not writer.needs_gradient:
        return None
    (classes,) = writer.shape
    forward = [*writer.forward, f"transpose<{classes}, EXAMPLES>(memory + {writer.position}, output);"]
    backward = [
        f"float *down = scratch, *up = scratch + {writer.largest}, *extra = scratch + {2 * writer.largest};",
        f"transpose<EXAMPLES, {classes}>(output_gradient, down);",
        *(call for calls in reversed(writer.backward) for call in calls),
    ]
    text = _function(
        "forward(const float* weights, const float* images, float* memory, float* output)", forward
    ) + _function(
        "backward(const float* weights, const float* memory, const float* output_gradient, float* scratch, "
        "float* gradient)",
        backward,
    )
    return ChainSource(examples, tuple(shape), text, classes, writer.memory, 2 * writer.largest + writer.extra)


def _fits(layer: Any, shape: tuple[int, ...]) -> bool:
    """Whether a layer can be applied to an activation of a shape."""
    if isinstance(layer, Flatten):
        return layer.features in (None, math.prod(shape))
    if isinstance(layer, Pool):
        return len(shape) == 3 and all(side >= window for side, window in zip(shape[1:], layer.window, strict=True))
    module = layer[1]
    if isinstance(module, nn.Linear):
        return shape == (module.in_features,)
    if len(shape) != 3 or shape[0] != module.in_channels:
        return False
    sides = zip(shape[1:], _pair(module.padding), module.kernel_size, strict=True)
    return all(side + 2 * padding >= size for side, padding, size in sides)


def _function(declaration: str, calls: Sequence[str]) -> str:
    lines = "".join(f"  {call}\n" for call in calls)
    return f'extern "C" void {declaration} {{\n{lines}}}\n'


def _pair(value: Any) -> Window:
    return (value, value) if isinstance(value, int) else tuple(value)
