"""Runs on quadratics draw no random numbers, so torch is not seeded: that takes longer than a client's round."""

import pytest


@pytest.fixture(autouse=True)
def unseeded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedflat.engines.round.client.seed_torch", lambda *_: None, raising=False)
