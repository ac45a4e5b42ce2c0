"""The tables of docs/models.md agree with the code."""

import pytest

from fedflat.models import MODELS, names, parameter_count
from tests.docs.blocks import tables


def number(cell):
    return int(cell.replace(",", ""))


(OVERVIEW,) = tables("models.md")


@pytest.mark.parametrize("row", OVERVIEW, ids=lambda row: row[0])
def test_parameters_of_the_table(row):
    text, _, input_shape, classes, parameters, _ = row
    shape = tuple(map(int, input_shape.split("x")))
    assert parameter_count(text, shape, number(classes)) == number(parameters)


def test_every_model_is_in_the_table():
    assert set(names()) <= {row[0] for row in OVERVIEW}


def test_the_table_lists_the_examples_of_the_specs():
    examples = [example.text for spec in MODELS.values() for example in spec.examples]
    assert [row[0] for row in OVERVIEW] == examples
