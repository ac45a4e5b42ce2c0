"""Undo registrations made by the examples of a page."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fedflat.algorithms.composition import PART_REGISTRIES
from fedflat.algorithms.named import NAMED
from fedflat.models import MODELS


@pytest.fixture(autouse=True)
def restore_registries() -> Iterator[None]:
    """Restore the registered algorithms, parts and models after each test."""
    registries = (NAMED, *PART_REGISTRIES.values(), MODELS)
    before = [set(registry) for registry in registries]
    yield
    for registry, names in zip(registries, before, strict=True):
        for name in set(registry) - names:
            registry.unregister(name)
