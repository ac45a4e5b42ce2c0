"""What every model's spec has in common: its name, its parameters, and which samples it can take."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from fedflat.errors import UserError


@dataclass(frozen=True)
class ModelSpec(ABC):
    """The description of a model; its fields are the parameters of the text that names it."""

    name: ClassVar[str]

    def build(self, input_shape: tuple[int, ...], classes: int) -> nn.Module:
        """A freshly initialised model for samples of this shape, drawn from torch's global generator with torch's default init."""
        if classes < 1:
            raise UserError(f"{self.name} cannot be built for {classes} classes; expected at least 1")
        if any(size < 1 for size in input_shape):
            raise UserError(
                f"{self.name} cannot be built for samples of shape {_shown(input_shape)}; expected positive sizes"
            )
        self.check(input_shape)
        return self.network(input_shape, classes)

    @abstractmethod
    def check(self, input_shape: tuple[int, ...]) -> None:
        """Refuse, with a UserError, samples that this model cannot take."""

    @abstractmethod
    def network(self, input_shape: tuple[int, ...], classes: int) -> nn.Module:
        """The model itself; the shape has been checked."""


@dataclass(frozen=True)
class ImageModelSpec(ModelSpec):
    """The description of a model for images, given as (channels, height, width)."""

    def check(self, input_shape: tuple[int, ...]) -> None:
        """Refuse what is no image, and images that would shrink to nothing on their way through the layers."""
        if len(input_shape) != 3:
            raise UserError(
                f"{self.name} takes images of shape (channels, height, width), but these samples have shape {_shown(input_shape)}; "
                "use mlp for plain features and char-lstm for text"
            )
        side = self.smallest_side()
        if min(input_shape[1:]) < side:
            raise UserError(
                f"{self.name} needs images of at least {side}x{side} pixels, but these have {_shown(input_shape[1:])}; "
                "use larger images or a model for smaller ones (all of them: fedflat models)"
            )

    @abstractmethod
    def smallest_side(self) -> int:
        """The least height and width in pixels."""


def require_sequence(name: str, input_shape: tuple[int, ...]) -> None:
    """Refuse whatever is not a sequence of token numbers, given as (length,)."""
    if len(input_shape) != 1:
        raise UserError(
            f"{name} takes sequences of shape (length,), but these samples have shape {_shown(input_shape)}; use a model for images instead"
        )


def _shown(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "()"
