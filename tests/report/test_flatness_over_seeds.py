"""Flatness over seeds in the report."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest

from fedflat.reporting.figures.paper_figures import figures_of
from fedflat.reporting.page.display_names import with_display_names
from fedflat.reporting.page.document import report_document
from fedflat.reporting.page.gather import gather
from fedflat.reporting.tables.files import flatness_table
from fedflat.reporting.tables.latex import first_columns, latex_table


def measured_seeds(compared):
    """Measurements of fedavg and fedsam at three seeds, stored in the folders of fedavg, which have moved since."""
    for seed in range(3):
        models = {name: {"model": f"old/{name}/seed-{seed}:server"} for name in ("fedavg", "fedsam")}
        for number, model in enumerate(models.values(), 1):
            model["described"] = f"server model, seed {seed}, round 3"
            rises = {0.05: 0.1 * number + 0.01 * seed, 0.1: 0.2 * number + (0.3 if number == 2 else 3**seed) * seed}
            model["sharpness"] = [
                [{"kind": "sam", "rho": rho, "loss": 1.0, "value": value, "steps": 1, "examples": 20}]
                for rho, value in rises.items()
            ]
            model["subsets"] = [{"eigenvalues": [4.0 + seed], "lambda_max": 4.0 + seed, "loss": 1.0, "examples": 20}]
        other = {"model": f"old/fedsam/seed-{seed}:ema", "described": f"ema model, seed {seed}, round 3"}  # has no row
        models |= {
            "mine": models["fedavg"] | {"model": "mine.pt", "described": "mine"},
            "ema": models["fedavg"] | other,
        }
        for name in ("sharpness", "spectrum"):
            folder = compared / "fedavg" / f"seed-{seed}" / "flatness" / name
            folder.mkdir(parents=True)
            (folder / f"{name}.json").write_text(json.dumps({"on": "train", "models": models}))


def test_flatness_is_averaged_over_seeds(compared):
    measured_seeds(compared)
    document = report_document(gather([compared]))
    (section,) = with_display_names(document, {})[0]["sections"]
    table = section["views"]["tables"][0]
    assert table["heads"] == ["model", "measured", "seeds", "loss", "lambda_max", "sam, rho 0.05", "sam, rho 0.1"]
    assert [row["label"] for row in table["rows"]] == ["FedAvg", "FedSAM"]  # only models of rows
    fedsam = table["rows"][1]
    assert fedsam["described"] == "server model, round 3"
    assert fedsam["numbers"] == pytest.approx([3, 1.0, 5.0, 0.21, 0.7])
    assert fedsam["spreads"] == [None, *(pytest.approx(std) for std in (0.0, 1.0, 0.01, 0.3))]
    line = next(line for line in section["views"]["rises"]["sam"] if line["label"] == "FedSAM, mean of 3 seeds")
    assert line["x"] == [0.05, 0.1] and line["y"] == pytest.approx([0.21, 0.7])
    assert line["std"] == pytest.approx([0.01, 0.3])
    assert line["style"] == next(row["style"] for row in section["rows"] if row["label"] == "FedSAM")
    assert len(section["views"]["rises"]["sam"]) == 2 + 6  # two other models were measured three times
    (axes,) = figures_of(section, "last")["sharpness"].axes
    fedavg, fedsam = (container.lines[2][0].get_segments()[1] for container in axes.containers[:2])
    assert fedsam.tolist() == [[0.1, pytest.approx(0.4)], [0.1, pytest.approx(1.0)]]
    assert 0 < fedavg[0, 1] < 1 < fedavg[1, 1]  # the standard deviation exceeds the mean
    flatness = flatness_table(section)
    assert "| FedSAM | 3 | 1 ± 0 | 5 ± 1 | 0.21 ± 0.01 | 0.7 ± 0.3 |" in flatness.markdown()
    assert flatness.caption.startswith("Flatness (server model, round 3) on digits, Dirichlet(0.1)")
    assert r"FedSAM & 3 & 1 $\pm$ 0 & 5 $\pm$ 1 &" in latex_table(flatness.select(first_columns(flatness)), "tab:f")
    wide = replace(flatness, heads={**flatness.heads, "loss": "x" * 80})
    assert first_columns(wide) == ["seeds"]


def test_values_of_different_seeds_are_not_averaged_together(compared):
    measured_seeds(compared)
    shutil.rmtree(compared / "fedavg" / "seed-2" / "flatness" / "sharpness")
    for seed in range(2):  # another command measured further radii
        folder = compared / "fedavg" / f"seed-{seed}" / "flatness"
        shutil.copytree(folder / "sharpness", folder / "sharpness-2")
        file = folder / "sharpness-2" / "sharpness.json"
        file.write_text(file.read_text().replace('"rho": 0.05', '"rho": 0.2'))
    (section,) = report_document(gather([compared]))["sections"]
    rows = [row["numbers"] for row in section["views"]["tables"][0]["rows"] if row["label"] == "fedsam"]
    near = pytest.approx
    assert rows == [[3, 1.0, None, 5.0, None, None], [2, None, near(0.55), None, near(0.205), near(0.205)]]
    line = next(line for line in section["views"]["rises"]["sam"] if line["label"] == "fedsam, mean of 2 seeds")
    assert line["x"] == [0.05, 0.1, 0.2] and line["y"] == pytest.approx([0.205, 0.55, 0.205])
