"""Results, comparisons, datasets, spectra and landscapes in a terminal and in a notebook."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from matplotlib.figure import Figure

import fedflat
from fedflat.data import from_arrays, load
from fedflat.reporting.figures import enable_inline_figures
from fedflat.reporting.progress import notebook_shell

SMALL = {"model": "mlp(hidden=2)", "rounds": 2, "local_steps": 1, "workers": 1}


@pytest.fixture(scope="module")
def result() -> fedflat.Result:
    return fedflat.run("fedavg+ema", **SMALL)


def test_repr_of_a_result(result: fedflat.Result) -> None:
    last = f"{100 * result.summary().last:.2f}"
    title = "fedavg+ema on digits, seed 0: finished after 2 of 2 rounds"
    assert repr(result).startswith(f"Result({title}; last accuracy %: server {last}, ema")
    page = result._repr_html_()
    assert title in page and f"<td>server</td><td>{last}</td>" in page and "(n=" in page
    assert list(result.to_pandas()["round"]) == [0, 1, 2]


def test_repr_of_a_comparison(tmp_path: Path) -> None:
    comparison = fedflat.compare(["fedsam", "fedavg"], seeds=2, jobs=1, out=tmp_path / "runs", **SMALL)
    assert repr(comparison) == "Comparison(4 runs with 2 seeds: fedsam, fedavg)"
    shutil.copytree(tmp_path / "runs" / "fedavg" / "seed-0", tmp_path / "runs" / "copy")
    with pytest.warns(UserWarning, match="left out: .*copy repeats .*seed-0: the same settings and seed"):
        loaded = fedflat.Comparison.load(tmp_path / "runs")
    assert repr(loaded) == repr(comparison)  # in the order of the comparison
    shutil.rmtree(tmp_path / "runs" / "copy")
    with pytest.raises(fedflat.UserError, match=r"its 4 runs.*fedflat\.Comparison\.load\("):
        fedflat.load(tmp_path / "runs")
    with pytest.raises(fedflat.UserError, match="no runs in"):
        fedflat.Comparison.load(tmp_path / "none")
    page = comparison._repr_html_()
    assert "4 runs with 2 seeds, test accuracy %" in page and "<td>fedsam</td>" in page and " ± " in page
    assert isinstance(comparison.plot(), Figure) and len(comparison.to_pandas()) == 12


def test_repr_of_a_dataset() -> None:
    digits = load("digits")
    assert repr(digits) == (
        "Dataset(digits: image, 1,442 training examples, 355 test examples, shape 1x8x8, 10 classes)"
    )
    assert "<td>targets</td><td>10 classes</td>" in digits._repr_html_()
    *images, counts = digits.plot().axes
    assert [axes.get_title() for axes in images] == list(digits.classes)
    training = torch.bincount(digits.train.targets).tolist()
    assert [bar.get_height() for bar in counts.patches[:10]] == training
    vectors = from_arrays(torch.randn(9, 2), torch.arange(9) % 3, torch.randn(3, 2), torch.arange(3), name="<mine>")
    assert len(vectors.plot().axes) == 1 and "&lt;mine&gt;" in vectors._repr_html_()


def test_repr_of_a_spectrum(result: fedflat.Result) -> None:
    spectrum = result.flatness("server").spectrum(2, examples=40, trace_draws=0)
    assert repr(spectrum).startswith(f"Spectrum(lambda_max={spectrum.lambda_max:.4g}, lambda_min=")
    assert "trace" not in repr(spectrum) and "eigenvalues=2 of 160, examples=40, converged=yes)" in repr(spectrum)
    assert "<td>lambda_max</td>" in spectrum._repr_html_() and "None" not in spectrum._repr_html_()
    assert spectrum.plot(name="mine").legends[0].get_texts()[0].get_text().startswith("mine ")
    assert list(spectrum.plot().axes[0].lines[0].get_ydata()) == pytest.approx(list(spectrum.eigenvalues))


def test_repr_of_a_landscape(result: fedflat.Result) -> None:
    landscape = fedflat.flatness.landscape(result.flatness("server").objective(), points=3)
    low, high = (f"{value:.4g}" for value in (landscape.values["loss"].min(), landscape.values["loss"].max()))
    assert repr(landscape) == f"Landscape(around model, 3 x 3 points: loss {low} to {high})"
    assert f"<td>loss</td><td>{low}</td><td>{high}</td>" in landscape._repr_html_()


def test_figures_appear_in_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("IPython")
    shells = []
    monkeypatch.setattr("IPython.core.pylabtools.select_figure_formats", lambda shell, formats: shells.append(shell))
    enable_inline_figures()
    assert shells == []
    kernel = SimpleNamespace(kernel=object())
    monkeypatch.setattr("IPython.get_ipython", lambda: kernel)
    enable_inline_figures()
    assert shells == [kernel]
    monkeypatch.setattr("IPython.get_ipython", SimpleNamespace)  # IPython in a terminal
    assert notebook_shell() is None
