"""The trainable part of a model: ``all``, ``head``, ``norms``, ``layers(names=A|B)`` or ``lora(rank=8)``, joined by +.

Everything else is frozen. Flat vectors, algorithm states and communication then cover only the trainable part.

``lora`` adds low-rank adapters (Hu et al. 2022), which update a frozen linear layer W:

    y = W x + b + (alpha / r) B A x,    A: r x in, initialised like a linear layer,    B: out x r, initially zero

An adapted model thus starts as the original. Adapted layers keep the names of their weights and gain A and B.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedflat.errors import UserError, one_of
from fedflat.models.registry import classifier_parameters
from fedflat.registry import Registry
from fedflat.text import make, param, parse

NORMS = (nn.LayerNorm, nn.GroupNorm, nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)
QUERY_AND_VALUE = frozenset({"query", "value", "q", "v", "q_proj", "v_proj", "to_q", "to_v", "wq", "wv"})
"""Names of separate query and value layers, which are adapted by default."""


@dataclass(frozen=True)
class TrainedPart(ABC):
    """A part of a model that can be trained; its fields are its options, such as ``rank`` in ``lora(rank=8)``."""

    name: ClassVar[str]

    def extend(self, model: nn.Module) -> None:  # noqa: B027 - most parts add nothing
        """Add modules to ``model`` in place, before weights are loaded."""

    @abstractmethod
    def parameter_names(self, model: nn.Module) -> set[str]:
        """Return the names of the parameters of this part."""


@dataclass(frozen=True)
class All(TrainedPart):
    """All parameters, except those that the model itself has frozen."""

    name = "all"

    def parameter_names(self, model: nn.Module) -> set[str]:
        return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


@dataclass(frozen=True)
class Head(TrainedPart):
    """The last linear layer."""

    name = "head"

    def parameter_names(self, model: nn.Module) -> set[str]:
        return classifier_parameters(model)


@dataclass(frozen=True)
class Norms(TrainedPart):
    """The scales and shifts of all normalisation layers."""

    name = "norms"

    def parameter_names(self, model: nn.Module) -> set[str]:
        """Return the names of the normalisation layers' parameters."""
        names: set[str] = set()
        for layer, module in model.named_modules():
            if isinstance(module, NORMS):
                names |= {f"{layer}.{name}" for name, _ in module.named_parameters()}
        if not names:
            raise UserError(
                "training.train=norms: this model has no normalisation with parameters; use head or layers(names=...)"
            )
        return names


@dataclass(frozen=True)
class Layers(TrainedPart):
    """Layers or single parameters, by name."""

    name = "layers"
    names: str | int | float = param(
        "", "layers (with all sublayers) or parameters, joined by |, e.g. blocks.10|blocks.11"
    )

    def parameter_names(self, model: nn.Module) -> set[str]:
        """Return the names of all parameters that the option ``names`` selects: whole layers or single parameters."""
        parameters = [name for name, _ in model.named_parameters()]
        selected: set[str] = set()
        for layer in _split_names(self.names, "layers(names=...)", "layers(names=blocks.10|blocks.11)"):
            in_layer = {name for name in parameters if name == layer or name.startswith(f"{layer}.")}
            if not in_layer:
                known = {_layer_of(name) for name in parameters} | {name.partition(".")[0] for name in parameters}
                raise one_of("layer or parameter", layer, known, owner="this model")
            selected |= in_layer
        return selected


