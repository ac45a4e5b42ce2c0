"""The parts of docs/generate.py that could go wrong in silence."""

from __future__ import annotations

import doctest
import importlib
import sys
from collections.abc import Iterator
from xml.etree import ElementTree

import numpy as np
import pytest

from fedflat.algorithms.named import CARDS
from fedflat.data import DATASETS, PARTITION_MODIFIERS, PARTITIONERS
from fedflat.models import MODELS
from tests.docs.blocks import ROOT

DOCS = ROOT / "docs"


@pytest.fixture(scope="module", autouse=True)
def importable() -> Iterator[None]:
    """docs/ on the path, as for its own script."""
    sys.path.insert(0, str(DOCS))
    yield
    sys.path.remove(str(DOCS))


@pytest.mark.parametrize("name", ["markdown", "equations"])
def test_doctests(name: str) -> None:
    assert doctest.testmod(importlib.import_module(f"making.{name}")).failed == 0


def test_every_part_has_equations() -> None:
    from making.equations import said_of

    without = [name for name, (_, spec) in PARTS.items() if not said_of(spec).equations]
    assert without == []
    assert said_of(PARTS["scaffold"][1]).equations == (
        "d_k = g - c_i + c",
        "then c_i+ by option",
        "c ← c + (|S|/N) mean(c_i+ - c_i)",
    )
    assert said_of(PARTS["acg"][1]).equations[-1] == "x ← x + m"


def test_there_is_a_page_for_everything() -> None:
    for folder, names in (
        ("algorithms", CARDS),
        ("data", DATASETS),
        ("partitions", PARTITIONERS | PARTITION_MODIFIERS),
        ("models", MODELS),
    ):
        assert {name for name in names if not (DOCS / folder / f"{name}.md").exists()} == set()


def test_curves_are_those_of_the_table() -> None:
    from making.curve import measured

    assert set(measured()["curves"]) == set(CARDS)
    page = (DOCS / "digits.md").read_text()
    for name, found in measured()["curves"].items():
        (mean, std), (last, last_std) = found["mean of all"], found["last"]
        assert f"| `{name}` | {mean:.2f} ± {std:.2f} | {last:.2f} ± {last_std:.2f} |" in page


def test_columns_of_a_split_add_up() -> None:
    from making.partitions import EXAMPLES, histogram, picture

    counts = histogram("dirichlet(alpha=0.1)")
    assert counts.sum() == EXAMPLES and len(counts) == 50
    root = ElementTree.fromstring(picture(("dirichlet(alpha=0.1)",)))
    paths = [node.attrib["d"] for node in root.iter("{http://www.w3.org/2000/svg}path")]
    assert sum(path.count("M") for path in paths) == np.count_nonzero(counts)
    heights = sum(
        float(piece.split("v")[1].split("h")[0]) for path in paths for piece in path.split("z") if "v" in piece
    )
    assert heights == pytest.approx(EXAMPLES * 132 / counts.sum(1).max(), rel=0.01)
