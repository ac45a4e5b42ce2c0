"""Base classes of models and their registry: from a text such as ``resnet18(norm=batch)`` to a spec and a network."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import nn

from fedflat.errors import UserError
from fedflat.operating_system import total_memory
from fedflat.registry import Registry
from fedflat.text import changed, make, parse_one, show

MODELS: Registry[type[ModelSpec]] = Registry("model", see="fedflat models")
"""Model specs by name; add your own with ``fedflat.register("mine", Mine)``."""


class ModelExample(NamedTuple):
    """A documented variant of a model.

    Attributes:
        text: the variant as text, e.g. ``vgg11(hidden=256)``.
        input_shape: shape of one sample that the variant is built for.
        classes: number of classes that the variant is built for.
        source: publications that use the variant.
    """

    text: str
    input_shape: tuple[int, ...]
    classes: int
    source: str = "-"


@dataclass(frozen=True)
class ModelSpec(ABC):
    """Base class of model specifications: frozen dataclasses whose fields are options, as in ``vgg11(hidden=256)``.

    Attributes:
        name: name under which the model is registered, e.g. ``cnn``.
        examples: variants of the model that its documentation page lists; may be empty.
        example: text in the example command of the documentation page, if the model needs parameters.
        dataset: dataset in the example command of the documentation page.
        partition: partition in the example command of the documentation page.
    """

    name: ClassVar[str]
    examples: ClassVar[tuple[ModelExample, ...]] = ()
    example: ClassVar[str] = ""
    dataset: ClassVar[str] = "cifar10"
    partition: ClassVar[str] = "dirichlet(alpha=0.1)"

    def build(self, input_shape: tuple[int, ...], classes: int) -> nn.Module:
        """Check the input shape and build the network; its weights are drawn from torch's global random generator.

        Args:
            input_shape: shape of one sample.
            classes: number of classes, i.e. of outputs.
        """
        if classes < 1:
            raise UserError(f"{self.name} cannot be built for {classes} classes; expected at least 1")
        if any(size < 1 for size in input_shape):
            raise UserError(
                f"{self.name} cannot be built for samples of shape {shape_text(input_shape)}; expected positive sizes"
            )
        self.check(input_shape)
        self._check_size(input_shape, classes)
        return self.network(input_shape, classes)

    def _check_size(self, input_shape: tuple[int, ...], classes: int) -> None:
        """Raise a ``UserError`` if the weights alone exceed this machine's memory; nothing is allocated."""
        try:
            with torch.device("meta"):
                parameters = list(self.network(input_shape, classes).parameters())
            size = sum(parameter.nbytes for parameter in parameters)
        except Exception as error:  # a user's network that cannot be built without memory is not checked
            if "overflow" not in str(error):
                return
            size = sys.maxsize
        if size > total_memory():
            raise UserError(
                f"{show(self.name, changed(self))} has weights of at least {size / 2**30:,.0f} GB, but this machine "
                f"has {total_memory() / 2**30:.0f} GB of memory; choose a smaller model"
            )

    def check(self, input_shape: tuple[int, ...]) -> None:  # noqa: B027
        """Raise a ``UserError`` if the model does not accept samples of this shape; by default, accept every shape."""

    @abstractmethod
    def network(self, input_shape: tuple[int, ...], classes: int) -> nn.Module:
        """Build the network for a shape that ``check`` has accepted; ``classes`` is the number of outputs."""


@dataclass(frozen=True)
class ImageModelSpec(ModelSpec):
    """Base class of models for images of shape (channels, height, width)."""

    def check(self, input_shape: tuple[int, ...]) -> None:
        """Raise a ``UserError`` unless samples are images that are at least as large as ``smallest_side``."""
        if len(input_shape) != 3:
            advice = "use mlp for vectors and char-lstm for text"
            if len(input_shape) == 2:
                height, width = input_shape
                advice = f"store greyscale images with a channel axis, [n, 1, {height}, {width}]: inputs[:, None]"
            raise UserError(
                f"{self.name} takes images (channels, height, width), but these samples have shape "
                f"{shape_text(input_shape)}; {advice}"
            )
        side = self.smallest_side()
        if min(input_shape[1:]) < side:
            raise UserError(
                f"{self.name} needs images of at least {side}x{side} pixels, but these have "
                f"{shape_text(input_shape[1:])}; use larger images or another model (list all: fedflat models)"
            )

    @abstractmethod
    def smallest_side(self) -> int:
        """Return the smallest accepted height and width in pixels."""


def require_sequence(name: str, input_shape: tuple[int, ...]) -> None:
    """Raise a ``UserError`` unless samples are token sequences (length,)."""
    if len(input_shape) != 1:
        raise UserError(
            f"{name} takes sequences (length,), but these samples have shape {shape_text(input_shape)}; "
            "use a model for images"
        )


def shape_text(shape: tuple[int, ...]) -> str:
    """Format a shape for messages.

    >>> shape_text((3, 32, 32))
    '3x32x32'
    """
    return "x".join(map(str, shape)) or "()"


def names() -> list[str]:
    """Return the names of all models that need no parameters, in the order of the documentation."""
    return [name for name, spec in MODELS.items() if not spec.example]


def model_spec(text: str) -> ModelSpec:
    """Parse a model's name with its parameters in parentheses, and check the parameters.

    >>> model_spec("MLP(hidden=32)")
    Mlp(hidden=32, layers=1)
    """
    call = parse_one(text)
    return make(MODELS.find(call.name), call, "model")


def canonical_model(text: str) -> str:
    """Return the shortest text that names the same model.

    >>> canonical_model("resnet18( stem=torchvision, norm=group, groups=2 )")
    'resnet18(stem=torchvision)'
    """
    spec = model_spec(text)
    return show(MODELS.name_of(type(spec)) or spec.name, changed(spec))


def build(text: str, input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """Build a model initialised from torch's global generator.

    Args:
        text: name and parameters of the model.
        input_shape: shape of one sample.
        classes: number of classes, i.e. of outputs.

    >>> build("mlp(hidden=3)", (4,), 2)
    Sequential(
      (0): Flatten(start_dim=1, end_dim=-1)
      (1): Linear(in_features=4, out_features=3, bias=True)
      (2): ReLU()
      (3): Linear(in_features=3, out_features=2, bias=True)
    )
    """
    return model_spec(text).build(input_shape, classes)


def parameter_count(text: str, input_shape: tuple[int, ...], classes: int) -> int:
    """Count the parameters of a model without allocating them.

    ``input_shape`` is the shape of one sample, and ``classes`` the number of outputs.

    >>> parameter_count("cnn", (3, 32, 32), 10)
    797962
    """
    with torch.device("meta"):
        return sum(p.numel() for p in build(text, input_shape, classes).parameters())


def classifier_parameters(model: nn.Module) -> set[str]:
    """Return the parameter names of the last linear layer or, in models without one, of the last convolution.

    >>> sorted(classifier_parameters(build("mlp", (4,), 2)))
    ['3.bias', '3.weight']
    """
    modules = list(model.named_modules())
    layers = [name for name, module in modules if isinstance(module, nn.Linear)]
    if not layers:
        layers = [name for name, module in modules if isinstance(module, nn.Conv2d)]
    if not layers:
        raise UserError("this model has no linear layer and no convolution, so it has no classifier")
    classifier = model.get_submodule(layers[-1])
    return {name for name, _ in classifier.named_parameters(prefix=layers[-1])}