@dataclass(frozen=True)
class Lora(TrainedPart):
    """Low-rank adapters B A of linear layers (LoRA, Hu et al. 2022) and, by default, the head."""

    name = "lora"
    rank: int = param(8, "rank of the update of each layer (r)", low=1, positional=True)
    alpha: float = param(16.0, "the update is scaled by alpha / rank", above=0)
    layers: str | int | float = param(
        "qv",
        "layers to adapt: query and value of attention (qv), all linear layers except the head (all), or names joined "
        "by |",
    )
    head: bool = param(True, "also train the full head")
    only_b: bool = param(
        False, "train only B, so that the mean of the clients' updates equals the update by the mean B (FFA-LoRA)"
    )

    def extend(self, model: nn.Module) -> None:
        add_adapters(model, self.adapters(model), self.rank, self.alpha)

    def adapters(self, model: nn.Module) -> list[Adapter]:
        """Return the layers of ``model`` to adapt.

        The option ``layers`` is ``qv`` (query and value layers of attention), ``all`` (all linear layers except the
        head), or names of layers.
        """
        layers = adaptable_layers(model)
        if not layers:
            raise UserError("training.train=lora: this model has no linear layer; use head or layers(names=...)")
        if self.layers == "qv":
            adapters = attention_adapters(model)
            if not adapters:
                raise UserError(
                    "training.train=lora: this model has no layer named qkv, query or value; choose linear layers "
                    f"({_enumerate_names(layers)}), for example lora(layers={layers[0]}) or lora(layers=all)"
                )
            return adapters
        if self.layers == "all":
            head = {_layer_of(name) for name in classifier_parameters(model)}
            adapters = [Adapter(name) for name in layers if name not in head]
            if not adapters:
                raise UserError(
                    f"training.train=lora: the head ({_enumerate_names(layers)}) is the only linear layer of this "
                    "model; use head or layers(names=...)"
                )
            return adapters
        selected = self._match_layers(layers)
        return [Adapter(name) for name in layers if name in selected]

    def _match_layers(self, layers: list[str]) -> set[str]:
        """Return those of the linear ``layers`` whose name begins or ends with a name in the option ``layers``."""
        selected: set[str] = set()
        for part in _split_names(self.layers, "lora(layers=...)", "lora(layers=fc1|fc2)"):
            # The dots make only whole components match: "fc" matches "block.fc" but not "block.fc1".
            matching = {name for name in layers if f".{name}".endswith(f".{part}") or f"{name}.".startswith(f"{part}.")}
            if not matching:
                raise one_of("linear layer", part, layers, owner="this model")
            selected |= matching
        return selected

    def parameter_names(self, model: nn.Module) -> set[str]:
        """Return the names of the adapters' parameters (only those of B if ``only_b``) and, if ``head``, the head's."""
        adapters = adapter_parameters(model, self.only_b)
        return adapters | classifier_parameters(model) if self.head else adapters


PARTS: Registry[type[TrainedPart]] = Registry("trainable part")
"""Trainable parts by name."""
for _part in (All, Head, Norms, Layers, Lora):
    PARTS.register(_part.name, _part)


def trained_parts(text: str) -> tuple[TrainedPart, ...]:
    """Parse the trainable parts that a text names.

    >>> trained_parts("lora(rank=4)+norms")
    (Lora(rank=4, alpha=16.0, layers='qv', head=True, only_b=False), Norms())
    """
    calls = parse(text)
    parts = {PARTS.find(call.name): call for call in calls}
    if len(parts) < len(calls):
        raise UserError(f"training.train={text} names a part twice; expected each part once")
    if len(parts) > 1 and All in parts:
        raise UserError(f"training.train={text} combines all with other parts; expected all alone, or other parts")
    return tuple(make(part, call, "trainable part") for part, call in parts.items())


def freeze(model: nn.Module, parts: tuple[TrainedPart, ...]) -> None:
    """Freeze all parameters of ``model`` except those of ``parts``, in place."""
    trained = set().union(*(part.parameter_names(model) for part in parts))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained)


