"""Runs: user-supplied objects, callbacks, metrics, saved models and workers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedflat
from fedflat.data import from_arrays
from fedflat.engines.cpu.engine import LoopEngine
from fedflat.errors import UserError
from fedflat.experiment.callback import RunProgress, RunView
from fedflat.experiment.config import parse_config
from fedflat.experiment.run import Run
from fedflat.experiment.store.client_states import CachedRowStore, FileRowStore

SMALL = {"rounds": 6, "clients": 12, "clients_per_round": 4, "local_steps": 3, "workers": 1, "model": "mlp(hidden=8)"}


def test_summaries_accept_short_model_names_and_known_metrics() -> None:
    result = fedflat.run("fedavg+wima(window=2)", **(SMALL | {"rounds": 2}))
    assert result.summary("wima") == result.summary("wima(window=2)") != result.summary("server")
    with pytest.raises(UserError, match="evaluated model 'ema'"):
        result.summary("ema")
    with pytest.raises(UserError, match="metric 'f1'; expected one of accuracy, loss"):
        result.summary("server", "f1")
    with pytest.raises(UserError, match="metric 'f1'"):
        result.plot("f1")
    assert result.plot("loss").axes


def test_averages_do_not_change_training() -> None:
    alone = fedflat.run("fedmoswa", **SMALL).history
    with_averages = fedflat.run("fedmoswa+wima(window=3)+swa(start=0.5)+ema", **SMALL).history
    assert [r["test"]["server"] for r in alone] == [r["test"]["server"] for r in with_averages]
    assert set(with_averages[-1]["test"]) == {"server", "wima(window=3)", "swa(start=0.5)", "ema"}


@pytest.mark.parametrize(("cores", "clients_per_round", "workers"), [(2, 1, 2), (4, 20, 4), (64, 3, 8), (64, 20, 20)])
def test_the_default_number_of_workers(
    monkeypatch: pytest.MonkeyPatch, cores: int, clients_per_round: int, workers: int
) -> None:
    monkeypatch.setattr("fedflat.experiment.setup.engine.available_cores", lambda: cores)
    long = {"federation": {"clients_per_round": clients_per_round}, "training": {"rounds": 100_000}}
    engine = Run(parse_config({**long, "engine": {"device": "cpu", "compile": "off"}})).engine
    assert isinstance(engine, LoopEngine) and engine.workers == workers


def test_user_supplied_data_and_model() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, 5)).astype(np.float32)
    y = (x[:, 0] > 0).astype(np.int64)
    data = from_arrays(x[:200], y[:200], x[200:], y[200:], name="mine")
    result = fedflat.run(
        "fedavg",
        dataset=data,
        model=nn.Linear(5, 2),
        clients=4,
        clients_per_round=4,
        rounds=5,
        workers=1,
        partition="iid",
        lr=0.5,
    )
    assert result.summary().last > 0.9 and result.config.model == "custom:Linear"


def test_callbacks_see_every_round() -> None:
    seen: list[tuple[str, int]] = []

    class Watcher(fedflat.Callback):
        def began(self, run: RunView) -> None:
            promised = [name for view in (RunProgress, RunView) for name in vars(view) if not name.startswith("_")]
            assert "models" in promised and [name for name in promised if not hasattr(run, name)] == []
            seen.append(("began", run.rounds))

        def round_done(self, run: RunView) -> None:
            seen.append(("round", run.rounds))

        def ended(self, run: RunView, record: object) -> None:
            seen.append(("ended", run.rounds))

    fedflat.run("fedavg", callbacks=[Watcher()], eval_every=3, **SMALL)
    assert seen == [("began", 0), *(("round", n) for n in range(1, 7)), ("ended", 6)]


def test_a_saved_model_has_the_evaluated_accuracy(tmp_path: Path) -> None:
    result = fedflat.run("fedavg+ema(decay=0.5)", out=tmp_path / "run", **SMALL)
    loaded = fedflat.load(tmp_path / "run")
    assert loaded.history == result.history
    for name in ("server", "ema(decay=0.5)"):
        run = Run(loaded.config)
        outputs = loaded.model(name)(run.problem.normalised(run.problem.evaluation_sets["test"].inputs))
        accuracy = (outputs.argmax(1) == run.problem.evaluation_sets["test"].targets).float().mean().item()
        assert accuracy == pytest.approx(result.history[-1]["test"][name]["accuracy"])


def test_a_small_cache_writes_early_and_loses_nothing(tmp_path: Path) -> None:
    rows = CachedRowStore(FileRowStore(tmp_path, 3, torch.float64), max_bytes=2 * 24)
    for round in range(1, 8):
        rows.current_round = round
        for key in range(5):
            rows[key] = torch.full((3,), 10.0 * round + key, dtype=torch.float64)
        if round in (3, 6):
            rows.flush()
            rows.commit(round)
    assert [rows[key][0].item() for key in range(5)] == [70.0, 71.0, 72.0, 73.0, 74.0] and len(rows._rows) <= 2
    rows.flush()
    again = FileRowStore(tmp_path, 3, torch.float64)
    again.rewind(6)
    assert [again[key][0].item() for key in range(5)] == [60.0, 61.0, 62.0, 63.0, 64.0]


def test_each_of_the_last_rounds_is_evaluated_on_request() -> None:
    result = fedflat.run("fedavg", evaluation__every=4, evaluation__final=3, **(SMALL | {"rounds": 10}))
    assert [record["round"] for record in result.history] == [0, 4, 8, 9, 10]
    plain = fedflat.run("fedavg", evaluation__every=4, **(SMALL | {"rounds": 10}))
    assert [record["round"] for record in plain.history] == [0, 4, 8, 10]
    assert plain.history[-1] == result.history[-1]


@dataclass(frozen=True)
class TopTwo(fedflat.Classification):
    """Reports two metrics, of which the second is the primary one."""

    metric: str = "top2"

    def sums(self, output: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
        among = (output.topk(2).indices == target[:, None]).any(1)
        return {**super().sums(output, target), "top2": among.sum()}


def test_the_primary_metric_of_a_task_is_stored_with_the_run(tmp_path: Path) -> None:
    result = fedflat.run("fedavg", task=TopTwo(), out=tmp_path / "run", **SMALL)
    last = result.history[-1]["test"]["server"]
    assert result.metric == fedflat.load(tmp_path / "run").metric == "top2"
    assert result.summary().last == last["top2"] > last["accuracy"]


def test_a_run_stops_at_a_target_of_the_loss() -> None:
    task = fedflat.Classification(metric="loss")
    result = fedflat.run("fedavg", task=task, stop__target=2.25, evaluation__every=1, **SMALL)
    losses = [record["test"]["server"]["loss"] for record in result.history]
    assert result.status == "stopped" and losses[0] > 2.25 >= losses[-1]
    assert result.summary().best == min(losses) < losses[0]


def test_a_metric_that_the_task_does_not_report_is_refused() -> None:
    with pytest.raises(UserError, match=r"'top3', .* loss, accuracy, top2"):
        fedflat.run("fedavg", task=TopTwo("top3"), **SMALL)


def test_a_model_without_linear_layers_trains() -> None:
    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros(64, 10))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.flatten(1) @ self.w

    settings: dict[str, Any] = {"rounds": 1, "clients": 4, "clients_per_round": 2, "local_steps": 1, "workers": 1}
    assert fedflat.run("fedavg+wima", model=Product(), **settings).status == "finished"
    with pytest.raises(UserError, match="no linear layer"):
        fedflat.run("fedavg+wima(part=classifier)", model=Product(), **settings)
