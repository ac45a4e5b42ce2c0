"""The tables of docs/models.md agree with the code."""

from pathlib import Path

import pytest

from fedflat.models import MODELS, names, parameter_count

PAGE = Path(__file__).parents[2] / "docs" / "models.md"


def tables():
    """Each table of the page as rows of cells, without its heading."""
    found, rows = [], []
    for line in [*PAGE.read_text(encoding="utf-8").splitlines(), ""]:
        if line.startswith("|"):
            rows.append([cell.strip() for cell in line.strip("|").split("|")])
        elif rows:
            found.append(rows[2:])
            rows = []
    return found


def number(cell):
    return int(cell.replace(",", ""))


(OVERVIEW,) = tables()


@pytest.mark.parametrize("row", OVERVIEW, ids=lambda row: row[0])
def test_parameters_of_the_table(row):
    text, _, input_shape, classes, parameters, _ = row
    shape = tuple(map(int, input_shape.split("x")))
    assert parameter_count(text.strip("`"), shape, number(classes)) == number(parameters)


def test_every_model_is_in_the_table():
    assert set(names()) <= {row[0].strip("`") for row in OVERVIEW}


def test_the_table_lists_the_examples_of_the_specs():
    examples = [f"`{example.text}`" for spec in MODELS.values() for example in spec.examples]
    assert [row[0] for row in OVERVIEW] == examples
