"""Lanes: cohorts that do not fit are trained in turns, and batches that are seldom are not captured, with the same result."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from fedflat.bench.setting import RandomImages
from fedflat.engines.lane import SELDOM, DoesNotFit, Lane
from fedflat.errors import UserError
from fedflat.experiment.config import config
from fedflat.experiment.run import Run


def trained(rounds: int = 2) -> Run:
    values = {
        "algorithm": "scaffold",
        "model": "mlp(hidden=8)",
        "data": {"clients": 8, "split": "dirichlet(alpha=0.5)"},
        "federation": {"per_round": 5},
        "training": {"rounds": rounds, "epochs": 2, "batch": 10},
        "evaluation": {"every": rounds},
        "engine": {"name": "lanes", "device": "cpu"},
    }
    run = Run(config(values), data=RandomImages(size=300, side=8).dataset())
    run.go()
    return run


def lanes_that_fit(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all lanes but the first few find the device full."""
    real, seen = Lane._captured, []

    def captured(lane: Lane, work: Callable[[], None]) -> Callable[[], None]:
        if lane not in seen:
            seen.append(lane)
        if seen.index(lane) >= count:
            raise DoesNotFit(3 * 2**30, 2**30)
        return real(lane, work)

    monkeypatch.setattr(Lane, "_captured", captured)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_cohort_that_does_not_fit_is_split(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    together = trained().server.model.weights
    lanes_that_fit(count, monkeypatch)
    run = trained()
    assert len(run.engine.lanes) == count  # type: ignore[attr-defined]
    assert torch.equal(run.server.model.weights, together)


def test_a_client_that_does_not_fit_is_told_of_with_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    lanes_that_fit(0, monkeypatch)
    with pytest.raises(UserError, match=r"needs 3\.0 GB more and 1\.0 GB are free; lower training\.batch \(now 10\)"):
        trained()


def test_batches_that_are_seldom_are_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    captured = trained(SELDOM + 4)
    sizes = [set(lane._graphs) for lane in captured.engine.lanes]  # type: ignore[attr-defined]
    used = [lane._uses for lane in captured.engine.lanes]  # type: ignore[attr-defined]
    assert all(size == 10 or uses[size] > SELDOM for some, uses in zip(sizes, used, strict=True) for size in some)
    assert any(set(uses) - some for some, uses in zip(sizes, used, strict=True))
    monkeypatch.setattr("fedflat.engines.lane.SELDOM", 0)
    assert torch.equal(trained(SELDOM + 4).server.model.weights, captured.server.model.weights)


def test_a_cohort_of_one_trains_as_in_the_loop() -> None:
    values = {
        "algorithm": "scaffold",
        "model": "mlp(hidden=8)",
        "data": {"clients": 8, "split": "iid"},
        "federation": {"per_round": 1},
        "training": {"rounds": 2, "steps": 3},
    }
    data = RandomImages(size=300, side=8).dataset()
    loop, lanes = (
        Run(config({**values, "engine": {"name": name, "device": "cpu", "workers": 1}}), data=data) for name in ("loop", "lanes")
    )
    assert torch.allclose(loop.go().models["server"].weights, lanes.go().models["server"].weights, atol=1e-6)
