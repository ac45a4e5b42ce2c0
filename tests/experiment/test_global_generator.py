"""Runs neither depend on nor change torch's global state: its random generator and its grad mode."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fedflat
from fedflat.data import from_clients
from fedflat.experiment.analysis.run_model import open_model_or_client
from fedflat.randomness import RngStream
from fedflat.testing import check_model
from fedflat.testing.quadratics import Quadratics, run_rounds

SETTINGS: dict[str, Any] = {
    "partition": "natural",
    "clients": 3,
    "clients_per_round": 2,
    "rounds": 2,
    "local_steps": 2,
    "batch_size": 5,
}
ESTIMATED: dict[str, Any] = {"algorithm": "fedavg+wima(window=2)", "evaluation__statistics": "estimated"}
"""Statistics are estimated in training mode, so that dropout draws outside of training too."""


def clients() -> list[tuple[torch.Tensor, torch.Tensor]]:
    draw = torch.Generator().manual_seed(0)
    return [(torch.randn(12, 4, generator=draw), torch.randint(2, (12,), generator=draw)) for _ in range(3)]


def module() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 2))


def run(**more: Any) -> fedflat.Result:
    return fedflat.run(
        dataset=from_clients(clients()),
        **(SETTINGS | {"algorithm": "fedavg", "model": module(), "workers": 1} | more),
    )


def is_kept(call: Callable[[], object]) -> bool:
    """Check that the global generator has the same state afterwards."""
    before = torch.get_rng_state()
    call()
    return torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    "more", [{}, {"engine": "lanes"}, {"algorithm": "mime"}, ESTIMATED], ids=["loop", "lanes", "mime", "estimated"]
)
def test_a_run_preserves_the_global_generator(more: dict[str, Any]) -> None:
    assert is_kept(lambda: run(**more))


def test_fresh_modules_between_runs_differ() -> None:
    drawn = []
    for _ in range(3):
        drawn.append(float(nn.Linear(4, 2).weight.sum().detach()))
        for _ in fedflat.rounds("fedavg", module(), clients(), rounds=1, local_steps=1, batch_size=5, workers=1):
            drawn.append(float(torch.rand(())))
    assert len(set(drawn)) == len(drawn) == 6


def test_user_draws_do_not_change_rounds() -> None:
    def history(draws: int) -> list[dict[str, Any]]:
        torch.manual_seed(0)
        loop = fedflat.rounds(
            model=module(), clients_data=clients(), workers=1, rounds=3, local_steps=2, batch_size=5, **ESTIMATED
        )
        for _ in loop:
            torch.rand(draws)
        return loop.history

    assert history(0) == history(7)


def test_leaving_a_rounds_loop_preserves_the_generator(tmp_path: Path) -> None:
    def left() -> None:
        loop = fedflat.rounds(
            model=module(), clients_data=clients(), workers=1, rounds=3, batch_size=5, out=tmp_path / "run", **ESTIMATED
        )
        next(loop)
        loop.close()

    assert is_kept(left)


def test_inspecting_a_run_preserves_the_generator(tmp_path: Path) -> None:
    result = fedflat.run(
        "fedavg",
        rounds=1,
        clients=20,
        clients_per_round=2,
        local_steps=1,
        model="mlp(hidden=4)",
        workers=1,
        out=tmp_path / "run",
    )
    assert is_kept(lambda: result.evaluate(on=("test", "fine-tuned")))
    assert is_kept(lambda: open_model_or_client(f"{tmp_path / 'run'}:client3"))


def test_checks_preserve_the_generator() -> None:
    assert is_kept(lambda: check_model(module(), (4,), 2))
    assert is_kept(lambda: run_rounds(fedflat.algorithm("fedavg"), Quadratics(clients=2), [[0, 1]]))


def test_runs_in_threads_do_not_affect_each_other() -> None:
    data = from_clients(clients())

    def history(_: int) -> list[dict[str, Any]]:
        return fedflat.run("fedavg", dataset=data, model="mlp(hidden=4)", **SETTINGS, seed=1, workers=1).history

    with ThreadPoolExecutor(4) as threads:
        assert all(other == history(0) for other in threads.map(history, range(12)))


@pytest.mark.parametrize(
    "more", [{}, {"engine": "lanes"}, {"workers": 2}, {"model": "mlp(hidden=4)", "engine__compile": "on"}]
)
def test_a_run_works_inside_no_grad(more: dict[str, Any], tmp_path: Path) -> None:
    flatness = {"flatness__every": 1, "flatness__what": "sharpness"}
    expected = run(**more, **flatness, out=tmp_path / "outside")
    with torch.no_grad():
        inside = run(**more, **flatness, out=tmp_path / "inside")
        assert not torch.is_grad_enabled() and inside.history == expected.history
        assert inside.evaluate(on=("fine-tuned",)) == expected.evaluate(on=("fine-tuned",))
        for _ in fedflat.rounds(model=module(), clients_data=clients(), workers=1, rounds=1, batch_size=5):
            assert not torch.is_grad_enabled()
        with pytest.raises(fedflat.UserError, match="reduction='mean'"):
            fedflat.rounds(model=module(), clients_data=clients(), loss=nn.CrossEntropyLoss(reduction="sum"))
        assert not torch.is_grad_enabled()


def test_a_run_inside_inference_mode_is_rejected() -> None:
    loop = fedflat.rounds(model=module(), clients_data=clients(), workers=1, rounds=1, batch_size=5)
    with torch.inference_mode():
        for call in (run, lambda: next(loop)):
            with pytest.raises(fedflat.UserError, match=r"inference_mode\(\) disables gradients"):
                call()


def test_streams_that_overlap_restore_the_callers_state() -> None:
    """Runs in several threads end in any order."""

    def overlapping() -> None:
        first, second = RngStream().active(), RngStream().active()
        first.__enter__()
        torch.rand(3)
        second.__enter__()
        torch.rand(5)
        first.__exit__(None, None, None)
        torch.rand(7)
        second.__exit__(None, None, None)

    assert is_kept(overlapping)
