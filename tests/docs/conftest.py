"""Examples of a page run with few local steps and without worker processes, and their registrations are undone."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def undo_registrations(restore_registries: None, few_steps: None) -> None:
    """Restore the registered components after each test."""


@pytest.fixture(autouse=True)
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Train in this process whatever ``workers`` is, because a process takes seconds to start."""
    monkeypatch.setattr("fedflat.engines.cpu.engine.is_sendable", lambda value: False)
