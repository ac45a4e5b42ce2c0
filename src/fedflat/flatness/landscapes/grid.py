"""Many models measured one after another, with the memory of one; and what came of it, as plain numbers with their axes."""

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
AT_ONCE = 32
"""Models that are measured before their figures are fetched: a GPU need not wait for the host in between, and progress is still seen."""


class Model(NamedTuple):
    """A model as it is measured: its flat weights and its floating buffers, BatchNorm's running statistics for instance."""

    weights: Tensor
    buffers: Tensor


Measure = Callable[[Model], Mapping[str, Tensor]]
"""What is measured of a model: scalars by name, left on the model's device."""
Tell = Callable[[int, int], None]
"""Told how many of how many models have been measured."""


def silent(done: int, total: int) -> None:
    """Tell nobody."""


@dataclass(frozen=True)
class Mark:
    """A model's place in a landscape; ``off`` is its distance from the plane, where it does not lie in it."""

    name: str
    at: tuple[float, ...]
    off: float = 0.0
    values: dict[str, float] = field(default_factory=dict)
    """What was measured of the model itself, which need not lie on a point of the grid."""


@dataclass(frozen=True)
class Landscape:
    """Figures on a line or a grid: ``values[name][i, j]`` is at ``(axes[0][i], axes[1][j])``."""

    kind: Kind
    axes: tuple[tuple[float, ...], ...]
    values: dict[str, Values]
    marks: tuple[Mark, ...] = ()
    made: dict[str, Any] = field(default_factory=dict)
    """How it was made: names, seed, radius, examples and whatever else is needed to make it again."""

    @property
    def dimensions(self) -> int:
        """1 for a line, 2 for a plane."""
        return len(self.axes)

    def at(self, name: str, *position: float) -> float:
        """The value at the grid point nearest to a position."""
        nearest = tuple(int(np.abs(np.array(axis) - x).argmin()) for axis, x in zip(self.axes, position, strict=True))
        return float(self.values[name][nearest])

    def not_finite(self, name: str) -> int:
        """How many of the values are infinite or not a number."""
        return int((~np.isfinite(self.values[name])).sum())

    def named(self, **made: Any) -> Landscape:
        """The same with more said of how it was made."""
        return replace(self, made={**self.made, **made})

    # --- as plain values ---------------------------------------------------------------------------------------------------------

    def document(self) -> dict[str, Any]:
        """Everything as values that JSON knows; numbers that are not finite are the words nan, inf and -inf."""
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
        """What ``document`` wrote."""
        try:
            if document["format"] != FORMAT:
                raise UserError(
                    f"this landscape has format {document['format']}, but this version reads format {FORMAT}; compute it anew"
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
                f"this is no landscape of fedflat ({error}); expected what fedflat flatness landscape, plane or path wrote"
            ) from None


def survey(
    measure: Measure, models: Iterable[Model], total: int, tell: Tell = silent, at_once: int = AT_ONCE
) -> dict[str, Values]:
    """Measure models one after another; figures stay on the device and are fetched ``at_once`` at a time."""
    rows: list[Values] = []
    waiting: list[Tensor] = []
    names: tuple[str, ...] = ()

    def fetch() -> None:
        if waiting:
            rows.append(torch.stack(waiting).double().cpu().numpy())
            waiting.clear()

    with torch.no_grad():
        for done, model in enumerate(models, 1):
            found = measure(model)
            names = names or tuple(found)
            waiting.append(torch.stack([found[name].double() for name in names]))
            if len(waiting) == at_once or done == total:
                fetch()
                tell(done, total)
    fetch()
    table = np.concatenate(rows) if rows else np.zeros((0, 0))
    return {name: table[:, column] for column, name in enumerate(names)}


def with_values(measure: Measure, marks: Iterable[Mark], models: Iterable[Model]) -> tuple[Mark, ...]:
    """Marks with what is measured of their models themselves."""
    placed = tuple(marks)
    found = survey(measure, models, len(placed))
    return tuple(
        replace(mark, values={name: float(some[n]) for name, some in found.items()}) for n, mark in enumerate(placed)
    )


def _written(value: Any) -> Any:
    if isinstance(value, list):
        return [_written(inside) for inside in value]
    return value if math.isfinite(value) else str(value)


def _read(value: Any) -> Any:
    return [_read(inside) for inside in value] if isinstance(value, list) else float(value)
