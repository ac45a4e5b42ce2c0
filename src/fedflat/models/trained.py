"""The trainable part of a model: ``all``, or ``head``, ``norms``, ``layers``, ``lora`` and ``peft``, joined by +.

Everything else is frozen. Flat vectors, algorithm states and communication then cover only the trainable part.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from torch import nn

from fedflat.errors import UserError, one_of
from fedflat.models.low_rank import Adapter, adaptable_layers, adapter_parameters, add_adapters, attention_adapters
from fedflat.models.peft_adapters import add_peft_adapters
from fedflat.models.registry import classifier_parameters
from fedflat.registry import Registry
from fedflat.text import make, param, parse

NORMS = (nn.LayerNorm, nn.GroupNorm, nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)


@dataclass(frozen=True)
class TrainedPart(ABC):
    """A part of a model that can be trained; its fields are its options, such as ``rank`` in ``lora(rank=8)``."""

    name: ClassVar[str]

    def extend(self, model: nn.Module) -> nn.Module:
        """Return ``model`` with additional modules, before weights are loaded; by default unchanged."""
        return model

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
class NormLayers(TrainedPart):
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
    exact: bool = param(
        False, "add to W what the means of A and B miss, so that weights are the mean of the clients' (FedEx-LoRA)"
    )

    def extend(self, model: nn.Module) -> nn.Module:
        if self.only_b and self.exact:
            raise UserError("training.train=lora: averages with only_b are exact; use either only_b or exact")
        add_adapters(model, self.adapters(model), self.rank, self.alpha, self.exact)
        return model

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


@dataclass(frozen=True)
class Peft(TrainedPart):
    """Adapters of the package ``peft``, such as LoRA, DoRA or prompt tuning."""

    name = "peft"
    path: str = param(
        "",
        "folder with adapter_config.json and, to start from a saved adapter, its weights",
        path=True,
        positional=True,
    )
    only_b: bool = param(False, "train only the matrices B of LoRA, as lora(only_b=true) does")

    def extend(self, model: nn.Module) -> nn.Module:
        if not self.path:
            raise UserError("training.train=peft needs a folder with adapter_config.json; write peft(path=DIR)")
        return add_peft_adapters(model, Path(self.path))

    def parameter_names(self, model: nn.Module) -> set[str]:
        """Return the names of the parameters that ``peft`` trains, without the matrices A if ``only_b``."""
        trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        matrices_a = {name for name in trained if ".lora_A." in name or ".lora_embedding_A." in name}
        if self.only_b and not matrices_a:
            raise UserError(f"training.train: the adapter in {self.path} has no matrices A; remove only_b")
        return trained - matrices_a if self.only_b else trained


PARTS: Registry[type[TrainedPart]] = Registry("trainable part")
"""Trainable parts by name."""
for _part in (All, Head, NormLayers, Layers, Lora, Peft):
    PARTS.register(_part.name, _part)


def trained_parts(text: str) -> tuple[TrainedPart, ...]:
    """Parse the trainable parts that a text names.

    >>> trained_parts("lora(rank=4)+norms")
    (Lora(rank=4, alpha=16.0, layers='qv', head=True, only_b=False, exact=False), NormLayers())
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
