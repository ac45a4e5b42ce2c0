"""The tables of docs/partitions.md agree with the code; they depend on labels only, so no images are needed."""

from __future__ import annotations

import re

import numpy as np
import pytest

from fedflat.data import PARTITION_MODIFIERS, PARTITIONERS, make_partition
from fedflat.text import parameters
from tests.docs.blocks import ROOT, tables

AVAILABLE, MODIFIERS, TEN, HUNDRED = tables("partitions.md")


def test_every_partition_and_parameter_is_on_the_page() -> None:
    for rows, known in ((AVAILABLE, PARTITIONERS), (MODIFIERS, PARTITION_MODIFIERS)):
        said = {row[0].lstrip("+").partition("(")[0]: re.findall(r"\w+", row[0].partition("(")[2]) for row in rows}
        assert said == {name: [field.name for field in parameters(spec)] for name, spec in known.items()}


@pytest.mark.parametrize(
    ("classes", "row"), [(10, row) for row in TEN] + [(100, row) for row in HUNDRED], ids=lambda v: v and str(v)[:40]
)
def test_the_measured_tables(classes: int, row: list[str]) -> None:
    text, clients, *said = row
    targets = np.arange(50_000) % classes
    asked = 100 if "held-out" in text else int(clients)
    described = make_partition(text, targets, classes, asked, 0, coarse=targets // 5).describe(targets, classes)
    sizes = described["sizes"]
    assert described["clients"] == int(clients)
    assert said == [
        f"{sizes['min']} / {sizes['median']:g} / {sizes['max']}",
        f"{100 * described['coverage']:.1f} %",
        f"{described['duplicates']:,}",
        f"{described['classes_per_client']:.2f}",
        f"{described['heterogeneity']:.3f}",
    ]


def test_stated_properties_hold() -> None:
    promised = {row[0].partition("(")[0]: row[2] == "yes" for row in AVAILABLE}
    assert promised == {name: spec.disjoint for name, spec in PARTITIONERS.items()}
    for row in TEN:
        if promised[re.match(r"[\w-]+", row[0])[0]]:  # type: ignore[index]
            assert row[3] == "100.0 %" and row[4] == "0"


def test_the_picture_of_the_page_exists() -> None:
    assert (ROOT / "docs/images/partitions.png").read_bytes().startswith(b"\x89PNG")
