"""Printed numbers against each other: every contradiction has a note, and every noted misprint is a contradiction."""

from __future__ import annotations

from collections import defaultdict

import pytest

from fedflat.papers import PaperTable, find_table, papers
from fedflat.papers.cells import Cell
from fedflat.papers.numbers import Gain

TABLES = [table for paper in papers().values() for table in paper.tables.values()]


def is_misprint(cell: Cell) -> bool:
    return any(note.kind == "misprint" for note in find_table(cell.table).notes_on(cell))


def printed_gains() -> list[Cell]:
    return [c for t in TABLES for c in t.cells.values() if isinstance(c.statistic, Gain) and c.published]


def agrees(cell: Cell) -> bool:
    """Whether a printed gain equals the difference of the printed numbers, up to rounding."""
    sources = find_table(cell.table).sources(cell)
    of, over = (source.published for source in sources)
    assert isinstance(cell.statistic, Gain)
    a, b = of.value, over.value
    scale = 100 / b if cell.statistic.relative else 100 if sources[0].unit == "share" else 1
    allowed = cell.published.rounding + scale * (of.rounding + over.rounding)
    return abs(scale * (a - b) - cell.published.value) <= allowed + 1e-9


def test_gains_agree_with_the_cells_they_compare():
    cells = printed_gains()
    assert len(cells) > 100
    wrong = {f"{cell.table} {cell.name}" for cell in cells if not agrees(cell)}
    assert wrong == {f"{cell.table} {cell.name}" for cell in cells if is_misprint(cell)}
    assert wrong == {
        "wima/table2 fedavg/cifar10-alpha-0-gain",
        "eccv/table5 sam-swa/absolute-centr",
        "eccv/table5 sam-swa/relative-centr",
        "eccv/table16 sam/absolute-alpha-1k",
        "eccv/table16 sam/relative-alpha-1k",
        "eccv/table16 sam-swa/absolute-centr",
        "eccv/table16 sam-swa/relative-centr",
    }


@pytest.mark.parametrize("paper", list(papers()))
def test_a_run_has_the_same_number_in_all_tables(paper):
    same: dict[str, list[Cell]] = defaultdict(list)
    for table in papers()[paper].tables.values():
        for cell in table.cells.values():
            if cell.configs and cell.published:
                same["".join(c.model_dump_json() for c in cell.configs) + cell.evaluated + cell.statistic.text].append(
                    cell
                )
    shared = [cells for cells in same.values() if len(cells) > 1]
    assert len(shared) >= {"fedswa": 20, "fedwmsam": 5, "wima": 0, "eccv": 100}[paper]
    for cells in shared:
        if len({(cell.published.value, cell.published.is_bound) for cell in cells}) > 1:
            assert all(is_misprint(cell) for cell in cells), [cell.name for cell in cells]


def test_the_window_of_100_is_printed_twice_with_different_numbers():
    tables = papers()["wima"].tables
    in_two = tables["table2"].cells["fedavg/cifar10-alpha-0-with-wima"].published.value
    in_four = tables["table4"].cells["w-100/cifar10"]
    assert (in_two, in_four.published.value) == (69.95, 69.94)
    assert is_misprint(in_four)


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.full_name)
def test_notes_refer_to_existing_cells(table: PaperTable):
    for note in table.file.notes:
        assert note.cells
        for pattern in note.cells:
            assert table.choose([pattern])


def test_bounds_and_accuracies_agree():
    """A reached target exceeds the final accuracy only slightly."""
    table = papers()["fedswa"].tables["table2"]
    for name, cell in table.cells.items():
        if name.endswith("-rounds"):
            accuracy = table.cells[name.removesuffix("rounds") + "accuracy"].published.value
            if not cell.published.is_bound:
                assert accuracy >= 100 * cell.statistic.target - 1, name
