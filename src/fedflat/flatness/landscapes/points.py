"""Converts modules and flat vectors of one architecture to points of a landscape."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from fedflat.errors import UserError
from fedflat.flatness.landscapes.grid import Measure, Model
from fedflat.flatness.objective import Objective
from fedflat.models.layout import Layout


def loss_of(objective: Objective) -> Measure:
    """Measures the loss of an objective, with the objective's own buffers."""
    return lambda model: {"loss": objective.loss(model.weights)}


def models_of(objective: Objective, models: Mapping[str, Tensor | nn.Module]) -> dict[str, Model]:
    """Modules or flat vectors as points; raises a ``UserError`` if their architecture differs from the objective's."""
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
    """Raise a ``UserError`` that names the first difference if the layouts differ."""
    (first, expected), *others = layouts.items()
    for name, layout in others:
        difference = _difference(expected, layout)
        if difference:
            raise UserError(f"{first} and {name} have different shapes and cannot lie on {where}: {difference}")


def _difference(one: Layout, other: Layout) -> str:
    mine, theirs = dict(zip(one.names, one.shapes, strict=True)), dict(zip(other.names, other.shapes, strict=True))
    for name in [*mine, *theirs]:
        if name not in mine or name not in theirs:
            return f"only the {'first' if name in mine else 'second'} has {name}"
        if mine[name] != theirs[name]:
            return f"{name} is {_shown(mine[name])} in the first and {_shown(theirs[name])} in the second"
    return ""


def _shown(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "a scalar"
