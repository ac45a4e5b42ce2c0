"""A common scale for several landscapes: levels, colours, and a note on clipped values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from fedflat.errors import UserError, one_of
from fedflat.flatness.landscapes.grid import Landscape, Values

LEVELS = 14
"""Default number of contour levels."""
TOP_QUANTILE = 0.98
"""Fraction of values below the top of the scale, so that steep corners do not use up all colours."""
BAR_SPACING = 0.08
"""Smallest distance of a tick of the colour bar from a clipped end, as a fraction of the bar."""
MAX_DECADES = 3
"""Maximum number of decades of a scale."""
BASIN = (
    (0.00, "#12355b"),
    (0.22, "#2a6f97"),
    (0.45, "#6fa8bf"),
    (0.68, "#bcd4d0"),
    (0.86, "#ece3cf"),
    (1.00, "#f7efe2"),
)
"""Colour map as (position, colour): low values are deep blue, high ones pale; lightness increases monotonically."""
NOT_FINITE = "#c9c4bd"
LABELS = {
    "train_loss": "training loss",
    "test_loss": "test loss",
    "train_error": "training error",
    "test_error": "test error",
    "train_accuracy": "training accuracy",
    "test_accuracy": "test accuracy",
}
AXIS_TITLES = {
    "around": ("direction 1 (filter norms)", "direction 2 (filter norms)"),
    "plane": ("x (distance in weight space)", "y (distance in weight space)"),
}
"""Titles of both axes with their units, by kind of landscape."""
LINE_TITLES = {
    "around": "distance along the direction, in filter norms",
    "path": "position on the path (0: first model, 1: second)",
}
"""Title of the axis of one-dimensional landscapes, by kind."""


@dataclass(frozen=True)
class LandscapeScale:
    """A scale for drawing landscapes: logarithmically spaced levels from ``low`` to ``high``.

    Values outside are clipped, i.e. drawn as the lowest or the highest level.
    """

    value: str
    """Name of the plotted quantity."""
    levels: tuple[float, ...]
    above: int
    """Number of finite values above the highest level."""
    below: int
    """Number of finite values below the lowest level."""
    not_finite: int
    """Number of values that are not finite."""
    total: int
    """Number of all values."""

    @classmethod
    def over(cls, landscapes: Iterable[Landscape], value: str, levels: int = LEVELS) -> LandscapeScale:
        """Choose a scale for all values of some landscapes.

        Args:
            landscapes: the landscapes to compare.
            value: name of the plotted quantity.
            levels: number of levels.
        """
        values = np.concatenate([grid_of(landscape, value).ravel() for landscape in landscapes])
        finite = values[np.isfinite(values)]
        if not len(finite):
            raise UserError(f"no value of {shown_value(value)} is finite; use a smaller radius")
        high = float(np.quantile(finite, TOP_QUANTILE))
        if high <= 0:  # e.g. if the error is 0 almost everywhere
            high = float(max(finite.max(), 1e-6))
        low = float(max(finite.min(), high * 10**-MAX_DECADES))
        if high < low * 1.05:  # values are nearly constant: widen the scale
            low, high = low / 1.1, high * 1.1
        above = int((finite > high * (1 + 1e-12)).sum())  # values that exceed an end only by rounding do not count
        below = int((finite < low * (1 - 1e-12)).sum())
        not_finite = len(values) - len(finite)
        level_values = tuple(np.geomspace(low, high, levels).tolist())
        return cls(value, level_values, above=above, below=below, not_finite=not_finite, total=len(values))

    @property
    def low(self) -> float:
        """The lowest level."""
        return self.levels[0]

    @property
    def high(self) -> float:
        """The highest level."""
        return self.levels[-1]

    @property
    def ticks(self) -> list[float]:
        """Round numbers within the scale: 1, 2 and 5 times powers of ten, or finer ones if those are too few.

        >>> LandscapeScale("train_loss", (0.09, 1.0, 6.0), 0, 0, 0, 9).ticks
        [0.1, 0.2, 0.5, 1.0, 2.0, 5.0]
        """
        lowest_power, highest_power = int(np.floor(np.log10(self.low))), int(np.ceil(np.log10(self.high)))
        powers = [10.0**power for power in range(lowest_power, highest_power + 1)]
        for digits in ((1.0, 2.0, 5.0), (1.0, 2.0, 3.0, 5.0), (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0)):
            ticks = [digit * power for power in powers for digit in digits if self._contains(digit * power)]
            if len(ticks) >= 3:
                return [round(tick, 12) for tick in ticks]
        # Evenly spaced for ranges below a factor of two: about five steps of 1, 2 or 5 times a power of ten.
        smallest_step = (self.high - self.low) / 5
        power = 10 ** np.floor(np.log10(smallest_step))
        step = next(digit * power for digit in (1, 2, 5, 10) if digit * power >= smallest_step)
        first = int(np.ceil(self.low / step))
        multiples = [number * step for number in range(first, first + 7)]
        return [round(float(tick), 12) for tick in multiples if self._contains(tick)]

    def _contains(self, value: float) -> bool:
        """Whether a value lies within the scale, up to rounding."""
        return self.low * 0.999 <= value <= self.high * 1.001

    @property
    def bar_labels(self) -> dict[float, str]:
        """Labels of a colour bar by value: the ticks, and the ends to which values were clipped, e.g. ``≥ 8.6``.

        >>> LandscapeScale("train_loss", (0.09, 1.0, 5.7), above=3, below=0, not_finite=0, total=9).bar_labels
        {0.1: '0.1', 0.2: '0.2', 0.5: '0.5', 1.0: '1', 2.0: '2', 5.7: '≥ 5.7'}
        """
        ends = [(self.high, "≥", self.above), (self.low, "≤", self.below)]
        clipped = {end: f"{sign} {shown_tick(float(f'{end:.3g}'), self.value)}" for end, sign, count in ends if count}
        nearest = (self.high / self.low) ** BAR_SPACING
        free = [tick for tick in self.ticks if all(max(tick / end, end / tick) > nearest for end in clipped)]
        return {tick: shown_tick(tick, self.value) for tick in free} | clipped

    def clipped(self, values: Values) -> Values:
        """Values clipped to the scale; NaN where not finite."""
        return np.where(np.isfinite(values), np.clip(values, self.low, self.high), np.nan)

    @property
    def notes(self) -> str:
        """A note on clipped and non-finite values; empty if there are none."""
        notes = []
        for count, where, end in ((self.above, "above", self.high), (self.below, "below", self.low)):
            if count:
                shown = shown_tick(float(f"{end:.3g}"), self.value)
                notes.append(f"{count} of {self.total} values {where} {shown} are drawn as {shown}")
        if self.not_finite:
            notes.append(f"{self.not_finite} of {self.total} values are not finite (grey)")
        return "; ".join(notes)

    @property
    def omitted(self) -> str:
        """A note on the values that lines omit because they are not finite; empty if there are none."""
        return f"{self.not_finite} of {self.total} values are not finite and omitted" if self.not_finite else ""


def grid_of(landscape: Landscape, value: str) -> Values:
    """Return the values of one quantity, [points] or [rows, columns]."""
    if value not in landscape.values:
        raise one_of("value in this landscape", value, landscape.values)
    return landscape.values[value]


def values_to_plot(landscape: Landscape) -> list[str]:
    """Return the default values to plot: the training loss and the task's test metric, if they were measured."""
    names = dict.fromkeys(("train_loss", landscape.test_metric))
    return [name for name in names if name in landscape.values]


