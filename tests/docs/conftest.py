"""Undo registrations made by the examples of a page."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fedflat.algorithms import composition
from fedflat.algorithms.table import NAMED
from fedflat.models import MODELS


@pytest.fixture(autouse=True)
def unregister_examples() -> Iterator[None]:
    """Restore the registered algorithms, parts and models after each page."""
    tables = (NAMED, composition.PARTS, composition._NAMES)
    before, models = [dict(table) for table in tables], set(MODELS)
    yield
    for table, entries in zip(tables, before, strict=True):
        table.clear()
        table.update(entries)
    for name in set(MODELS) - models:
        MODELS.unregister(name)
