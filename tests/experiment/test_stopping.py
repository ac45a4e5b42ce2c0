"""When runs stop: targets, patience, time budgets and divergence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import fedflat

SMALL = {"rounds": 6, "clients": 12, "clients_per_round": 4, "local_steps": 3, "workers": 1, "model": "mlp(hidden=8)"}


def test_a_reached_target_stops_the_run() -> None:
    result = fedflat.run("fedavg", stop__target=0.3, **(SMALL | {"rounds": 50}))
    assert result.status == "stopped" and "reached the target 0.3" in result.record.reason
    assert result.history[-1]["test"]["server"]["accuracy"] >= 0.3 > result.history[-2]["test"]["server"]["accuracy"]


def test_patience_uses_the_validation_split() -> None:
    settings = SMALL | {"rounds": 60, "lr": 1e-6}
    result = fedflat.run("fedavg", data__validation=0.2, stop__patience=1, **settings)
    assert result.status == "stopped" and result.history[-1]["round"] < 60
    assert "has not improved for 1 evaluation (round" in result.record.reason
    with pytest.raises(fedflat.UserError, match="validation"):
        fedflat.run("fedavg", stop__patience=3, **SMALL)


def test_a_time_budget_pauses_a_run_that_can_be_resumed(tmp_path: Path) -> None:
    settings = SMALL | {"rounds": 4}
    paused = fedflat.run("scaffold", stop__seconds=1e-6, out=tmp_path / "run", **settings)
    assert paused.status == "paused" and paused.history[-1]["round"] == 1
    while paused.status == "paused":
        paused = fedflat.resume(tmp_path / "run")
    whole = fedflat.run("scaffold", **settings)
    assert paused.status == "finished" and paused.history == whole.history


@pytest.mark.parametrize(
    ("algorithm", "cause"),
    [
        ("fedavg", "learning rate"),
        ("fedavgm(beta=0.99,server_lr=1e20)", "server momentum"),
        ("feddyn(alpha=0.5)", "dual"),
        ("adabest(mu=5)", "AdaBest"),
        ("fedavg(server_lr=1e20)", "server_lr"),
        ("fedsam(rho=1e30)", "rho=1e+30"),
    ],
)
def test_a_diverging_run_states_its_cause(algorithm: str, cause: str) -> None:
    result = fedflat.run(algorithm, **(SMALL | {"rounds": 60, "lr": 1e4 if algorithm == "fedavg" else 30.0}))
    assert result.status == "diverged"
    assert cause in result.record.reason and "round" in result.record.reason
    json.dumps(result.history, allow_nan=False)
