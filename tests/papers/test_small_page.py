"""The page of small-scale results lists every table of the data files."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedflat.papers import PaperTable, papers
from fedflat.papers.plan import Deviations, make_plan

PAGE = Path(__file__).parents[2] / "docs" / "papers-small.md"
LINES = {
    cells[1]: cells
    for line in PAGE.read_text("utf-8").splitlines()
    if len(cells := [cell.strip() for cell in line.split("|")]) == 10
}
WITHOUT_DATA = Deviations(small=True, data_dir=Path("nowhere"))
TABLES = [table for paper in papers().values() for table in paper.tables.values()]


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.full_name)
def test_every_table_is_listed_with_its_stand_ins(table: PaperTable):
    cell = table.cells[table.file.representative]
    _, _, name, published, measured, seeds, stand_ins, seconds, remark, _ = LINES[table.full_name]
    assert name == cell.name
    assert published == (cell.published.text if cell.published else "-")
    assert measured and not remark
    assert int(seeds) == 1 or measured.endswith("+")
    assert float(seconds) > 0
    (run,) = make_plan(table, [cell], [0], Path(), WITHOUT_DATA).runs
    assert stand_ins == "; ".join(run.stand_ins)
