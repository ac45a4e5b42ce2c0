"""The notebooks run from top to bottom and are committed with their outputs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.time_limits import scaled

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))

SMALLER = """
import fedflat.experiment.setup.engine as engine
from fedflat.processes import use_cores

use_cores(1)
engine.Plan = lambda batch_size, epochs, steps, *others, Plan=engine.Plan: Plan(batch_size, epochs, 2, *others)
"""
"""Code for all notebooks: one process, and two local steps per client and round."""


@pytest.mark.slow
def test_notebooks_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All in one kernel, since it takes seconds to start; each notebook begins without variables."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebooks = [nbformat.read(path, as_version=4) for path in NOTEBOOKS]
    joined = nbformat.v4.new_notebook()
    joined.cells.append(nbformat.v4.new_code_cell(SMALLER))
    for notebook in notebooks:
        replaced = 0
        for cell in notebook.cells:  # two rounds show that every cell runs; committed outputs are those of all rounds
            cell.source, count = re.subn(r'"rounds": \d+', '"rounds": 2', cell.source)
            cell.source = re.sub(r"points=\d+", "points=3", re.sub(r"examples=\d+", "examples=20", cell.source))
            replaced += count
        assert replaced, "the number of rounds is set in the notebook"
        joined.cells += [nbformat.v4.new_code_cell("%reset -f"), *notebook.cells]
    client = nbclient.NotebookClient(
        joined,
        timeout=int(scaled(600)),
        kernel_name="python3",
        resources={"metadata": {"path": str(tmp_path)}},
    )
    client.execute()
    for notebook in notebooks:
        shown = [cell.outputs for cell in notebook.cells[3:] if cell.cell_type == "code"]
        assert shown and all(shown), "every cell shows something"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_has_its_outputs(path: Path) -> None:
    cells = nbformat.read(path, as_version=4).cells
    outputs = [cell.outputs for cell in cells if cell.cell_type == "code"]
    assert any(outputs) and all(outputs[1:]), "run make notebooks before you commit"
    text = str(outputs)
    assert "stderr" not in text and "/home/" not in text and "/tmp/" not in text and "'error'" not in text
    if path.stem == "first_landscape":
        assert len(cells) == 15


def test_notebooks_are_found() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["first_landscape", "flatness", "tour"]
