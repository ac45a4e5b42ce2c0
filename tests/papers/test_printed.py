"""Every number of the data files is in the papers' texts, in its place, and vice versa."""

from __future__ import annotations

import re

import pytest

from fedflat.papers import PaperTable, find, papers
from fedflat.papers.library import Paper
from tests.papers.printed import FOLDER, PLACES, Place, lines_of, numbers_in, text_of

pytestmark = pytest.mark.skipif(
    not FOLDER.is_dir(), reason=f"the papers' texts are not in {FOLDER} (set FEDFLAT_PAPERS)"
)

SLIDES = "fedwmsam"
"""Read by OCR, so that its tables have no columns."""


def table(name: str) -> PaperTable:
    found = find(name)
    assert isinstance(found, PaperTable)
    return found


def rows_of(found: PaperTable) -> list[tuple[str, list[str]]]:
    """A row's name and its printed numbers, without those that are missing in our copy of the text."""
    rows = []
    cells = iter(found.cells.values())
    for group, method in found.rows:
        row = [next(cells) for _ in found.columns]
        gone = {cell.name for cell in row for note in found.notes_on(cell) if note.kind == "gap"}
        numbers = [
            cell.published.text
            for cell in row
            if cell.published and cell.published.value is not None and cell.name not in gone
        ]
        rows.append((f"{group} {method}".strip(), numbers))
    return rows


@pytest.mark.parametrize("place", PLACES, ids=lambda place: f"{place.table}-{place.document}")
def test_a_table_has_exactly_the_printed_rows(place: Place):
    found = table(place.table)
    lines, rows = lines_of(place, found.paper.file.documents), rows_of(found)
    assert len(lines) == len(rows)
    for line, (name, numbers) in zip(lines, rows, strict=True):
        printed = numbers_in(line)
        names, values = printed[: len(printed) - len(numbers)], printed[len(printed) - len(numbers) :]
        assert values == numbers, name
        assert set(names) <= set(place.labels), f"{name}: {names} is printed, and not in the data file"


def test_every_printed_table_is_checked():
    held = {
        t.full_name
        for paper in papers().values()
        if paper.name != SLIDES
        for t in paper.tables.values()
        if t.name.startswith("table")
    }
    assert {place.table for place in PLACES} == held


def test_all_required_tables_exist():
    wanted = {
        "fedswa": [2, 3, 4, 5, 6, 8],
        "fedwmsam": [1, 2, 3, 4, 5, 6],
        "wima": [2, 3, 4, 5],
        "eccv": [*range(1, 9), *range(13, 18)],
    }
    for name, numbers in wanted.items():
        paper = find(name)
        assert isinstance(paper, Paper)
        assert [t for t in paper.tables if t.startswith("table")] == [f"table{number}" for number in numbers]


@pytest.mark.parametrize("paper", [name for name in papers() if name != SLIDES])
def test_every_captioned_figure_exists(paper):
    captions = set()
    for document in papers()[paper].file.documents[:1]:
        captions |= {
            f"figure{number}" for number in re.findall(r"^(?:Fig\.|Figure) (\d+):", text_of(document), re.MULTILINE)
        }
    assert captions == {name for name in papers()[paper].tables if name.startswith("figure")}


def test_the_figures_of_the_slides_exist():
    numbers = re.findall(r"Figure (\d)", text_of(papers()[SLIDES].file.documents[0]))
    assert {f"figure{number}" for number in numbers} == {
        name for name in papers()[SLIDES].tables if name.startswith("figure")
    }


ROW_NAMES = {"FedLESAM": "Fed LESAM", "FedLESAM-D": "FedLESAM-D", "FedLESAM-S": "FedLESAM-S"}


def ocr_block(number: int) -> list[str]:
    """The lines between the captions around a table; Table 5 and 6 share theirs."""
    text = text_of(papers()[SLIDES].file.documents[0])
    ends = {1: "R2:", 2: "R3:", 3: "R4:", 4: "Figure 6:", 5: "Thank you", 6: "Thank you"}
    return text[text.index(f"Table {number}:") : text.index(ends[number])].splitlines()


def ocr_numbers(line: str) -> list[str]:
    """Numbers and dashes of a line, with the point that OCR lost put back."""
    found = re.findall(r"(?<![\w.])(?:\d+\.?\d*|-)(?![\w.])", line)
    return [f"0.{word[1:]}" if re.fullmatch(r"0\d{4}", word) else word for word in found]


@pytest.mark.parametrize("number", [1, 2, 3, 4, 6])
def test_the_slides_have_the_same_rows(number):
    found = table(f"{SLIDES}/table{number}")
    block = ocr_block(number)
    rows = iter(found.cells.values())
    for _, method in found.rows:
        texts = [cell.published.text if cell.published else "-" for cell in (next(rows) for _ in found.columns)]
        name = "FedA" if (number, method) == (6, "FedAvg") else method
        names = {name, ROW_NAMES.get(name, name)}
        endings = [
            line.rpartition(each)[2]
            for line in block
            for each in names
            if re.search(rf"(?<![\w-]){re.escape(each)}[ |]", line)
        ]
        assert texts in [ocr_numbers(ending) for ending in endings], method


@pytest.mark.parametrize(
    ("number", "name"), [(1, r"Fed|MoFed|SCAFFOLD"), (2, r"Fed|MoFed|SCAFFOLD"), (4, r"Fed|MoFed")]
)
def test_the_slides_have_no_other_rows(number, name):
    found = table(f"{SLIDES}/table{number}")
    shares = [re.findall(r"(?<![\w.])0\.?\d{4}(?![\w.])", line) for line in ocr_block(number) if re.search(name, line)]
    assert sum(len(numbers) == len(found.columns) for numbers in shares) == len(found.rows)


def test_the_ablation_of_the_slides():
    """Rows are named by their check marks, which OCR reads as v and X."""
    found = table(f"{SLIDES}/table5")
    lines = [re.match(r"([vX]) +([vX]) +([vX]) +(0\.\d{4}) +([\d.]+|-)", line) for line in ocr_block(5)]
    printed = [line.groups() for line in lines if line]
    rows = []
    for (_, method), accuracy, gain in zip(found.rows, *[iter(found.cells.values())] * 2, strict=True):
        marks = tuple("v" if module in method.split() else "X" for module in ("Mom", "SAM", "Weighted"))
        rows.append((*marks, accuracy.published.text, gain.published.text if gain.published else "-"))
    assert printed == rows


@pytest.mark.parametrize("paper", list(papers()))
def test_stated_numbers_are_in_the_text(paper):
    text = " ".join(text_of(document) for document in papers()[paper].file.documents)
    plain = re.sub(r"[$*\\{}]|\s+", " ", text)
    plain = re.sub(r" +", " ", plain).replace(" %", "%")
    for found in papers()[paper].tables.values():
        for stated in found.file.states:
            assert re.search(rf"(?<![\d.]){re.escape(stated.value)}", plain), (found.full_name, stated.value)


def test_figures_print_only_what_the_text_states():
    for paper in papers().values():
        text = " ".join(text_of(document) for document in paper.file.documents)
        for found in paper.tables.values():
            if found.name.startswith("figure"):
                for cell in found.cells.values():
                    assert cell.published is None or cell.published.text in text