def shown_value(value: str) -> str:
    """Return the label of a quantity."""
    return LABELS.get(value, value.replace("_", " "))


def label_with_unit(value: str) -> str:
    """Return the label of a quantity, with its unit."""
    return shown_value(value) + (" %" if value.endswith("error") else "")


def shown_tick(tick: float, value: str) -> str:
    """Format a tick; errors are in per cent.

    >>> shown_tick(0.05, "test_error"), shown_tick(0.05, "test_loss")
    ('5 %', '0.05')
    """
    return f"{100 * tick:g} %" if value.endswith("error") else f"{tick:g}"


def common_line(landscapes: Sequence[Landscape], scale: LandscapeScale) -> float:
    """Choose the value of a contour line that all landscapes have, so that the areas within it can be compared.

    It is the lowest tick clearly above all minima and below all maxima, or the middle of the scale if there is none.
    """
    grids = [scale.clipped(grid_of(landscape, scale.value)) for landscape in landscapes]
    highest_minimum = max(float(np.nanmin(grid)) for grid in grids)
    lowest_maximum = min(float(np.nanmax(grid)) for grid in grids)
    contained = [tick for tick in scale.ticks if highest_minimum * 1.3 < tick < lowest_maximum]
    return contained[0] if contained else float(np.sqrt(scale.low * scale.high))


def shown_line(line: float, scale: LandscapeScale) -> str:
    """Explain the bold contour line of all panels, e.g. ``bold line: training loss 0.5``."""
    return f"bold line: {shown_value(scale.value)} {shown_tick(float(f'{line:.3g}'), scale.value)}"
