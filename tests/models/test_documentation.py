"""The tables of docs/models.md agree with the code."""

import ast
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


def value(arithmetic):
    """The value of sums and products of whole numbers, and of nothing else."""

    def of(node):
        match node:
            case ast.Constant(value=int(n)):
                return n
            case ast.BinOp(left, ast.Add(), right):
                return of(left) + of(right)
            case ast.BinOp(left, ast.Mult(), right):
                return of(left) * of(right)
        raise ValueError(ast.dump(node))

    return of(ast.parse(arithmetic, mode="eval").body)


OVERVIEW, ARITHMETIC = tables()


@pytest.mark.parametrize("row", OVERVIEW, ids=lambda row: row[0])
def test_parameters_of_the_table(row):
    text, _, input_shape, classes, parameters, _ = row
    shape = tuple(map(int, input_shape.split("x")))
    assert parameter_count(text.strip("`"), shape, number(classes)) == number(parameters)


@pytest.mark.parametrize("row", ARITHMETIC, ids=lambda row: row[0])
def test_arithmetic_of_the_table(row):
    counts = {text: number(parameters) for text, _, _, _, parameters, _ in OVERVIEW}
    assert value(row[1].strip("`")) == counts[row[0]]


def test_every_model_is_in_both_tables():
    for table in (OVERVIEW, ARITHMETIC):
        assert set(names()) <= {row[0].strip("`") for row in table}
    assert [row[0] for row in OVERVIEW] == [row[0] for row in ARITHMETIC]


def test_the_table_lists_the_examples_of_the_specs():
    examples = [f"`{example.text}`" for spec in MODELS.values() for example in spec.examples]
    assert [row[0] for row in OVERVIEW] == examples
