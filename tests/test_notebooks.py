"""The notebooks run from their first cell to their last, and are kept without outputs."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))
LIMIT = 120
"""Seconds that a notebook may take of one core."""


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = nbformat.read(path, as_version=4)
    notebook.cells.append(nbformat.v4.new_code_cell("import time; print(time.process_time())"))
    began = time.monotonic()
    done = nbclient.NotebookClient(
        notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    used = float(done.cells[-1].outputs[0].text)
    print(f"{path.name}: {used:.0f} s of one core, {time.monotonic() - began:.0f} s by the clock")
    assert used < LIMIT
    assert all(cell.outputs for cell in done.cells[3:] if cell.cell_type == "code"), "every cell shows something"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_kept_clean(path: Path) -> None:
    cells = nbformat.read(path, as_version=4).cells
    code = [cell for cell in cells if cell.cell_type == "code"]
    assert code and all(not cell.outputs and cell.execution_count is None for cell in code), (
        "strip its outputs before committing"
    )


def test_there_are_two() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["flatness", "tour"]