def describe_trained(model: nn.Module) -> str:
    """Say how many parameters are trained and in which layers; empty if nothing is frozen.

    >>> model = nn.Sequential()
    >>> model.add_module("features", nn.Linear(4, 3))
    >>> model.add_module("classifier", nn.Linear(3, 2))
    >>> freeze(model, trained_parts("head"))
    >>> describe_trained(model)
    'trains 8 of 23 parameters, in classifier'
    """
    parameters = dict(model.named_parameters())
    trained = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
    if len(trained) == len(parameters):
        return ""
    total = sum(parameter.numel() for parameter in parameters.values())
    trained_total = sum(parameter.numel() for parameter in trained.values())
    layers = list(dict.fromkeys(_layer_of(name) for name in trained))  # distinct, in order
    return f"trains {trained_total:,} of {total:,} parameters, in {_enumerate_names(layers)}"


def _layer_of(parameter: str) -> str:
    """Return the name of a parameter's layer; the parameter's own name if it belongs to the model itself."""
    return parameter.rpartition(".")[0] or parameter


def _split_names(value: str | int | float, setting: str, example: str) -> list[str]:
    """Split names joined by ``|``.

    Args:
        value: the joined names; a numeric name, as in ``nn.Sequential``, arrives as a number.
        setting: the option that has this value, for the error message.
        example: a valid use of the option, for the error message.
    """
    names = [name.strip() for name in str(value).split("|") if name.strip()]
    if not names:
        raise UserError(f"training.train: {setting} is empty; expected, for example, {example}")
    return names


def _enumerate_names(names: list[str]) -> str:
    """Join the first four names for a message, and say how many more there are.

    >>> _enumerate_names(["a", "b", "c", "d", "e", "f"]), _enumerate_names(["a", "b"])
    ('a, b, c, d and 2 more', 'a and b')
    """
    shown = names if len(names) <= 4 else [*names[:4], f"{len(names) - 4} more"]
    *first, last = shown
    return f"{', '.join(first)} and {last}" if first else last


class Adapter(NamedTuple):
    """A layer to adapt.

    Attributes:
        layer: its name in the model.
        pieces: number of equal pieces of its outputs: 3 for a layer that computes query, key and value, else 1.
        adapted: numbers, from 0, of the pieces that get an A and B each.
    """

    layer: str
    pieces: int = 1
    adapted: tuple[int, ...] = (0,)


