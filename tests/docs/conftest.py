"""Examples of a page run with few local steps, and their registrations are undone."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def undo_registrations(restore_registries: None, few_steps: None) -> None:
    """Restore the registered components after each test."""
