"""Figure of spectra: the largest eigenvalues in order, and the density if available."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator

from fedflat.flatness import Spectrum
from fedflat.reporting.figures.style import LineStyle, line_styles, open_frame

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LOWEST_DENSITY = 0.1
"""Lower end of the density axis, relative to a single eigenvalue's contribution."""


def spectrum_picture(models: Mapping[str, Sequence[Spectrum]], described: Mapping[str, str] | None = None) -> Figure:
    """Plot the spectra of models: one line per model, over subsets of examples the mean and one standard deviation.

    Args:
        models: by name, one spectrum per subset of examples; densities are drawn for models that have them.
        described: by name, what the model is, e.g. ``server model, seed 0, round 60``; default: no description.
    """
    described, styles = described or {}, line_styles(models)
    common = next(iter(described.values()), "") if len(set(described.values())) == 1 else ""
    with_density = {name for name, spectra in models.items() if all(spectrum.density for spectrum in spectra)}
    figure = Figure(figsize=(11.0 if with_density else 6.4, 4.4), layout="constrained")
    panels = figure.subplots(1, 2 if with_density else 1, squeeze=False)[0]
    highest, single = 0.0, float("inf")
    for name, spectra in models.items():
        label = f"{name} ({described[name]})" if name in described and not common else name
        _draw_eigenvalues(panels[0], label, spectra, styles[name])
        if name in with_density:
            highest = max(highest, _draw_density(panels[1], name, spectra, styles[name].colour))
            single = min(single, *map(_single_density, spectra))
    all_eigenvalues = [value for spectra in models.values() for spectrum in spectra for value in spectrum.eigenvalues]
    _label_eigenvalues(panels[0], is_log=min(all_eigenvalues) > 0)
    if with_density:
        panels[1].set_yscale("log")
        panels[1].set_ylim(LOWEST_DENSITY * single, 3 * highest)
        panels[1].set_xlabel("eigenvalue")
        panels[1].set_ylabel("density")
    panels[0].set_title(common, loc="left", fontsize=9.5)
    for axes in panels:
        open_frame(axes)
    panels[0].legend(frameon=False, fontsize=9, title="lambda_max", alignment="right", title_fontsize=9)
    return figure


def _label_eigenvalues(axes: Axes, is_log: bool) -> None:
    """Label the axes of the eigenvalues; the vertical one is logarithmic if all are positive."""
    axes.set_xlabel("eigenvalues of the Hessian, largest first")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if not is_log:
        axes.axhline(0, color="#999999", lw=0.8)
        return
    axes.set_yscale("log")
    axes.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _draw_eigenvalues(axes: Axes, label: str, spectra: Sequence[Spectrum], style: LineStyle) -> None:
    """Draw the mean of each eigenvalue over subsets, with a band of one standard deviation."""
    values = np.array([spectrum.eigenvalues for spectrum in spectra])
    mean, ranks = values.mean(0), np.arange(1, values.shape[1] + 1)
    axes.plot(ranks, mean, **style.line, lw=1.6, label=f"{label}   {mean[0]:.3g}")
    if len(values) > 1:
        std = values.std(0, ddof=1)
        axes.fill_between(ranks, mean - std, mean + std, color=style.colour, alpha=0.15, lw=0)


def _draw_density(axes: Axes, name: str, spectra: Sequence[Spectrum], colour: str) -> float:
    """Draw the mean spectral density over subsets; return its maximum."""
    densities = [spectrum.density for spectrum in spectra if spectrum.density]
    ends = np.concatenate([density.grid(2) for density in densities])
    grid = np.linspace(ends.min(), ends.max(), 800)
    bandwidth = max(density.default_width for density in densities)
    values = np.mean([density.at(grid, bandwidth) for density in densities], axis=0)
    # The axis is logarithmic, so zeros are raised to the smallest positive number.
    axes.plot(grid, np.maximum(values, np.finfo(float).tiny), color=colour, lw=1.4, label=name)
    return float(values.max())


def _single_density(spectrum: Spectrum) -> float:
    """Return the density at an isolated eigenvalue: the peak of its Gaussian."""
    assert spectrum.density is not None
    return float(1 / (spectrum.parameters * spectrum.density.default_width * np.sqrt(2 * np.pi)))
