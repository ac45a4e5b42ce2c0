"""Check what docs/generate.py derives from the code: equations, pages, curves and partition pictures."""

from __future__ import annotations

import doctest
import importlib
import re
import sys
from collections.abc import Iterator
from xml.etree import ElementTree

import numpy as np
import pytest

from fedflat.algorithms.cards import CARDS
from fedflat.algorithms.composition import parts
from fedflat.algorithms.description import describe
from fedflat.data import DATASETS, PARTITION_MODIFIERS, PARTITIONERS
from fedflat.models import MODELS
from tests.docs.blocks import ROOT

DOCS = ROOT / "docs"


@pytest.fixture(scope="module", autouse=True)
def docs_on_path() -> Iterator[None]:
    """Make ``making`` importable, as docs/generate.py does."""
    sys.path.insert(0, str(DOCS))
    yield
    sys.path.remove(str(DOCS))


@pytest.mark.parametrize("module", ["markdown", "equations", "notebooks"])
def test_doctests(module: str) -> None:
    assert doctest.testmod(importlib.import_module(f"making.{module}")).failed == 0


def test_reference_describes_arguments_and_results() -> None:
    page = (DOCS / "reference" / "testing.md").read_text("utf-8")
    assert re.search(r"^\| `claims` \| `Sequence\[str\]` \| `\(\)` \| .*properties", page, re.MULTILINE)
    assert re.search(r"^Returns: .*`ALWAYS`", page, re.MULTILINE)
    method = (DOCS / "reference" / "results.md").read_text("utf-8")
    assert "\n    | `network` | `nn.Module \\| None` | `None` | " in method


def test_every_part_has_a_title_equations_and_a_doctest() -> None:
    from making.equations import mathml

    for name, (_, spec) in parts().items():
        description = describe(spec)
        assert description.title and description.equations, name
        assert ElementTree.fromstring(mathml(list(description.equations))).tag == "div", name
        assert ">>> " in (spec.__doc__ or ""), name
    assert describe(parts()["scaffold"][1]).equations == (
        "d_k = g - c_i + c",
        "c_i+ = c_i - c + (z - y_K) / H",
        "c <- c + (|S| / N) mean_S (c_i+ - c_i)",
    )


def test_every_component_has_a_page() -> None:
    for folder, names in (
        ("algorithms", CARDS),
        ("data", DATASETS),
        ("partitions", [*PARTITIONERS, *PARTITION_MODIFIERS]),
        ("models", MODELS),
    ):
        assert {name for name in names if not (DOCS / folder / f"{name}.md").exists()} == set()
    assert (DOCS / "algorithms" / "fedmoswa.md").read_text("utf-8").startswith("# FedMoSWA\n")


def test_curves_match_the_table_on_digits() -> None:
    from making.curve import measured

    assert set(measured()["curves"]) == set(CARDS)
    page = (DOCS / "digits.md").read_text()
    for name, curve in measured()["curves"].items():
        (mean, std), (last, last_std) = curve["mean of all"], curve["last"]
        assert f"| `{name}` | {mean:.2f} ± {std:.2f} | {last:.2f} ± {last_std:.2f} |" in page


def test_bars_of_a_partition_picture_add_up() -> None:
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
