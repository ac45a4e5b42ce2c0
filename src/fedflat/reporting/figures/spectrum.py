"""Figure of spectra: the largest eigenvalues in order, and the density if available."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedflat.flatness import Spectrum
from fedflat.flatness.curvature.spectrum import MATRIX_NAMES
from fedflat.reporting.figures.style import (
    LineStyle,
    add_outer_legend,
    described_labels,
    line_styles,
    marker_spacing,
    open_frame,
    scale_logarithmically,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LOWEST_DENSITY = 0.1
"""Lower end of the density axis, relative to a single eigenvalue's contribution."""


def spectrum_picture(models: Mapping[str, Sequence[Spectrum]], descriptions: Mapping[str, str] | None = None) -> Figure:
    """Plot the largest eigenvalues of models and, beside them, the spectral densities of models that have them.

    Each model has one line: the mean over its spectra, with a band of one standard deviation.

    Args:
        models: for each name, the model's spectra on different subsets of the examples.
        descriptions: for each name, what the model is, e.g. ``server model, seed 0, round 60``; default: none.
    """
    labels, shared_description = described_labels(models, descriptions or {})
    styles = line_styles(models)
    with_density = [name for name, spectra in models.items() if all(spectrum.density for spectrum in spectra)]
    figure = Figure(figsize=(11.0 if with_density else 6.4, 4.4), layout="constrained")
    panels = figure.subplots(1, 2 if with_density else 1, squeeze=False)[0]
    for name, spectra in models.items():
        _draw_eigenvalues(panels[0], labels[name], spectra, styles[name])
    all_eigenvalues = [value for spectra in models.values() for spectrum in spectra for value in spectrum.eigenvalues]
    matrices = {spectrum.matrix for spectra in models.values() for spectrum in spectra}
    format_eigenvalue_axes(panels[0], matrices, is_log=min(all_eigenvalues) > 0)
    if with_density:
        highest = max(_draw_density(panels[1], name, models[name], styles[name].colour) for name in with_density)
        isolated = min(_isolated_eigenvalue_density(spectrum) for name in with_density for spectrum in models[name])
        panels[1].set_yscale("log")
        panels[1].set_ylim(LOWEST_DENSITY * isolated, 3 * highest)
        panels[1].set_xlabel("eigenvalue")
        panels[1].set_ylabel("density (log scale)")
    panels[0].set_title(shared_description, loc="left", fontsize=9.5)
    for axes in panels:
        open_frame(axes)
    add_outer_legend(figure, handles=panels[0].lines[: len(models)], title="lambda_max")
    return figure


def format_eigenvalue_axes(axes: Axes, matrices: Collection[str], is_log: bool) -> None:
    """Label and scale the axes of eigenvalues: logarithmic with ``is_log``, otherwise with a line at 0.

    ``matrices`` are the different matrices (keys of ``MATRIX_NAMES``) whose eigenvalues are drawn.
    """
    matrix = MATRIX_NAMES[next(iter(matrices))] if len(matrices) == 1 else "curvature matrix"
    axes.set_xlabel(f"eigenvalues of the {matrix}, largest first")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.set_ylabel("eigenvalue (log scale)" if is_log else "eigenvalue")
    if not is_log:
        axes.axhline(0, color="#999999", lw=0.8)
        return
    scale_logarithmically(axes)


def _draw_eigenvalues(axes: Axes, label: str, spectra: Sequence[Spectrum], style: LineStyle) -> None:
    """Draw the mean eigenvalues of ``spectra`` and a band of one standard deviation; the label adds the largest one."""
    values = np.array([spectrum.eigenvalues for spectrum in spectra])  # [subsets of examples, eigenvalues]
    mean, ranks = values.mean(0), np.arange(1, values.shape[1] + 1)
    largest = [spectrum.lambda_max for spectrum in spectra if spectrum.lambda_max is not None]
    shown_largest = f"{np.mean(largest):.3g}" if len(largest) == len(spectra) else "unknown"
    spacing = marker_spacing(len(ranks))
    axes.plot(ranks, mean, **style.line, markevery=spacing, lw=1.6, label=f"{label}   {shown_largest}")
    if len(values) > 1:
        std = values.std(0, ddof=1)
        axes.fill_between(ranks, mean - std, mean + std, color=style.colour, alpha=0.15, lw=0)


def _draw_density(axes: Axes, name: str, spectra: Sequence[Spectrum], colour: str) -> float:
    """Draw the mean of the spectral densities of ``spectra`` (one per subset of examples); return its maximum."""
    densities = [spectrum.density for spectrum in spectra if spectrum.density]
    ends = np.concatenate([density.grid(2) for density in densities])  # lowest and highest point of each
    grid = np.linspace(ends.min(), ends.max(), 800)
    bandwidth = max(density.default_width for density in densities)  # the same for all
    values = np.mean([density.at(grid, bandwidth) for density in densities], axis=0)
    # The axis is logarithmic, so zeros are raised to the smallest positive number.
    axes.plot(grid, np.maximum(values, np.finfo(float).tiny), color=colour, lw=1.4, label=name)
    return float(values.max())


def _isolated_eigenvalue_density(spectrum: Spectrum) -> float:
    """Return the density at an isolated eigenvalue, the peak of the Gaussian into which the density smooths it.

    A single eigenvalue has the weight 1 / P, where P is the number of parameters.
    """
    assert spectrum.density is not None
    return float(1 / (spectrum.parameters * spectrum.density.default_width * np.sqrt(2 * np.pi)))
