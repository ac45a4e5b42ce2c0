"""Landscapes of models of runs (around a model, on a plane, along a path) and their files."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedflat.errors import UserError
from fedflat.experiment.analysis.loss_and_error import LossAndError, Statistics
from fedflat.experiment.analysis.run_model import RunModel
from fedflat.experiment.store.files import create_folder, write_whole
from fedflat.flatness.landscapes.directions import OneDimensional
from fedflat.flatness.landscapes.grid import Landscape, Model, Progress, silent
from fedflat.flatness.landscapes.landscape import landscape_around
from fedflat.flatness.landscapes.path import path_landscape
from fedflat.flatness.landscapes.plane import plane_landscape
from fedflat.flatness.landscapes.points import require_same_shapes


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
    """The landscape around each model, by name; all share random directions and examples."""
    chosen = _names(models, names)
    _require_same_dataset(models, chosen)
    total, grids = len(models) * points**dimensions, {}
    for number, (name, model) in enumerate(zip(chosen, models, strict=True)):
        measure = LossAndError(model.problem, model.partition, model.state.integers, examples=examples, seed=seed)
        grids[name] = landscape_around(
            model.problem.layout,
            _flat(model),
            measure,
            name=name,
            dimensions=dimensions,
            radius=radius,
            points=points,
            seed=seed,
            one_dimensional=one_dimensional,
            progress=_part(progress, number * points**dimensions, total),
        ).with_metadata(model=model.label, **_about(model, measure))
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
    """The plane through the first three models, on the first model's data; further models are projected onto it."""
    measure, flat = _common(models, _names(models, names), "one plane", examples, seed, statistics)
    grid = plane_landscape(flat, measure, points=points, margin=margin, progress=progress)
    labels = [model.label for model in models]
    return grid.with_metadata(models=labels, statistics=statistics, **_about(models[0], measure))


def path(
    models: Sequence[RunModel],
    *,
    points: int = 41,
    beyond: float = 0.0,
    examples: int | None = None,
    seed: int = 0,
    statistics: Statistics = "interpolated",
    names: Sequence[str] = (),
    progress: Progress = silent,
) -> Landscape:
    """The straight line between two models, on the first model's data."""
    measure, flat = _common(models, _names(models, names), "one path", examples, seed, statistics)
    grid = path_landscape(flat, measure, points=points, beyond=beyond, progress=progress)
    labels = [model.label for model in models]
    return grid.with_metadata(models=labels, statistics=statistics, **_about(models[0], measure))


def save_landscapes(path: Path, grids: Mapping[str, Landscape]) -> None:
    """Write landscapes to one JSON file, atomically."""
    create_folder(path.parent)
    write_whole(
        path,
        json.dumps({"landscapes": {name: grid.document() for name, grid in grids.items()}}, allow_nan=False) + "\n",
    )


def load_landscapes(path: Path) -> dict[str, Landscape]:
    """Read a file written by ``save_landscapes``."""
    try:
        documents = dict(json.loads(path.read_text())["landscapes"])
    except FileNotFoundError:
        raise UserError(
            f"{path} does not exist; expected a file written by fedflat flatness landscape, plane or path"
        ) from None
    except (ValueError, KeyError, TypeError):
        raise UserError(
            f"{path} is not a landscape file; expected a file written by fedflat flatness landscape, plane or path"
        ) from None
    return {name: Landscape.from_document(document) for name, document in documents.items()}


def _common(
    models: Sequence[RunModel],
    names: Sequence[str],
    where: str,
    examples: int | None,
    seed: int,
    statistics: Statistics,
) -> tuple[LossAndError, dict[str, Model]]:
    require_same_shapes({name: model.problem.whole_layout for name, model in zip(names, models, strict=True)}, where)
    _require_same_dataset(models, names)
    first = models[0]
    measure = LossAndError(
        first.problem, first.partition, first.state.integers, examples=examples, seed=seed, statistics=statistics
    )
    return measure, {name: _flat(model) for name, model in zip(names, models, strict=True)}


def _names(models: Sequence[RunModel], names: Sequence[str]) -> list[str]:
    chosen = list(names) or [model.label for model in models]
    for name in chosen:
        if chosen.count(name) > 1:
            raise UserError(f"{name} is listed twice; list each model once")
    return chosen


def _require_same_dataset(models: Sequence[RunModel], names: Sequence[str]) -> None:
    """Reject models of different datasets, whose losses are not comparable."""
    for name, model in zip(names, models, strict=True):
        mine, first = model.record.config.data.dataset, models[0].record.config.data.dataset
        if mine != first:
            raise UserError(
                f"{names[0]} was trained on {first}, {name} on {mine}; losses of different datasets are not comparable"
            )


def _flat(model: RunModel) -> Model:
    return Model(model.state.weights, model.state.buffers)


def _about(model: RunModel, measure: LossAndError) -> dict[str, Any]:
    config = model.record.config
    return {
        "data": config.data.dataset,
        "architecture": config.model,
        "examples": measure.counts,
        "precision": str(model.problem.dtype)[6:],
    }


def _part(progress: Progress, before: int, total: int) -> Callable[[int, int], None]:
    return lambda done, _: progress(before + done, total)
