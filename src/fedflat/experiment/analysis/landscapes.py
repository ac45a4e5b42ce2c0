"""Landscapes of models of runs: around each, on the plane through three, on the way from one to another; and their files."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedflat.errors import UserError
from fedflat.experiment.analysis.loss_and_error import LossAndError, Statistics
from fedflat.experiment.analysis.measured import Measured
from fedflat.experiment.store.atomic_files import create_folder, write_whole
from fedflat.flatness.landscapes.directions import OneDimensional
from fedflat.flatness.landscapes.grid import Landscape, Model, Progress, silent
from fedflat.flatness.landscapes.landscape import landscape_around
from fedflat.flatness.landscapes.path import path_landscape
from fedflat.flatness.landscapes.plane import plane_landscape
from fedflat.flatness.landscapes.points import require_same_shapes


def landscapes(
    models: Sequence[Measured],
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
    """The landscape around each model, in directions from the same random numbers and on the same examples, by name."""
    chosen = _names(models, names)
    _one_data_set(models, chosen)
    total, found = len(models) * points**dimensions, {}
    for number, (name, model) in enumerate(zip(chosen, models, strict=True)):
        measure = LossAndError(model.problem, model.partition, model.state.integers, examples=examples, seed=seed)
        found[name] = landscape_around(
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
        ).named(model=model.label, **_about(model, measure))
    return found


def plane(
    models: Sequence[Measured],
    *,
    points: int = 41,
    margin: float = 0.25,
    examples: int | None = None,
    seed: int = 0,
    statistics: Statistics = "interpolated",
    names: Sequence[str] = (),
    progress: Progress = silent,
) -> Landscape:
    """The plane through the first three models; further ones are marked where they are nearest to it. Data are the first model's."""
    measure, flat = _common(models, _names(models, names), "one plane", examples, seed, statistics)
    found = plane_landscape(flat, measure, points=points, margin=margin, progress=progress)
    return found.named(models=[model.label for model in models], statistics=statistics, **_about(models[0], measure))


def path(
    models: Sequence[Measured],
    *,
    points: int = 41,
    beyond: float = 0.0,
    examples: int | None = None,
    seed: int = 0,
    statistics: Statistics = "interpolated",
    names: Sequence[str] = (),
    progress: Progress = silent,
) -> Landscape:
    """The way from one model to another. Data are the first model's."""
    measure, flat = _common(models, _names(models, names), "one path", examples, seed, statistics)
    found = path_landscape(flat, measure, points=points, beyond=beyond, progress=progress)
    return found.named(models=[model.label for model in models], statistics=statistics, **_about(models[0], measure))


# --- files -----------------------------------------------------------------------------------------------------------------------


def save_landscapes(path: Path, found: Mapping[str, Landscape]) -> None:
    """Write landscapes into one JSON file, whole or not at all."""
    create_folder(path.parent)
    write_whole(
        path, json.dumps({"landscapes": {name: one.document() for name, one in found.items()}}, allow_nan=False) + "\n"
    )


def load_landscapes(path: Path) -> dict[str, Landscape]:
    """What ``save_landscapes`` wrote."""
    try:
        documents = dict(json.loads(path.read_text())["landscapes"])
    except FileNotFoundError:
        raise UserError(
            f"there is no file {path}; expected one that fedflat flatness landscape, plane or path wrote"
        ) from None
    except (ValueError, KeyError, TypeError):
        raise UserError(
            f"{path} is no file of landscapes; expected one that fedflat flatness landscape, plane or path wrote"
        ) from None
    return {name: Landscape.from_document(document) for name, document in documents.items()}


# --- small things ----------------------------------------------------------------------------------------------------------------


def _common(
    models: Sequence[Measured],
    names: Sequence[str],
    where: str,
    examples: int | None,
    seed: int,
    statistics: Statistics,
) -> tuple[LossAndError, dict[str, Model]]:
    require_same_shapes({name: model.problem.whole_layout for name, model in zip(names, models, strict=True)}, where)
    _one_data_set(models, names)
    first = models[0]
    measure = LossAndError(
        first.problem, first.partition, first.state.integers, examples=examples, seed=seed, statistics=statistics
    )
    return measure, {name: _flat(model) for name, model in zip(names, models, strict=True)}


def _names(models: Sequence[Measured], names: Sequence[str]) -> list[str]:
    chosen = list(names) or [model.label for model in models]
    for name in chosen:
        if chosen.count(name) > 1:
            raise UserError(f"{name} is listed twice; list each model once")
    return chosen


def _one_data_set(models: Sequence[Measured], names: Sequence[str]) -> None:
    """Refuse models of different datasets, whose losses cannot share a scale."""
    for name, model in zip(names, models, strict=True):
        mine, first = model.record.config.data.dataset, models[0].record.config.data.dataset
        if mine != first:
            raise UserError(
                f"{names[0]} was trained on {first} and {name} on {mine}; their losses cannot be compared on one scale"
            )


def _flat(model: Measured) -> Model:
    return Model(model.state.weights, model.state.buffers)


def _about(model: Measured, measure: LossAndError) -> dict[str, Any]:
    config = model.record.config
    return {
        "data": config.data.dataset,
        "architecture": config.model,
        "examples": measure.counts,
        "precision": str(model.problem.dtype)[6:],
    }


def _part(progress: Progress, before: int, total: int) -> Callable[[int, int], None]:
    return lambda done, _: progress(before + done, total)
