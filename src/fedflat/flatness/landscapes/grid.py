"""Landscapes as numbers on a grid, and the evaluation of many models with the memory of one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedflat.errors import UserError

Kind = Literal["around", "plane", "path"]
Values = npt.NDArray[np.float64]
FORMAT = 1
FETCH_EVERY = 32
"""Models evaluated between transfers to the host, so that the GPU does not wait and progress stays visible."""


class Model(NamedTuple):
    """A point of a landscape: flat weights [P] and flat floating-point buffers (e.g. BatchNorm statistics)."""

    weights: Tensor
    buffers: Tensor


Measure = Callable[[Model], Mapping[str, Tensor]]
"""Maps a model to scalar tensors by name, on the model's device."""
Progress = Callable[[int, int], None]
"""Called with (models evaluated, total)."""


def silent(done: int, total: int) -> None:
    """Report no progress."""


@dataclass(frozen=True)
class Mark:
    """A model's position in a landscape; ``off`` is its distance from the plane."""

    name: str
    at: tuple[float, ...]
    off: float = 0.0
    values: dict[str, float] = field(default_factory=dict)
    """Measurements of the model itself, which need not lie on a grid point."""


@dataclass(frozen=True)
class Landscape:
    """Values on a line or a grid: ``values[name][i, j]`` belongs to ``(axes[0][i], axes[1][j])``."""

    kind: Kind
    axes: tuple[tuple[float, ...], ...]
    values: dict[str, Values]
    marks: tuple[Mark, ...] = ()
    made: dict[str, Any] = field(default_factory=dict)
    """How it was computed: names, seed, radius, number of examples, ..."""

    @property
    def dimensions(self) -> int:
        """1 for a line, 2 for a plane."""
        return len(self.axes)

    def at(self, name: str, *position: float) -> float:
        """The value at the grid point nearest to a position."""
        nearest = tuple(int(np.abs(np.array(axis) - x).argmin()) for axis, x in zip(self.axes, position, strict=True))
        return float(self.values[name][nearest])

    def not_finite(self, name: str) -> int:
        """Number of infinite or NaN values."""
        return int((~np.isfinite(self.values[name])).sum())

    def named(self, **made: Any) -> Landscape:
        """A copy with further entries in ``made``."""
        return replace(self, made={**self.made, **made})

    def document(self) -> dict[str, Any]:
        """JSON-compatible values; non-finite numbers become the strings nan, inf and -inf."""
        return {
            "format": FORMAT,
            "kind": self.kind,
            "axes": [list(axis) for axis in self.axes],
            "values": {name: _written(values.tolist()) for name, values in self.values.items()},
            "marks": [
                {
                    "name": mark.name,
                    "at": list(mark.at),
                    "off": mark.off,
                    "values": {key: _written(v) for key, v in mark.values.items()},
                }
                for mark in self.marks
            ],
            "made": self.made,
        }

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Landscape:
        """The landscape that ``document`` describes."""
        try:
            if document["format"] != FORMAT:
                raise UserError(
                    f"this landscape has format {document['format']}; this version reads {FORMAT}, so recompute it"
                )
            axes = tuple(tuple(float(x) for x in axis) for axis in document["axes"])
            values = {name: np.array(_read(grid), dtype=np.float64) for name, grid in document["values"].items()}
            marks = tuple(
                Mark(
                    mark["name"],
                    tuple(mark["at"]),
                    float(mark["off"]),
                    {key: float(v) for key, v in mark["values"].items()},
                )
                for mark in document["marks"]
            )
            if any(grid.shape != tuple(map(len, axes)) for grid in values.values()):
                raise ValueError("axes and values differ in shape")
            return cls(document["kind"], axes, values, marks, dict(document["made"]))
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"not a fedflat landscape ({error}); "
                "expected a file written by fedflat flatness landscape, plane or path"
            ) from None


def evaluate_models(
    measure: Measure, models: Iterable[Model], total: int, progress: Progress = silent, fetch_every: int = FETCH_EVERY
) -> dict[str, Values]:
    """Evaluate ``measure`` on every model; values stay on the device and are fetched in groups."""
    rows: list[Values] = []
    waiting: list[Tensor] = []
    names: tuple[str, ...] = ()

    def fetch() -> None:
        if waiting:
            rows.append(torch.stack(waiting).double().cpu().numpy())
            waiting.clear()

    with torch.no_grad():
        for done, model in enumerate(models, 1):
            values = measure(model)
            names = names or tuple(values)
            waiting.append(torch.stack([values[name].double() for name in names]))
            if len(waiting) == fetch_every or done == total:
                fetch()
                progress(done, total)
    fetch()
    table = np.concatenate(rows) if rows else np.zeros((0, 0))
    return {name: table[:, column] for column, name in enumerate(names)}


def with_values(measure: Measure, marks: Iterable[Mark], models: Iterable[Model]) -> tuple[Mark, ...]:
    """``marks`` with the measurements of their models."""
    placed = tuple(marks)
    values = evaluate_models(measure, models, len(placed))
    return tuple(
        replace(mark, values={name: float(column[n]) for name, column in values.items()})
        for n, mark in enumerate(placed)
    )


def _written(value: Any) -> Any:
    if isinstance(value, list):
        return [_written(inside) for inside in value]
    return value if math.isfinite(value) else str(value)


def _read(value: Any) -> Any:
    return [_read(inside) for inside in value] if isinstance(value, list) else float(value)
