"""Modules and flat vectors as the points that landscapes measure, all of one architecture."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from fedflat.errors import UserError
from fedflat.flatness.landscapes.grid import Measure, Model
from fedflat.flatness.objective import Objective
from fedflat.models.layout import Layout


def loss_of(objective: Objective) -> Measure:
    """The loss of an objective as what is measured; its own buffers stand in for a model's."""
    return lambda model: {"loss": objective.loss(model.weights)}


def models_of(objective: Objective, models: Mapping[str, Tensor | nn.Module]) -> dict[str, Model]:
    """Modules, or flat vectors, as models of an objective; refused where they are of another architecture."""
    nothing = objective.weights.new_zeros(0)
    found = {}
    for name, one in models.items():
        if isinstance(one, nn.Module):
            refuse_different_shapes({"the objective's model": objective.layout, name: Layout.of_parameters(one)})
            one = objective.layout.flatten({key: value.detach() for key, value in one.named_parameters()})
        elif len(one) != objective.size:
            raise UserError(
                f"{name} has {len(one)} numbers, but the objective's model has {objective.size}; expected the same architecture"
            )
        found[name] = Model(one.to(objective.device, objective.dtype), nothing)
    return found


def refuse_different_shapes(layouts: Mapping[str, Layout], where: str = "one plane") -> None:
    """Refuse models that are not of one architecture, saying where they differ."""
    (first, expected), *others = layouts.items()
    for name, layout in others:
        difference = _difference(expected, layout)
        if difference:
            raise UserError(f"{first} and {name} have different shapes and cannot lie on {where}: {difference}")


def _difference(one: Layout, other: Layout) -> str:
    mine, theirs = dict(zip(one.names, one.shapes, strict=True)), dict(zip(other.names, other.shapes, strict=True))
    for name in [*mine, *theirs]:
        if name not in mine or name not in theirs:
            return f"the {'first' if name in mine else 'second'} alone has {name}"
        if mine[name] != theirs[name]:
            return f"{name} is {_shown(mine[name])} in the first and {_shown(theirs[name])} in the second"
    return ""


def _shown(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "a single number"
