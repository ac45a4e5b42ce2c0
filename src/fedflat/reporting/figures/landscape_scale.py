"""A common scale for several landscapes: levels, colours, and a note on clipped values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from fedflat.errors import UserError, one_of
from fedflat.flatness.landscapes.grid import Landscape, Values

LEVELS = 14
HIGHEST_SHARE = 0.98
"""Fraction of values below the top of the scale, so that steep corners do not use up all colours."""
MOST_TENFOLDS = 3
"""Maximum number of decades of a scale."""
BASIN = (
    (0.00, "#12355b"),
    (0.22, "#2a6f97"),
    (0.45, "#6fa8bf"),
    (0.68, "#bcd4d0"),
    (0.86, "#ece3cf"),
    (1.00, "#f7efe2"),
)
"""Low is deep blue, high is pale; lightness increases monotonically."""
NOT_FINITE = "#c9c4bd"
SHOWN = {
    "train_loss": "training loss",
    "test_loss": "test loss",
    "train_error": "training error",
    "test_error": "test error",
    "train_accuracy": "training accuracy",
    "test_accuracy": "test accuracy",
}


@dataclass(frozen=True)
class LandscapeScale:
    """Logarithmically spaced levels; larger values are drawn as the highest level."""

    value: str
    levels: tuple[float, ...]
    cut_off: int
    """Number of finite values above the highest level."""
    not_finite: int
    total: int

    @classmethod
    def over(cls, landscapes: Iterable[Landscape], value: str, levels: int = LEVELS) -> LandscapeScale:
        """The scale of all values of some landscapes."""
        grids = [grid_of(landscape, value) for landscape in landscapes]
        everything = np.concatenate([grid.ravel() for grid in grids])
        finite = everything[np.isfinite(everything)]
        if not len(finite):
            raise UserError(f"no value of {shown_value(value)} is finite; use a smaller radius")
        high = float(np.quantile(finite, HIGHEST_SHARE))
        high = high if high > 0 else float(max(finite.max(), 1e-6))
        low = float(max(finite.min(), high * 10**-MOST_TENFOLDS))
        if high < low * 1.05:  # nearly constant
            low, high = low / 1.1, high * 1.1
        return cls(
            value,
            tuple(float(level) for level in np.geomspace(low, high, levels)),
            int((finite > high * (1 + 1e-12)).sum()),
            int(len(everything) - len(finite)),
            len(everything),
        )

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

        >>> LandscapeScale("train_loss", (0.09, 1.0, 6.0), 0, 0, 9).ticks
        [0.1, 0.2, 0.5, 1.0, 2.0, 5.0]
        """
        tens = [
            10.0**power for power in range(int(np.floor(np.log10(self.low))), int(np.ceil(np.log10(self.high))) + 1)
        ]
        for digits in ((1.0, 2.0, 5.0), (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0)):
            found = [round(digit * ten, 12) for ten in tens for digit in digits if self._holds(digit * ten)]
            if len(found) >= 3:
                return found
        # Evenly spaced for ranges below a factor of two.
        rough = (self.high - self.low) / 5
        step = next(
            digit * 10 ** np.floor(np.log10(rough))
            for digit in (1, 2, 5, 10)
            if digit * 10 ** np.floor(np.log10(rough)) >= rough
        )
        first = int(np.ceil(self.low / step))
        return [round(float(number * step), 12) for number in range(first, first + 7) if self._holds(number * step)]

    def _holds(self, value: float) -> bool:
        return self.low * 0.999 <= value <= self.high * 1.001

    def clipped(self, values: Values) -> Values:
        """Values clipped to the scale; NaN where not finite."""
        return np.where(np.isfinite(values), np.clip(values, self.low, self.high), np.nan)

    @property
    def notes(self) -> str:
        """A note on clipped and non-finite values; empty if there are none."""
        said = []
        if self.cut_off:
            high = shown_tick(float(f"{self.high:.3g}"), self.value)
            said.append(f"{self.cut_off} of {self.total} values above {high} are drawn as {high}")
        if self.not_finite:
            said.append(f"{self.not_finite} of {self.total} values are not finite (grey)")
        return "; ".join(said)


def grid_of(landscape: Landscape, value: str) -> Values:
    """The values of one quantity."""
    if value not in landscape.values:
        raise one_of("value in this landscape", value, landscape.values)
    return landscape.values[value]


def shown_value(value: str) -> str:
    """The label of a quantity."""
    return SHOWN.get(value, value.replace("_", " "))


def shown_tick(tick: float, value: str) -> str:
    """A tick label; errors are in percent.

    >>> shown_tick(0.05, "test_error"), shown_tick(0.05, "test_loss")
    ('5 %', '0.05')
    """
    return f"{100 * tick:g} %" if value.endswith("error") else f"{tick:g}"


def common_line(landscapes: Sequence[Landscape], scale: LandscapeScale) -> float:
    """A level for comparison: the round number contained in most landscapes, the lowest above all centres."""
    centres = [float(np.nanmin(scale.clipped(grid_of(landscape, scale.value)))) for landscape in landscapes]
    edges = [float(np.nanmax(scale.clipped(grid_of(landscape, scale.value)))) for landscape in landscapes]
    inside = [tick for tick in scale.ticks if max(centres) * 1.3 < tick < min(edges)]
    return inside[0] if inside else float(np.sqrt(scale.low * scale.high))