class LowRankLinear(nn.Linear):
    """A linear layer W x + b with LoRA adapters, which add (alpha / r) B A x, where A has r rows and B r columns.

    The outputs are divided into equal pieces, e.g. query, key and value; each adapted piece has its own A and B.
    """

    def __init__(
        self, base: nn.Linear, rank: int, alpha: float, pieces: int = 1, adapted: tuple[int, ...] = (0,)
    ) -> None:
        """Adapt the layer ``base``, whose weight and bias are shared, not copied.

        Args:
            base: the layer.
            rank: rank r of A and B.
            alpha: numerator of the scale alpha / r.
            pieces: number of equal pieces of the outputs.
            adapted: numbers, from 0, of the pieces that get an A and B each.
        """
        nn.Module.__init__(self)  # nn.Linear would allocate another weight
        self.in_features, self.out_features = base.in_features, base.out_features
        self.weight = base.weight
        self.register_parameter("bias", base.bias)
        self.rank, self.scale, self.pieces, self.adapted = rank, alpha / rank, pieces, adapted
        # The matrices A of all adapted pieces, stacked, and the matrices B.
        self.lora_a_weight = nn.Parameter(base.weight.detach().new_empty(len(adapted) * rank, self.in_features))
        self.lora_b_weight = nn.Parameter(
            base.weight.detach().new_zeros(len(adapted), self.out_features // pieces, rank)
        )
        nn.init.kaiming_uniform_(self.lora_a_weight, a=math.sqrt(5))

    def forward(self, input: Tensor) -> Tensor:
        """Compute W x + b for inputs x, and add (alpha / r) B A x to each adapted piece of the outputs."""
        products_with_a = torch.split(F.linear(input, self.lora_a_weight), self.rank, -1)
        outputs = list(F.linear(input, self.weight, self.bias).chunk(self.pieces, -1))
        for piece, a_x, b in zip(self.adapted, products_with_a, self.lora_b_weight.unbind(0), strict=True):
            outputs[piece] = outputs[piece] + self.scale * F.linear(a_x, b)
        return torch.cat(outputs, -1) if self.pieces > 1 else outputs[0]

    def to_linear(self) -> nn.Linear:
        """Return the equivalent plain layer, with weight W + (alpha / r) B A; it shares the bias."""
        plain = nn.Linear.__new__(nn.Linear)  # skips the random initialisation
        nn.Module.__init__(plain)
        plain.in_features, plain.out_features = self.in_features, self.out_features
        update = self.weight.new_zeros(self.pieces, self.out_features // self.pieces, self.in_features)
        a_of_pieces = torch.split(self.lora_a_weight.detach(), self.rank)
        for piece, a, b in zip(self.adapted, a_of_pieces, self.lora_b_weight.detach(), strict=True):
            update[piece] = self.scale * b @ a
        plain.weight = nn.Parameter(self.weight.detach() + update.flatten(0, 1), self.weight.requires_grad)
        plain.register_parameter("bias", self.bias)
        return plain.train(self.training)


def adaptable_layers(model: nn.Module) -> list[str]:
    """Return the names of the linear layers inside ``model`` that can be replaced by ``LowRankLinear``."""
    names, excluded_prefixes = [], []
    for name, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention | nn.TransformerEncoderLayer):
            # These modules read the weights of their layers directly, bypassing an adapter.
            excluded_prefixes.append(f"{name}." if name else "")
        elif name and type(module) in (nn.Linear, LowRankLinear):
            names.append(name)
    return [name for name in names if not name.startswith(tuple(excluded_prefixes))]


def attention_adapters(model: nn.Module) -> list[Adapter]:
    """Choose the query and value layers of attention to adapt, recognised by their names.

    In a joint ``qkv`` layer, these are the first and the last third of the outputs.
    """
    adapters = []
    for name in adaptable_layers(model):
        layer_type = name.rpartition(".")[2]
        layer = model.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        if layer_type == "qkv" and layer.out_features % 3 == 0:
            adapters.append(Adapter(name, pieces=3, adapted=(0, 2)))
        elif layer_type in QUERY_AND_VALUE:
            adapters.append(Adapter(name))
    return adapters


def add_adapters(model: nn.Module, adapters: Iterable[Adapter], rank: int, alpha: float) -> None:
    """Add low-rank adapters (alpha / r) B A to a model in place; A is drawn from torch's global generator, B is 0.

    Args:
        model: the model.
        adapters: the layers to adapt.
        rank: rank r of A and B.
        alpha: numerator of the scale alpha / r.

    >>> model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    >>> add_adapters(model, [Adapter("0")], rank=2, alpha=4)
    >>> [name for name, _ in model.named_parameters()]
    ['0.weight', '0.bias', '0.lora_a_weight', '0.lora_b_weight', '2.weight', '2.bias']
    """
    for adapter in adapters:
        base = model.get_submodule(adapter.layer)
        assert isinstance(base, nn.Linear)
        model.set_submodule(adapter.layer, LowRankLinear(base, rank, alpha, adapter.pieces, adapter.adapted))


def merge_adapters(model: nn.Module) -> nn.Module:
    """Merge every adapter into its layer in place, and return the model."""
    for name, module in list(model.named_modules()):
        if isinstance(module, LowRankLinear):
            model.set_submodule(name, module.to_linear())
    return model


def adapter_parameters(model: nn.Module, only_b: bool = False) -> set[str]:
    """Return the parameter names of all adapter matrices A and B in a model, or with ``only_b`` of B only."""
    matrices = {"lora_b_weight"} if only_b else {"lora_a_weight", "lora_b_weight"}
    return {name for name, _ in model.named_parameters() if name.rpartition(".")[2] in matrices}
