"""Undo registrations made by the examples of a page."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fedflat.algorithms.named import NAMED
from fedflat.algorithms.registration import PART_REGISTRIES
from fedflat.models import MODELS


@pytest.fixture(autouse=True)
def restore_registries() -> Iterator[None]:
    """Restore the registered algorithms, parts and models after each test."""
<<<<<<< HEAD
    registries = (NAMED, *PART_REGISTRIES.values())
    before, models = [set(registry) for registry in registries], dict(MODELS)
    yield
    for registry, names in zip(registries, before, strict=True):
        for name in set(registry) - names:
            registry.unregister(name)
    MODELS.clear()
    MODELS.update(models)
=======
    tables = (NAMED, composition.PARTS, composition._NAMES)
    before, models = [dict(table) for table in tables], set(MODELS)
    yield
    for table, entries in zip(tables, before, strict=True):
        table.clear()
        table.update(entries)
    for name in set(MODELS) - models:
        MODELS.unregister(name)
>>>>>>> data
