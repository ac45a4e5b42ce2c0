"""What examples in the documentation register is forgotten after each page."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fedflat.algorithms import composition
from fedflat.algorithms.table import NAMED
from fedflat.models import MODELS


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """Names of algorithms, parts and models as they were before."""
    tables = (NAMED, composition.PARTS, composition._NAMES, MODELS)
    before = [dict(table) for table in tables]
    yield
    for table, was in zip(tables, before, strict=True):
        table.clear()
        table.update(was)
