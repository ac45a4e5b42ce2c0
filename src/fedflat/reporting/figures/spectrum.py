"""Figure of spectra: the largest eigenvalues in order, and the density if available."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator

from fedflat.flatness import Spectrum
from fedflat.reporting.figures.curves import COLOURS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LOWEST = 0.1
"""Lower end of the density axis, relative to a single eigenvalue's contribution."""


def spectrum_picture(found: Mapping[str, Sequence[Spectrum]]) -> Figure:
    """One line per model; for several subsets, the mean and one standard deviation."""
    known = {name: spectra for name, spectra in found.items() if all(one.density for one in spectra)}
    highest = 0.0
    figure = Figure(figsize=(11.0 if known else 6.4, 4.4), layout="constrained")
    axes = figure.subplots(1, 2 if known else 1, squeeze=False)[0]
    for number, (name, spectra) in enumerate(found.items()):
        _eigenvalues(axes[0], name, spectra, COLOURS[number % len(COLOURS)])
        if name in known:
            highest = max(highest, _density(axes[1], name, spectra, COLOURS[number % len(COLOURS)]))
    axes[0].set_xlabel("eigenvalues of the Hessian, largest first")
    axes[0].xaxis.set_major_locator(MaxNLocator(integer=True))
    if all(value > 0 for spectra in found.values() for one in spectra for value in one.eigenvalues):
        axes[0].set_yscale("log")
        axes[0].yaxis.set_minor_locator(LogLocator(subs=(2, 5)))
        for plainly in (axes[0].yaxis.set_major_formatter, axes[0].yaxis.set_minor_formatter):
            plainly(FuncFormatter(lambda value, _: f"{value:g}"))
    else:
        axes[0].axhline(0, color="#999999", lw=0.8)
    if known:
        axes[1].set_yscale("log")
        axes[1].set_ylim(LOWEST * min(_of_one(one) for spectra in known.values() for one in spectra), 3 * highest)
        axes[1].set_xlabel("eigenvalue")
        axes[1].set_ylabel("density")
    for one in axes:
        one.grid(alpha=0.25)
        one.spines[["top", "right"]].set_visible(False)
    axes[0].legend(frameon=False, fontsize=9, title="lambda_max", alignment="right", title_fontsize=9)
    return figure


def _eigenvalues(axes: Axes, name: str, spectra: Sequence[Spectrum], colour: str) -> None:
    values = np.array([one.eigenvalues for one in spectra])
    mean, places = values.mean(0), np.arange(1, values.shape[1] + 1)
    axes.plot(places, mean, color=colour, lw=1.6, marker=".", ms=5, label=f"{name}   {mean[0]:.3g}")
    if len(values) > 1:
        std = values.std(0, ddof=1)
        axes.fill_between(places, mean - std, mean + std, color=colour, alpha=0.15, lw=0)


def _density(axes: Axes, name: str, spectra: Sequence[Spectrum], colour: str) -> float:
    """Draw the mean spectral density over subsets; returns its maximum."""
    densities = [spectrum.density for spectrum in spectra if spectrum.density]
    ends = np.concatenate([density.grid(2) for density in densities])
    grid = np.linspace(ends.min(), ends.max(), 800)
    bandwidth = max(density.default_width for density in densities)
    values = np.mean([density.at(grid, bandwidth) for density in densities], axis=0)
    # The axis is logarithmic, so zeros are raised to the smallest positive number.
    axes.plot(grid, np.maximum(values, np.finfo(float).tiny), color=colour, lw=1.4, label=name)
    return float(values.max())


def _of_one(spectrum: Spectrum) -> float:
    """The density at an isolated eigenvalue."""
    assert spectrum.density is not None
    return float(1 / (spectrum.parameters * spectrum.density.default_width * np.sqrt(2 * np.pi)))
