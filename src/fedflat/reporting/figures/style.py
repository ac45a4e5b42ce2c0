"""Style and layout that figures share; free of matplotlib imports, so that reports can use it without figures."""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#1b6ca8", "#d1495b", "#edae49", "#00798c", "#7b4b94", "#66a182", "#8d6a4f", "#333333", "#e07be0", "#9aa0a6")


def colour_of(index: int) -> str:
    """Return the colour of a line; colours repeat after the last one."""
    return COLOURS[index % len(COLOURS)]


def evenly_spaced(count: int, most: int) -> np.ndarray:
    """Return at most ``most`` evenly spaced indices out of ``range(count)``, including both ends.

    >>> evenly_spaced(9, 3), evenly_spaced(2, 3)
    (array([0, 4, 8]), array([0, 1]))
    """
    return np.linspace(0, count - 1, min(count, most)).round().astype(int)


def sort_clients(counts: np.ndarray, most: int) -> np.ndarray:
    """Sort clients by their most frequent class, then by its share, and subsample them evenly.

    Args:
        counts: examples per client and class, [clients, classes].
        most: maximum number of clients to return.
    """
    share = counts.max(1) / np.maximum(counts.sum(1), 1)
    ordered = counts[np.lexsort((-share, counts.argmax(1)))]
    shown: np.ndarray = ordered[evenly_spaced(len(ordered), most)]
    return shown


def open_frame(axes: Axes, grid: float = 0.25) -> None:
    """Draw a faint grid (with this opacity) and remove the frame's upper and right sides."""
    axes.grid(alpha=grid)
    axes.spines[["top", "right"]].set_visible(False)


def subplot_list(figure: Figure, count: int, columns: int, **options: Any) -> list[Any]:
    """Add ``count`` subplots row by row, and hide the unused ones of the last row."""
    subplots = figure.subplots(ceil(count / columns), columns, squeeze=False, **options).ravel()
    for unused in subplots[count:]:
        unused.set_visible(False)
    return list(subplots[:count])
