"""The trainable part of a model: ``all``, ``head``, ``norms``, ``layers(names=A|B)`` or ``lora(rank=8)``, joined by +.

Everything else is frozen. Flat vectors, algorithm states and communication then cover only the trainable part.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from fedflat.errors import UserError, one_of
from fedflat.models.adapters import A, Adapter, B, add_adapters, linear_layers, query_and_value
from fedflat.models.registry import classifier_parameters
from fedflat.registry import Registry
from fedflat.text import make, param, parse

NORMS = (nn.LayerNorm, nn.GroupNorm, nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)


@dataclass(frozen=True)
class TrainedPart(ABC):
    """A part of a model; its fields are the parameters of the text that names it."""

    name: ClassVar[str]

    def extend(self, model: nn.Module) -> None:  # noqa: B027 - most parts add nothing
        """Add modules to ``model`` in place, before weights are loaded."""

    @abstractmethod
    def chosen(self, model: nn.Module) -> set[str]:
        """Names of the parameters of this part."""


@dataclass(frozen=True)
class All(TrainedPart):
    """All parameters that the model itself trains."""

    name = "all"

    def chosen(self, model: nn.Module) -> set[str]:
        return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


@dataclass(frozen=True)
class Head(TrainedPart):
    """The last linear layer."""

    name = "head"

    def chosen(self, model: nn.Module) -> set[str]:
        return classifier_parameters(model)


@dataclass(frozen=True)
class Norms(TrainedPart):
    """The scales and shifts of all normalisation layers."""

    name = "norms"

    def chosen(self, model: nn.Module) -> set[str]:
        layers = [(prefix, module) for prefix, module in model.named_modules() if isinstance(module, NORMS)]
        names = {f"{prefix}.{name}" for prefix, module in layers for name, _ in module.named_parameters()}
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

    def chosen(self, model: nn.Module) -> set[str]:
        parameters = [name for name, _ in model.named_parameters()]
        chosen: set[str] = set()
        for word in _words(self.names, "layers(names=...)", "layers(names=blocks.10|blocks.11)"):
            below = {name for name in parameters if name == word or name.startswith(f"{word}.")}
            if not below:
                layers = {_layer(name) for name in parameters} | {name.partition(".")[0] for name in parameters}
                raise one_of("layer or parameter", word, layers, owner="this model")
            chosen |= below
        return chosen


@dataclass(frozen=True)
class Lora(TrainedPart):
    """Low-rank adapters of linear layers (Hu et al. 2022), and the head."""

    name = "lora"
    rank: int = param(8, "rank of the update of each layer (r)", low=1)
    alpha: float = param(16.0, "the update is scaled by alpha / rank", above=0)
    layers: str | int | float = param(
        "qv", "qv: query and value of attention; all: all linear layers except the head; or names joined by |"
    )
    head: bool = param(True, "also train the full head")
    only_b: bool = param(
        False, "train only B, so that the mean of the clients' updates equals the update by the mean B (FFA-LoRA)"
    )

    def extend(self, model: nn.Module) -> None:
        add_adapters(model, self.adapters(model), self.rank, self.alpha)

    def adapters(self, model: nn.Module) -> list[Adapter]:
        """The layers to adapt."""
        layers = linear_layers(model)
        if not layers:
            raise UserError("training.train=lora: this model has no linear layer; use head or layers(names=...)")
        if self.layers == "qv":
            adapters = query_and_value(model)
            if not adapters:
                raise UserError(
                    "training.train=lora: this model has no layer named qkv, query or value; choose linear layers "
                    f"({_shortened(layers)}), for example lora(layers={layers[0]}) or lora(layers=all)"
                )
            return adapters
        if self.layers == "all":
            head = {_layer(name) for name in classifier_parameters(model)}
            adapters = [Adapter(name) for name in layers if name not in head]
            if not adapters:
                raise UserError(
                    f"training.train=lora: the head ({_shortened(layers)}) is the only linear layer of this model; "
                    "use head or layers(names=...)"
                )
            return adapters
        chosen: set[str] = set()
        for word in _words(self.layers, "lora(layers=...)", "lora(layers=fc1|fc2)"):
            matching = {
                name for name in layers if name == word or name.startswith(f"{word}.") or name.endswith(f".{word}")
            }
            if not matching:
                raise one_of("linear layer", word, layers, owner="this model")
            chosen |= matching
        return [Adapter(name) for name in layers if name in chosen]

    def chosen(self, model: nn.Module) -> set[str]:
        kinds = (B,) if self.only_b else (A, B)
        adapted = {name for name, _ in model.named_parameters() if name.rpartition(".")[2] in kinds}
        return adapted | (classifier_parameters(model) if self.head else set())


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
    chosen = set().union(*(part.chosen(model) for part in parts))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in chosen)


def describe_trained(model: nn.Module) -> str:
    """The trainable part of a model in words; empty if nothing is frozen.

    >>> model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    >>> freeze(model, trained_parts("head"))
    >>> describe_trained(model)
    'trains 8 of 23 parameters, in 1'
    """
    parameters = dict(model.named_parameters())
    trained = {name: p for name, p in parameters.items() if p.requires_grad}
    if len(trained) == len(parameters):
        return ""
    trained_count, count = (sum(p.numel() for p in tensors.values()) for tensors in (trained, parameters))
    layers = list(dict.fromkeys(_layer(name) for name in trained))
    return f"trains {trained_count:,} of {count:,} parameters, in {_shortened(layers)}"


def _layer(parameter: str) -> str:
    """The layer of a parameter; a parameter of the model itself stands for itself."""
    return parameter.rpartition(".")[0] or parameter


def _words(value: str | int | float, setting: str, example: str) -> list[str]:
    words = [word.strip() for word in str(value).split("|") if word.strip()]
    if not words:
        raise UserError(f"training.train: {setting} is empty; expected, for example, {example}")
    return words


def _shortened(names: list[str]) -> str:
    """The first four names, and how many more there are.

    >>> _shortened(["a", "b", "c", "d", "e", "f"])
    'a, b, c, d and 2 more'
    """
    shown, more = names[:4], len(names) - 4
    if more > 0:
        return f"{', '.join(shown)} and {more} more"
    return " and ".join(filter(None, [", ".join(shown[:-1]), shown[-1]]))
