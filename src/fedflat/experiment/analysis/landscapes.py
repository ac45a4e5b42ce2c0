"""Landscapes of models of runs (around a model, on a plane, along a path), and their files.

Every model of a landscape is measured on the same training and test examples.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fedflat.engines.problem.problem import Problem
from fedflat.errors import UserError
from fedflat.experiment.analysis.loss_and_error import LossAndError, Statistics
from fedflat.experiment.analysis.run_model import RunModel
from fedflat.experiment.store.files import create_folder, write_atomically
from fedflat.flatness.landscapes.alignment import aligned_tensors
from fedflat.flatness.landscapes.curve import bezier_control, raise_for_statistics
from fedflat.flatness.landscapes.directions import OneDimensional
from fedflat.flatness.landscapes.grid import Landscape, Model, Progress, silent
from fedflat.flatness.landscapes.landscape import landscape_around
from fedflat.flatness.landscapes.path import path_landscape
from fedflat.flatness.landscapes.plane import plane_landscape
from fedflat.flatness.landscapes.points import require_same_shapes

CURVE_BATCH = 128
"""Examples per training step of a curve between two models."""


def landscapes(
    models: Sequence[RunModel],
    *,
    dimensions: int = 2,
    radius: float = 1.0,
    points: int = 41,
    examples: int | None = None,
    seed: int = 0,
    one_dimensional: OneDimensional = "zero",
    names: Sequence[str] = (),
    progress: Progress = silent,
) -> dict[str, Landscape]:
    """Compute the loss landscape around each model; all models share random directions and examples.

    Args:
        models: models of runs on the same dataset.
        dimensions: 1 for a line, 2 for a plane.
        radius: half-width in filter norms; at 1, every filter has moved by its own norm.
        points: grid points per dimension.
        examples: number of training and of test examples to evaluate on; default: all.
        seed: seed of directions and examples.
        one_dimensional: directions of biases and normalisation weights: ``zero``, or ``scaled`` like filters.
        names: name of each model; default: its reference, e.g. ``runs/fedavg:server``.
        progress: called with (points evaluated, total).

    Returns:
        Landscapes by name.
    """
    names = _checked_names(models, names)
    require_same_dataset(models, names)
    points_per_model = points**dimensions
    total = len(models) * points_per_model
    grids: dict[str, Landscape] = {}
    for name, model in zip(names, models, strict=True):
        measure = LossAndError(
            model.problem, model.partition, model.state.integer_buffers, examples=examples, seed=seed
        )
        grid = landscape_around(
            model.problem.layout,
            _point(model),
            measure,
            name=name,
            dimensions=dimensions,
            radius=radius,
            points=points,
            seed=seed,
            one_dimensional=one_dimensional,
            progress=partial(lambda before, done, _: progress(before + done, total), len(grids) * points_per_model),
        )
        about = {"model": model.label, "described": model.description, "parameters": model.problem.layout.size}
        grids[name] = grid.with_metadata(**about, **_description(model, measure))
    return grids


def plane(
    models: Sequence[RunModel],
    *,
    points: int = 41,
    margin: float = 0.25,
    examples: int | None = None,
    seed: int = 0,
    statistics: Statistics = "interpolated",
    names: Sequence[str] = (),
    progress: Progress = silent,
) -> Landscape:
    """Compute the landscape on the plane through three models, on the first model's data.

    Args:
        models: at least three models with the same parameters; those after the third are projected onto the plane.
        points: grid points per side.
        margin: extension of the grid beyond the models, as a fraction of their extent.
        examples: number of training and of test examples to evaluate on; default: all.
        seed: seed of the sampled examples.
        statistics: BatchNorm statistics at each point: ``interpolated`` between the models, or ``estimated`` anew.
        names: name of each model; default: its reference, e.g. ``runs/fedavg:server``.
        progress: called with (points evaluated, total).
    """
    shared = _SharedSpace(models, names, "one plane", examples, seed, statistics)
    grid = plane_landscape(shared.points, shared.measure, points=points, margin=margin, progress=progress)
    return grid.with_metadata(**shared.description)


def path(
    models: Sequence[RunModel],
    *,
    points: int = 41,
    beyond: float = 0.0,
    examples: int | None = None,
    seed: int = 0,
    statistics: Statistics = "interpolated",
    align: bool = False,
    curve_steps: int = 0,
    names: Sequence[str] = (),
    progress: Progress = silent,
) -> Landscape:
    """Compute the landscape on the straight line or a curve between two models, on the first model's data.

    Args:
        models: two models with the same parameters.
        points: number of points.
        beyond: how far the line continues past each of the two models, as a fraction of the distance between them.
        examples: number of training and of test examples to evaluate on; default: all.
        seed: seed of the sampled examples.
        statistics: BatchNorm statistics at each point: ``interpolated`` between the models, or ``estimated`` anew.
        align: whether to permute the hidden units of the second model to match the first (Ainsworth et al. 2022).
        curve_steps: training steps of a Bezier curve that replaces the line (Garipov et al. 2018); 0: a line.
        names: name of each model; default: its reference, e.g. ``runs/fedavg:server``.
        progress: called with (points evaluated, total).
    """
    shared = _SharedSpace(models, names, "one path", examples, seed, statistics)
    ends, control = shared.points, None
    if align and len(ends) == 2:
        (first_name, first), (second_name, second) = ends.items()
        ends = {first_name: first, second_name: _aligned(models[0].problem, first, second, seed)}
    if curve_steps and len(ends) == 2:
        first, second = ends.values()
        if len(first.buffers):
            raise_for_statistics()
        objective = models[0].objective(batch_size=CURVE_BATCH)
        if examples is not None and examples < objective.examples:
            objective = objective.subset(examples, seed)
        control = bezier_control(objective, first.weights, second.weights, steps=curve_steps, seed=seed)
    grid = path_landscape(ends, shared.measure, points=points, beyond=beyond, control=control, progress=progress)
    return grid.with_metadata(aligned=align, curve_steps=curve_steps, **shared.description)


def _aligned(problem: Problem, reference: Model, model: Model, seed: int) -> Model:
    """Permute the hidden units of ``model`` to match those of ``reference``."""
    layout = problem.whole_layout
    first, second = (layout.views(torch.cat([point.weights, point.buffers])) for point in (reference, model))
    permuted = layout.flatten(aligned_tensors(problem.model, first, second, seed))
    return Model(permuted[: len(model.weights)], permuted[len(model.weights) :])


class _SharedSpace:
    """Models with the same parameters as points of one space, measured on the first model's data.

    Args:
        models: the models.
        names: name of each model; if empty, their references.
        place: where the models are to be placed, e.g. ``one plane``, for the error message if their shapes differ.
        examples: number of training and of test examples to evaluate on; None for all.
        seed: seed of the sampled examples.
        statistics: BatchNorm statistics at each point: ``interpolated`` between the models, or ``estimated`` anew.
    """

    def __init__(
        self,
        models: Sequence[RunModel],
        names: Sequence[str],
        place: str,
        examples: int | None,
        seed: int,
        statistics: Statistics,
    ) -> None:
        """Check that the models have the same shapes and dataset, and prepare the measurement."""
        names, first = _checked_names(models, names), models[0]
        layouts = {name: model.problem.whole_layout for name, model in zip(names, models, strict=True)}
        require_same_shapes(layouts, place)
        require_same_dataset(models, names)
        self.points = {name: _point(model) for name, model in zip(names, models, strict=True)}
        self.measure = LossAndError(
            first.problem,
            first.partition,
            first.state.integer_buffers,
            examples=examples,
            seed=seed,
            statistics=statistics,
        )
        self.description = {
            "models": [model.label for model in models],
            "descriptions": {name: model.description for name, model in zip(names, models, strict=True)},
            "statistics": statistics if len(first.state.buffers) else None,  # without buffers, there are none
            **_description(first, self.measure),
        }


def _checked_names(models: Sequence[RunModel], names: Sequence[str]) -> list[str]:
    """Return the names of the models, by default their references; raises a ``UserError`` for duplicates."""
    names = list(names) or [model.label for model in models]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"{name} is listed twice; list each model once")
    return names


def require_same_dataset(models: Sequence[RunModel], names: Sequence[str]) -> None:
    """Reject models of different datasets, whose losses are not comparable."""
    first_dataset = models[0].record.config.data.dataset
    for name, model in zip(names, models, strict=True):
        dataset = model.record.config.data.dataset
        if dataset != first_dataset:
            raise UserError(
                f"{names[0]} was trained on {first_dataset}, {name} on {dataset}; "
                "losses of different datasets are not comparable"
            )


def _point(model: RunModel) -> Model:
    return Model(model.state.weights, model.state.buffers)


def _description(model: RunModel, measure: LossAndError) -> dict[str, Any]:
    """Return metadata of a landscape: the model's dataset and architecture, the number of examples and precision."""
    config = model.record.config
    return {
        "data": config.data.dataset,
        "architecture": config.model,
        "examples": measure.counts,
        "precision": str(model.problem.dtype).removeprefix("torch."),
    }


def save_landscapes(path: Path, grids: Mapping[str, Landscape]) -> None:
    """Write landscapes to one JSON file, atomically."""
    create_folder(path.parent)
    documents = {name: grid.document() for name, grid in grids.items()}
    write_atomically(path, json.dumps({"landscapes": documents}, allow_nan=False) + "\n")


def load_landscapes(path: Path) -> dict[str, Landscape]:
    """Read a file written by ``save_landscapes``."""
    expected = "expected a file written by fedflat flatness landscape, plane or path"
    try:
        documents = dict(json.loads(path.read_text())["landscapes"])
    except FileNotFoundError:
        raise UserError(f"{path} does not exist; {expected}") from None
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(f"{path} is not a landscape file; {expected}") from None
    return {name: Landscape.from_document(document) for name, document in documents.items()}
