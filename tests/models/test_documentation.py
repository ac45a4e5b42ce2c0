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


(OVERVIEW,) = tables()
ARITHMETIC = {
    "mlp": "(64+1)*64 + (64+1)*10",
    "lenet5": "(1*25+1)*6 + (6*25+1)*16 + (16*5*5+1)*120 + (120+1)*84 + (84+1)*10",
    "cnn": "(3*25+1)*64 + (64*25+1)*64 + (64*5*5+1)*384 + (384+1)*192 + (192+1)*10",
    "vgg11": (
        "(3*9+1)*64 + (64*9+1)*128 + (128*9+1)*256 + (256*9+1)*256 + (256*9+1)*512 + 3*(512*9+1)*512 "
        "+ (512+1)*100 + (100+1)*10"
    ),
    "vgg11(hidden=256)": (
        "(3*9+1)*64 + (64*9+1)*128 + (128*9+1)*256 + (256*9+1)*256 + (256*9+1)*512 + 3*(512*9+1)*512 "
        "+ (512+1)*256 + (256+1)*100"
    ),
    "resnet18": (
        "(3*9+2)*64 + 4*(64*9+2)*64 + (64*9+2)*128 + 3*(128*9+2)*128 + (64+2)*128 + (128*9+2)*256 "
        "+ 3*(256*9+2)*256 + (128+2)*256 + (256*9+2)*512 + 3*(512*9+2)*512 + (256+2)*512 + (512+1)*10"
    ),
    "resnet18(stem=torchvision)": (
        "(3*49+2)*64 + 4*(64*9+2)*64 + (64*9+2)*128 + 3*(128*9+2)*128 + (64+2)*128 + (128*9+2)*256 "
        "+ 3*(256*9+2)*256 + (128+2)*256 + (256*9+2)*512 + 3*(512*9+2)*512 + (256+2)*512 + (512+1)*10"
    ),
    "resnet20": ("(3*9+2)*16 + 6*(16*9+2)*16 + (16*9+2)*32 + 5*(32*9+2)*32 + (32*9+2)*64 + 5*(64*9+2)*64 + (64+1)*10"),
    "mobilenetv2": (
        "(27+2)*32 + (9+2)*32+(32+2)*16 + (16+2+9+2)*96+(96+2)*24 + (24+2+9+2)*144+(144+2)*24 "
        "+ (24+2+9+2)*144+(144+2)*32 + 2*((32+2+9+2)*192+(192+2)*32) + (32+2+9+2)*192+(192+2)*64 "
        "+ 3*((64+2+9+2)*384+(384+2)*64) + (64+2+9+2)*384+(384+2)*96 + 2*((96+2+9+2)*576+(576+2)*96) "
        "+ (96+2+9+2)*576+(576+2)*160 + 2*((160+2+9+2)*960+(960+2)*160) + (160+2+9+2)*960+(960+2)*320 "
        "+ (320+2)*1280 + (1280+1)*2028"
    ),
    "mobilenetv2(stem=small)": "2223872 + (1280+1)*10",
    "vit-b16": (
        "(3*256+1)*768 + (1+197)*768 + 12*(4*768 + (768+1)*2304 + (768+1)*768 + (768+1)*3072 + (3072+1)*768) "
        "+ 2*768 + (768+1)*200"
    ),
    "vit-s16": (
        "(3*256+1)*384 + (1+197)*384 + 12*(4*384 + (384+1)*1152 + (384+1)*384 + (384+1)*1536 + (1536+1)*384) "
        "+ 2*384 + (384+1)*200"
    ),
    "vit-tiny": (
        "(3*16+1)*192 + (1+65)*192 + 12*(4*192 + (192+1)*576 + (192+1)*192 + (192+1)*768 + (768+1)*192) "
        "+ 2*192 + (192+1)*10"
    ),
    "femnist-cnn": "(1*9+1)*32 + (32*9+1)*64 + (64*12*12+1)*128 + (128+1)*62",
    "char-lstm": "90*8 + 4*256*(8+256+2) + 4*256*(256+256+2) + (256+1)*90",
    "bisenetv2": (
        "(3*9+2)*64 + 4*(64*9+2)*64 + (64*9+2)*128 + 2*(128*9+2)*128 + (3*9+2)*16 + (16+2)*8 + (8*9+2)*16 "
        "+ (32*9+2)*16 + (16*9+2)*16 + 2*(9+2)*96 + (96+2)*32 + (9+2)*16 + (16+2)*32 + (32*9+2)*32 "
        "+ (9+2)*192 + (192+2)*32 + (32*9+2)*32 + 2*(9+2)*192 + (192+2)*64 + (9+2)*32 + (32+2)*64 "
        "+ (64*9+2)*64 + (9+2)*384 + (384+2)*64 + (64*9+2)*64 + 2*(9+2)*384 + (384+2)*128 + (9+2)*64 "
        "+ (64+2)*128 + 3*((128*9+2)*128 + (9+2)*768 + (768+2)*128) + 2*128 + (128+2)*128 + 128*9*128 "
        "+ 3*(128*9+2)*128 + 2*((9+2)*128 + 128*128) + (128*9+2)*1024 + (1024+1)*11 + (16*9+2)*128 "
        "+ (32*9+2)*128 + (64*9+2)*128 + (128*9+2)*128 + 4*(128+1)*11"
    ),
}
"""Parameters of each model, counted layer by layer: (in*k*k + 1)*out of a convolution with bias, (in + 1)*out of a
linear layer, 2*channels of a normalisation layer, 4*hidden*(in + hidden + 2) of an LSTM layer.
"""


@pytest.mark.parametrize("row", OVERVIEW, ids=lambda row: row[0])
def test_parameters_of_the_table(row):
    text, _, input_shape, classes, parameters, _ = row
    shape = tuple(map(int, input_shape.split("x")))
    assert parameter_count(text.strip("`"), shape, number(classes)) == number(parameters)


@pytest.mark.parametrize("row", OVERVIEW, ids=lambda row: row[0])
def test_parameters_counted_by_hand(row):
    assert value(ARITHMETIC[row[0].strip("`")]) == number(row[4])


def test_every_model_is_in_the_table():
    assert set(names()) <= {row[0].strip("`") for row in OVERVIEW}


def test_the_table_lists_the_examples_of_the_specs():
    examples = [f"`{example.text}`" for spec in MODELS.values() for example in spec.examples]
    assert [row[0] for row in OVERVIEW] == examples
