"""Figures of spectra: a line per model, a band over subsets, densities, and negative eigenvalues."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedflat import flatness
from fedflat.reporting.figures.spectrum import spectrum_picture
from fedflat.reporting.figures.style import line_styles

from .networks import Quadratic, symmetric


@pytest.fixture(scope="module")
def objective() -> flatness.Objective:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(60, 8, generator=generator).double()
    return flatness.Objective(nn.Linear(8, 1, bias=False).double(), F.mse_loss, (inputs, inputs[:, :1]))


def test_a_line_per_model_and_a_band_over_subsets(objective: flatness.Objective) -> None:
    subsets = [flatness.spectrum(objective.subset(30, seed), count=5, trace_draws=0) for seed in range(3)]
    figure = spectrum_picture({"a": subsets, "b": subsets[:1]})
    (axes,) = figure.axes
    assert len(axes.lines) == 2 and len(axes.collections) == 1 and axes.get_yscale() == "log"
    assert axes.get_ylabel() == "eigenvalue (log scale)"
    axes.set_ylim(1.5, 5.5)  # without a power of ten
    assert len([label for label in axes.get_yticklabels(minor=True) if label.get_text()]) >= 3
    mean = sum(one.lambda_max for one in subsets) / 3
    assert axes.lines[0].get_ydata()[0] == pytest.approx(mean)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [
        f"a   {mean:.3g}",
        f"b   {subsets[0].lambda_max:.3g}",
    ]
    styles = line_styles(["a", "b"]).values()
    assert [(line.get_color(), line.get_marker()) for line in axes.lines] == [(s.colour, s.marker) for s in styles]


def test_models_are_described(objective: flatness.Objective) -> None:
    models = {name: [flatness.spectrum(objective, count=2, trace_draws=0)] for name in "ab"}
    (axes,) = spectrum_picture(models, dict.fromkeys(models, "server model, seed 0, round 9")).axes
    assert axes.get_title(loc="left") == "server model, seed 0, round 9"
    descriptions = {"a": "server model, seed 0, round 9", "b": "wima(window=20) model, seed 1, round 9"}
    figure = spectrum_picture(models, descriptions)
    first, second = (text.get_text() for text in figure.legends[0].get_texts())
    assert "a (server model, seed 0, round 9) " in first and "b (wima(window=20) model, seed 1, round 9) " in second
    figure.draw_without_rendering()
    box = figure.legends[0].get_window_extent()
    assert box.x0 >= 0 and box.x1 <= figure.bbox.x1 and box.y1 < figure.axes[0].bbox.y0  # below the panel


def test_densities_are_drawn_beside_the_eigenvalues(objective: flatness.Objective) -> None:
    found = flatness.spectrum(objective, count=5, density_draws=2, density_steps=8)
    figure = spectrum_picture({"a": [found]})
    values, density = figure.axes
    assert len(values.lines) == len(density.lines) == 1 and density.get_yscale() == "log"
    low, high = density.get_ylim()
    assert 0 < low < max(density.lines[0].get_ydata()) < high


def test_negative_eigenvalues_are_drawn_too() -> None:
    matrix = symmetric(torch.tensor([2.0, 0.5, -1.0, -3.0]))
    quadratic = Quadratic(matrix, torch.zeros(4).double(), torch.ones(4).double())
    found = flatness.spectrum(quadratic.objective(), by="magnitude")
    (axes,) = spectrum_picture({"saddle": [found]}).axes
    assert axes.get_yscale() == "linear" and axes.lines[0].get_ydata() == pytest.approx(
        [-3.0, 2.0, -1.0, 0.5], abs=1e-9
    )
