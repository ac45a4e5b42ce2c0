"""Grouped bars of a table's measured numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from fedflat.reporting.figures.style import COLOURS, add_outer_legend, open_frame

WIDTH = 0.85
"""Width of a group of bars; groups are one unit apart."""
HATCHES = ("", "///", "...", "xxx")
"""Patterns of bars: colours repeat after eight bars, with the next pattern."""


def grouped_bars(
    columns: Sequence[str], rows: Mapping[str, Mapping[str, tuple[float, float | None]]], title: str
) -> Figure:
    """Draw one group of bars per column of a table, with one bar per row.

    Args:
        columns: labels of the columns.
        rows: by the label of a row and of a column, the mean over seeds and the standard deviation (None: one seed).
        title: title of the vertical axis.
    """
    figure = Figure(figsize=(2 + 1.4 * max(2, len(columns)), 4.2), layout="constrained")
    axes = figure.subplots()
    width = WIDTH / len(rows)
    for number, (label, values) in enumerate(rows.items()):
        places = [place for place, column in enumerate(columns) if column in values]
        offsets = [place + (number + 0.5) * width - WIDTH / 2 for place in places]
        means, spreads = zip(*(values[columns[place]] for place in places), strict=True)
        errors = [spread or 0.0 for spread in spreads] if any(spreads) else None
        repeat, colour = divmod(number, len(COLOURS))
        look: dict[str, Any] = {
            "color": COLOURS[colour],
            "hatch": HATCHES[repeat % len(HATCHES)],
            "edgecolor": "white",
            "lw": 0,
        }
        axes.bar(offsets, means, width, yerr=errors, label=label, **look)
    axes.set_xticks(range(len(columns)), columns)
    axes.set_ylabel(title)
    open_frame(axes)
    add_outer_legend(figure, ncols=3)
    return figure
