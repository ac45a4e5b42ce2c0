"""Undo registrations made by the examples of a page."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def undo_registrations(restore_registries: None) -> None:
    """Restore the registered components after each test."""
