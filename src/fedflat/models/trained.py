"""Which part of a model is trained, as text: ``head``, ``norms``, ``layers(names=blocks.10|blocks.11)``, ``lora(rank=8)``, joined by ``+``.

The rest is frozen. Flat vectors, the state of every algorithm and what is sent then cover the trained part alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from fedflat.errors import UserError, one_of
from fedflat.models.adapters import A, Adapter, B, add_adapters, linear_layers, query_and_value
from fedflat.models.registry import classifier_parameters
from fedflat.text import make, param, parse

NORMS = (nn.LayerNorm, nn.GroupNorm, nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)


@dataclass(frozen=True)
class Part(ABC):
    """A part of a model; its fields are the parameters of the text that names it."""

    name: ClassVar[str]

    def extend(self, model: nn.Module) -> None:  # noqa: B027 - most parts add nothing
        """Put into a model what this part adds to it, before weights are read."""

    @abstractmethod
    def chosen(self, model: nn.Module) -> set[str]:
        """The names of the parameters of this part."""


@dataclass(frozen=True)
class All(Part):
    """All that the model itself trains."""

    name = "all"

    def chosen(self, model: nn.Module) -> set[str]:
        return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


@dataclass(frozen=True)
class Head(Part):
    """The last linear layer: the backbone is frozen."""

    name = "head"

    def chosen(self, model: nn.Module) -> set[str]:
        return classifier_parameters(model)


@dataclass(frozen=True)
class Norms(Part):
    """The scales and shifts of all normalisations."""

    name = "norms"

    def chosen(self, model: nn.Module) -> set[str]:
        layers = [(prefix, module) for prefix, module in model.named_modules() if isinstance(module, NORMS)]
        found = {f"{prefix}.{name}" for prefix, module in layers for name, _ in module.named_parameters()}
        if not found:
            raise UserError(
                "training.train=norms: this model has no normalisation with parameters; train head or layers(names=...) of it"
            )
        return found


@dataclass(frozen=True)
class Layers(Part):
    """Layers, or single parameters, by name."""

    name = "layers"
    names: str | int | float = param(
        "", "names joined by |, each of a layer with all below it or of one parameter: blocks.10|blocks.11"
    )

    def chosen(self, model: nn.Module) -> set[str]:
        every = [name for name, _ in model.named_parameters()]
        found: set[str] = set()
        for word in _words(self.names, "layers(names=...)", "layers(names=blocks.10|blocks.11)"):
            below = {name for name in every if name == word or name.startswith(f"{word}.")}
            if not below:
                raise one_of(
                    "layer or parameter of this model",
                    word,
                    {_layer(name) for name in every} | {n.partition(".")[0] for n in every},
                )
            found |= below
        return found


@dataclass(frozen=True)
class Lora(Part):
    """Low-rank adapters beside linear layers (Hu et al. 2022), and the head."""

    name = "lora"
    rank: int = param(8, "rank of the change to each layer (r)", low=1)
    alpha: float = param(16.0, "the change is scaled by alpha / rank", above=0)
    layers: str | int | float = param(
        "qv", "qv: queries and values of attention; all: all linear layers but the head; or names joined by |"
    )
    head: bool = param(True, "train the head too, all of it")
    only_b: bool = param(
        False, "train B alone, so that the mean of the clients' changes is the change by the mean (FFA-LoRA)"
    )

    def extend(self, model: nn.Module) -> None:
        add_adapters(model, self.adapters(model), self.rank, self.alpha)

    def adapters(self, model: nn.Module) -> list[Adapter]:
        """The layers that are adapted."""
        layers = linear_layers(model)
        if not layers:
            raise UserError(
                "training.train=lora: this model has no linear layer to adapt; train head or layers(names=...) of it"
            )
        if self.layers == "qv":
            found = query_and_value(model)
            if not found:
                raise UserError(
                    "training.train=lora: no layer of this model is called qkv, query or value, as in attention; choose among its "
                    f"linear layers, {_some(layers)}, for example lora(layers={layers[0]}) or lora(layers=all)"
                )
            return found
        head = {_layer(name) for name in classifier_parameters(model)}
        if self.layers == "all":
            found = [Adapter(name) for name in layers if name not in head]
            if not found:
                raise UserError(
                    f"training.train=lora: {_some(layers)}, the head, is the only linear layer of this model, which leaves none to adapt; "
                    "train head or layers(names=...) of it"
                )
            return found
        chosen: set[str] = set()
        for word in _words(self.layers, "lora(layers=...)", "lora(layers=fc1|fc2)"):
            matching = {
                name for name in layers if name == word or name.startswith(f"{word}.") or name.endswith(f".{word}")
            }
            if not matching:
                raise one_of("linear layer of this model", word, layers)
            chosen |= matching
        return [Adapter(name) for name in layers if name in chosen]

    def chosen(self, model: nn.Module) -> set[str]:
        kinds = (B,) if self.only_b else (A, B)
        adapted = {name for name, _ in model.named_parameters() if name.rpartition(".")[2] in kinds}
        return adapted | (classifier_parameters(model) if self.head else set())


PARTS: dict[str, type[Part]] = {part.name: part for part in (All, Head, Norms, Layers, Lora)}


def trained_parts(text: str) -> tuple[Part, ...]:
    """The parts that a text names.

    >>> trained_parts("lora(rank=4)+norms")
    (Lora(rank=4, alpha=16.0, layers='qv', head=True, only_b=False), Norms())
    """
    calls = parse(text)
    for call in calls:
        if call.name not in PARTS:
            raise one_of("part of a model to train", call.name, PARTS)
        if sum(other.name == call.name for other in calls) > 1:
            raise UserError(f"training.train={text} names {call.name} twice; expected each part once")
    if len(calls) > 1 and any(call.name == All.name for call in calls):
        raise UserError(
            f"training.train={text}: all is everything, so that nothing can be added to it; expected all alone, or other parts"
        )
    return tuple(make(PARTS[call.name], call, "trained part") for call in calls)


def freeze(model: nn.Module, parts: tuple[Part, ...]) -> None:
    """Let a model train these parts alone, in place."""
    chosen = set().union(*(part.chosen(model) for part in parts))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in chosen)


def trained_sentence(model: nn.Module) -> str:
    """What a model trains, in words; empty where it is everything.

    >>> model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    >>> freeze(model, trained_parts("head"))
    >>> trained_sentence(model)
    'trains 8 of 23 numbers, in 1'
    """
    parameters = dict(model.named_parameters())
    trained = {name: p for name, p in parameters.items() if p.requires_grad}
    if len(trained) == len(parameters):
        return ""
    numbers, every = (sum(p.numel() for p in some.values()) for some in (trained, parameters))
    return f"trains {numbers:,} of {every:,} numbers, in {_some(list(dict.fromkeys(_layer(name) for name in trained)))}"


def _layer(parameter: str) -> str:
    """The layer of a parameter, by name; a parameter of the model itself stands for itself."""
    return parameter.rpartition(".")[0] or parameter


def _words(value: str | int | float, where: str, example: str) -> list[str]:
    words = [word.strip() for word in str(value).split("|") if word.strip()]
    if not words:
        raise UserError(f"training.train: {where} names nothing; expected, for example, {example}")
    return words


def _some(names: list[str]) -> str:
    """The first few of some names, and how many more there are.

    >>> _some(["a", "b", "c", "d", "e", "f"])
    'a, b, c, d and 2 more'
    """
    shown, more = names[:4], len(names) - 4
    if more > 0:
        return f"{', '.join(shown)} and {more} more"
    return " and ".join(filter(None, [", ".join(shown[:-1]), shown[-1]]))
