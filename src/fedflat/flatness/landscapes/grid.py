"""Landscapes as values on a grid in weight space, and their evaluation with one model in memory at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedflat.display import html_table
from fedflat.errors import UserError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Kind = Literal["around", "plane", "path"]
Values = npt.NDArray[np.float64]
FORMAT = 1
"""Version of the JSON format."""
FETCH_EVERY = 32
"""Models evaluated between transfers to the CPU: many, so that the GPU seldom waits, but few enough for progress."""


class Model(NamedTuple):
    """A point of a landscape: flat weights [P] and flat floating-point buffers (e.g. BatchNorm statistics)."""

    weights: Tensor
    """All weights as one flat vector, [P]."""
    buffers: Tensor
    """All floating-point buffers as one flat vector; empty if the model has none."""


Measure = Callable[[Model], Mapping[str, Tensor]]
"""Maps a model to scalar tensors by name, on the model's device."""
Progress = Callable[[int, int], None]
"""Called with (models evaluated, total)."""


MAX_GRID = 1_000_000
"""Largest number of models that a landscape evaluates."""


def check_grid_size(models: int) -> None:
    """Raise a ``UserError`` if there are too many points to evaluate."""
    if models > MAX_GRID:
        raise UserError(
            f"this landscape has {models} points, each a model to evaluate: at 10 ms each they take "
            f"{models / 8_640_000:,.1f} days; expected at most {MAX_GRID}; lower points"
        )


def silent(done: int, total: int) -> None:
    """Report no progress."""


@dataclass(frozen=True)
class Mark:
    """A model that is marked in a landscape, with its position."""

    name: str
    """Name of the model."""
    position: tuple[float, ...]
    """Coordinates of the model, one per axis."""
    distance: float = 0.0
    """Distance of the model from the plane onto which it was projected; 0 for a model in the plane."""
    values: dict[str, float] = field(default_factory=dict)
    """Values measured at the model itself, which need not lie on a grid point."""


