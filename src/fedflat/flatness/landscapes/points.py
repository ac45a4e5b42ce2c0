"""Converts modules and flat vectors of one architecture to points of a landscape."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from fedflat.errors import UserError
from fedflat.flatness.landscapes.grid import Measure, Model
from fedflat.flatness.objective import Objective
from fedflat.models.layout import Layout


def loss_of(objective: Objective) -> Measure:
    """Return a measure of an objective's loss, with the objective's own buffers."""
    return lambda model: {"loss": objective.loss(model.weights)}


def models_of(objective: Objective, models: Mapping[str, Tensor | nn.Module]) -> dict[str, Model]:
    """Convert modules or flat vectors [P], given by name, to points of a landscape.

    Raises a ``UserError`` if their architecture differs from the objective's.
    """
    # The loss is evaluated with the objective's buffers for every model.
    no_buffers = objective.weights.new_zeros(0)
    points = {}
    for name, model in models.items():
        if isinstance(model, nn.Module):
            require_same_shapes({"the objective's model": objective.layout, name: Layout.of_parameters(model)})
            model = objective.layout.flatten({key: value.detach() for key, value in model.named_parameters()})
        elif len(model) != objective.size:
            raise UserError(f"{name} has {len(model)} entries, but the objective's model has {objective.size} weights")
        points[name] = Model(model.to(objective.device, objective.dtype), no_buffers)
    return points


def require_same_shapes(layouts: Mapping[str, Layout], where: str = "one plane") -> None:
    """Raise a ``UserError`` that names the first differing tensor if models have different parameters.

    Args:
        layouts: names and shapes of each model's parameters, by the model's name.
        where: completes "cannot lie on" in the message.
    """
    (first_name, first), *others = layouts.items()
    for name, layout in others:
        difference = _first_difference(first, layout)
        if difference:
            raise UserError(f"{first_name} and {name} have different shapes and cannot lie on {where}: {difference}")


def _first_difference(first: Layout, second: Layout) -> str:
    """Describe the first tensor in which two layouts differ, by name or shape; an empty string if there is none."""
    first_shapes = dict(zip(first.names, first.shapes, strict=True))
    second_shapes = dict(zip(second.names, second.shapes, strict=True))
    for name in [*first_shapes, *second_shapes]:
        if name not in second_shapes:
            return f"only the first has {name}"
        if name not in first_shapes:
            return f"only the second has {name}"
        if first_shapes[name] != second_shapes[name]:
            shapes = _format_shape(first_shapes[name]), _format_shape(second_shapes[name])
            return f"{name} is {shapes[0]} in the first and {shapes[1]} in the second"
    return ""


def _format_shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "a scalar"
