"""The page on the papers agrees with the data files."""

from __future__ import annotations

from pathlib import Path

from fedflat.papers import papers
from fedflat.papers.outcome import Verdict

PAGE = (Path(__file__).parents[2] / "docs" / "papers.md").read_text("utf-8")


def test_every_misprint_gap_and_garbled_number_is_on_the_page():
    for paper in papers().values():
        assert all(f"| `{paper.name}` | {note.says} |" in PAGE for note in paper.file.notes)
        for table in paper.tables.values():
            for note in table.file.notes:
                assert (f"| `{table.full_name}` | {note.says} |" in PAGE) == (note.kind != "note")


def test_every_verdict_is_explained():
    for verdict in Verdict.__args__:
        assert f"| {verdict}" in PAGE or f", {verdict} |" in PAGE


def test_the_page_counts_every_table():
    counts = {name: [t for t in paper.tables if t.startswith("table")] for name, paper in papers().items()}
    assert {name: len(tables) for name, tables in counts.items()} == {"fedswa": 6, "fedwmsam": 6, "wima": 4, "eccv": 13}
    for name in counts:
        assert f"| `{name}` |" in PAGE