@dataclass(frozen=True, repr=False)
class Landscape:
    """Losses or other values of models on a line or a grid in weight space.

    ``values[name][i, j]`` is measured at the grid point ``(axes[0][i], axes[1][j])``. ``marks`` are the models shown in
    the landscape.
    """

    kind: Kind
    """Kind of landscape: ``around`` a model, on a ``plane`` through three models, or on a ``path`` between two."""
    axes: tuple[tuple[float, ...], ...]
    """Coordinates of the grid points along each axis."""
    values: dict[str, Values]
    """Values of each quantity, e.g. ``train_loss``, as an array with one dimension per axis."""
    marks: tuple[Mark, ...] = ()
    """Models that are marked in the landscape."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """How the landscape was computed: names, seed, radius, number of examples and more."""

    @property
    def test_metric(self) -> str:
        """Name of the quantity that holds the task's metric on the test set, e.g. ``test_error`` or ``test_rmse``."""
        return list(self.values)[-1]  # measurements store it last

    def __repr__(self) -> str:
        ranges = [f"{name} {low} to {high}" for name, low, high in self._ranges()]
        return f"Landscape({self._title()}: {', '.join(ranges)})"

    def _repr_html_(self) -> str:
        return html_table(f"Landscape {self._title()}", ("value", "lowest", "highest"), self._ranges())

    def _title(self) -> str:
        """Describe the kind of landscape, its models and the number of grid points."""
        models = ", ".join(mark.name for mark in self.marks)
        points = " x ".join(str(len(axis)) for axis in self.axes)
        return f"{self.kind} {models}, {points} points"

    def _ranges(self) -> list[tuple[str, str, str]]:
        """Return the name, the lowest and the highest finite value of each quantity, as strings."""
        ranges = []
        for name, values in self.values.items():
            finite = values[np.isfinite(values)]
            ends = (f"{finite.min():.4g}", f"{finite.max():.4g}") if len(finite) else ("nan", "nan")
            ranges.append((name, *ends))
        return ranges

    def plot(self, value: str | None = None) -> Figure:
        """Draw the landscape: contours or a line around a model, a plane through models, or a path between two.

        Args:
            value: name of the value to draw, e.g. ``test_error``; default: the loss and, on planes and paths, also
                the error.
        """
        from fedflat.reporting.figures.landscapes import landscape_picture

        return landscape_picture(self, value)

    @property
    def dimensions(self) -> int:
        """Number of axes: 1 for a line, 2 for a plane."""
        return len(self.axes)

    def at(self, name: str, *position: float) -> float:
        """Return the value of a quantity at the grid point nearest to a position.

        Args:
            name: key of ``values``, such as ``loss``.
            position: one coordinate per axis.
        """
        nearest = tuple(int(np.abs(np.array(axis) - x).argmin()) for axis, x in zip(self.axes, position, strict=True))
        return float(self.values[name][nearest])

    def not_finite(self, name: str) -> int:
        """Return the number of infinite or NaN values of a quantity."""
        return int((~np.isfinite(self.values[name])).sum())

    def with_metadata(self, **metadata: Any) -> Landscape:
        """Return a copy with further entries in ``metadata``."""
        return replace(self, metadata={**self.metadata, **metadata})

    def document(self) -> dict[str, Any]:
        """Return the landscape as JSON-compatible values; non-finite numbers become the strings nan, inf and -inf.

        In the file, a mark has its position ``at`` and its distance ``off`` the plane, and ``made`` is the metadata.
        """
        marks = [
            {
                "name": mark.name,
                "at": list(mark.position),
                "off": mark.distance,
                "values": {name: _to_json(value) for name, value in mark.values.items()},
            }
            for mark in self.marks
        ]
        return {
            "format": FORMAT,
            "kind": self.kind,
            "axes": [list(axis) for axis in self.axes],
            "values": {name: _to_json(values.tolist()) for name, values in self.values.items()},
            "marks": marks,
            "made": self.metadata,
        }

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Landscape:
        """Read a landscape from the JSON-compatible dictionary that ``Landscape.document()`` returned.

        Raises a ``UserError`` for anything else.
        """
        try:
            if document["format"] != FORMAT:
                raise UserError(
                    f"this landscape has format {document['format']}; this version reads {FORMAT}, so recompute it"
                )
            axes = tuple(tuple(float(x) for x in axis) for axis in document["axes"])
            # numpy also parses the strings nan, inf and -inf.
            values = {name: np.array(grid, dtype=np.float64) for name, grid in document["values"].items()}
            if any(grid.shape != tuple(map(len, axes)) for grid in values.values()):
                raise ValueError("axes and values differ in shape")
            marks = []
            for mark in document["marks"]:
                mark_values = {name: float(value) for name, value in mark["values"].items()}
                marks.append(Mark(mark["name"], tuple(mark["at"]), float(mark["off"]), mark_values))
            return cls(document["kind"], axes, values, tuple(marks), dict(document["made"]))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UserError(
                f"not a fedflat landscape ({error}); "
                "expected a file written by fedflat flatness landscape, plane or path"
            ) from None


def _to_json(value: Any) -> Any:
    """Replace non-finite numbers in nested lists by strings, which JSON can represent."""
    if isinstance(value, list):
        return [_to_json(item) for item in value]
    return value if math.isfinite(value) else str(value)


def evaluate_models(
    measure: Measure, models: Iterable[Model], total: int, progress: Progress = silent
) -> dict[str, Values]:
    """Evaluate ``measure`` on every model and return its values by name, each [models].

    Measurements stay on the device and are transferred in groups, because every transfer waits for the GPU.

    Args:
        measure: maps a model to scalar tensors.
        models: may be a generator, so that only one model is in memory.
        total: number of models.
        progress: called with (models evaluated, total) after each transfer.
    """
    fetched: list[Values] = []
    on_device: list[Tensor] = []
    names: tuple[str, ...] = ()  # known after the first model
    with torch.no_grad():
        for done, model in enumerate(models, 1):
            values = measure(model)
            names = names or tuple(values)
            on_device.append(torch.stack([values[name].double() for name in names]))
            if len(on_device) == FETCH_EVERY or done == total:
                fetched.append(torch.stack(on_device).cpu().numpy())
                on_device.clear()
                progress(done, total)
    table = np.concatenate(fetched) if fetched else np.zeros((0, 0))
    return {name: table[:, column] for column, name in enumerate(names)}


def measure_marks(measure: Measure, marks: Sequence[Mark], models: Iterable[Model]) -> tuple[Mark, ...]:
    """Return ``marks`` with the measurements of their models filled in.

    Args:
        measure: maps a model to scalar tensors by name.
        marks: positions of models in a landscape.
        models: their models, in the same order.
    """
    values = evaluate_models(measure, models, len(marks))
    return tuple(
        replace(mark, values={name: float(column[row]) for name, column in values.items()})
        for row, mark in enumerate(marks)
    )
