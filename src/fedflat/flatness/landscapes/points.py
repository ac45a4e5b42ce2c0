"""Converts modules and flat vectors of one architecture to points of a landscape."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fedflat.errors import UserError
from fedflat.flatness.checks import check_mean
from fedflat.flatness.landscapes.grid import Measure, Model
from fedflat.flatness.objective import Objective
from fedflat.models.layout import Layout

NO_BUFFERS = Layout((), ())
"""Layout of points without buffers of their own."""


def require_objective(objective: object) -> None:
    """Raise a ``UserError`` for anything but an objective, e.g. a module."""
    if not isinstance(objective, Objective):
        raise UserError(
            f"objective is a {type(objective).__name__}; expected an Objective(module, loss, data), "
            "or use flatness.landscape(module, loss, data)"
        )


def loss_of(objective: Objective, buffers: Layout = NO_BUFFERS) -> Measure:
    """Return a measure of an objective's loss.

    Args:
        objective: the loss as a function of the weights.
        buffers: names and shapes of the points' own buffers, which replace the objective's.
    """
    check_mean(objective)

    def measure(model: Model) -> dict[str, Tensor]:
        own_buffers = buffers.views(model.buffers)
        for name in own_buffers:
            if name.endswith("running_var"):  # extrapolated variances may be negative
                own_buffers[name] = own_buffers[name].clamp_min(0)
        return {"loss": objective.loss(model.weights, own_buffers)}

    return measure


def models_of(
    objective: Objective, models: Mapping[str, Tensor | nn.Module], where: str = "one plane"
) -> tuple[dict[str, Model], Layout]:
    """Convert modules or flat vectors [P], given by name, to points of a landscape.

    A module is a point with its own weights and floating-point buffers, a vector one with the objective's buffers.
    Buffers in which all points equal the objective, such as attention masks, are left out.

    Args:
        objective: defines architecture, device and dtype.
        models: the modules or vectors. A ``UserError`` is raised if their architecture differs from the objective's.
        where: completes "cannot lie on" in the message.

    Returns:
        The points by name, and names and shapes of their buffers.
    """
    require_objective(objective)
    weights: dict[str, Tensor] = {}
    buffers: dict[str, dict[str, Tensor]] = {}
    for name, model in models.items():
        buffers[name] = objective.buffers
        if isinstance(model, nn.Module):
            own_buffers = {key: value.detach() for key, value in model.named_buffers() if value.is_floating_point()}
            shapes = {"the objective's model": objective.layout, name: Layout.of_parameters(model)}
            require_same_shapes(shapes, where)
            require_same_shapes(
                {"the objective's model": Layout.of(buffers[name]), name: Layout.of(own_buffers)}, where
            )
            buffers[name] = {key: value.to(buffers[name][key]) for key, value in own_buffers.items()}
            model = objective.vector_of(model)
        elif len(model) != objective.size:
            raise UserError(f"{name} has {len(model)} entries, but the objective's model has {objective.size} weights")
        weights[name] = model.to(objective.device, objective.dtype)
    differing = Layout.of(
        {
            key: value
            for key, value in objective.buffers.items()
            if not all(torch.equal(own_buffers[key], value) for own_buffers in buffers.values())
        }
    )
    points = {name: Model(weights[name], differing.flatten(buffers[name]).to(objective.device)) for name in weights}
    return points, differing


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
