"""Runs: stopping, divergence, BatchNorm statistics, user-supplied objects, callbacks and settings."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedflat
from fedflat.api import make_config
from fedflat.data import from_arrays, load
from fedflat.engines.cpu.engine import LoopEngine
from fedflat.errors import UserError
from fedflat.experiment.callback import RunView
from fedflat.experiment.config import Config, config, setting_names
from fedflat.experiment.run import Run
from fedflat.experiment.store.client_states import CachedRowStore, FileRowStore
from fedflat.setting_names import SHORT_NAMES, SYNONYMS

SMALL = {"rounds": 6, "clients": 12, "clients_per_round": 4, "local_steps": 3, "workers": 1, "model": "mlp(hidden=8)"}


class Normalised(nn.Module):
    """A classifier with BatchNorm, always with the same weights."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 10))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layers(inputs)


def test_a_target_stops_the_run_and_is_named() -> None:
    result = fedflat.run("fedavg", stop__target=0.3, **(SMALL | {"rounds": 50}))
    assert result.status == "stopped" and "reached the target 0.3" in result.record.reason
    assert result.history[-1]["test"]["server"]["accuracy"] >= 0.3 > result.history[-2]["test"]["server"]["accuracy"]


def test_patience_looks_at_the_validation_split() -> None:
    settings = SMALL | {"rounds": 60, "lr": 1e-6}
    result = fedflat.run("fedavg", data__validation=0.2, stop__patience=3, **settings)
    assert result.status == "stopped" and result.history[-1]["round"] < 60
    with pytest.raises(fedflat.UserError, match="validation"):
        fedflat.run("fedavg", stop__patience=3, **SMALL)


def test_a_time_budget_pauses_a_run_that_then_goes_on(tmp_path: Path) -> None:
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
def test_a_diverging_run_ends_with_its_cause(algorithm: str, cause: str) -> None:
    result = fedflat.run(algorithm, **(SMALL | {"rounds": 60, "lr": 1e4 if algorithm == "fedavg" else 30.0}))
    assert result.status == "diverged"
    assert cause in result.record.reason and "round" in result.record.reason
    json.dumps(result.history, allow_nan=False)


def test_the_rest_of_a_comparison_goes_on_after_a_divergence() -> None:
    comparison = fedflat.compare(["fedavg(server_lr=1e30)", "fedavg"], seeds=1, **SMALL)
    first, second = comparison.table()
    assert (first["diverged"], second["diverged"]) == (1, 0) and "mean_last" not in first and second["last"].mean > 0.1


def test_a_comparison_counts_each_seed_once_and_takes_one_text() -> None:
    with pytest.raises(UserError, match=r"seeds=\[1, 1\]"):
        fedflat.compare(["fedavg"], seeds=[1, 1], **SMALL)
    comparison = fedflat.compare("fedavg", seeds=1, **(SMALL | {"rounds": 1}))
    assert [row["label"] for row in comparison.table()] == ["fedavg"]
    assert comparison.table(0.05) == comparison.table([0.05]) and "rounds to 0.05" in comparison.table(0.05)[0]


@pytest.mark.parametrize("seeds", ["2", [0.5], 2.0, None, 0, -1, [], [-1], ["1"], [0, np.int64(0)]], ids=repr)
def test_seeds_that_are_none_are_refused_before_anything_is_written(seeds: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="seeds="):
        fedflat.compare("fedavg", seeds=seeds, out=tmp_path / "all", **SMALL)
    assert not (tmp_path / "all").exists()


@pytest.mark.parametrize("seeds", [np.arange(2), torch.arange(2), np.int64(2), range(2)], ids=repr)
def test_seeds_may_be_whole_numbers_of_any_kind(seeds: Any, tmp_path: Path) -> None:
    comparison = fedflat.compare(
        "fedavg", seeds=seeds, out=tmp_path, jobs=1, **(SMALL | {"rounds": 1, "local_steps": 1})
    )
    assert [record.config.seed for record in comparison.records] == [0, 1]
    assert (tmp_path / "fedavg/seed-1/config.yaml").exists()


def test_figures_by_the_short_name_of_a_model_and_by_known_metrics() -> None:
    result = fedflat.run("fedavg+wima(window=2)", **(SMALL | {"rounds": 2}))
    assert result.summary("wima") == result.summary("wima(window=2)") != result.summary("server")
    with pytest.raises(UserError, match="evaluated model 'ema'"):
        result.summary("ema")
    with pytest.raises(UserError, match="metric 'f1'; expected one of accuracy, loss"):
        result.summary("server", "f1")
    with pytest.raises(UserError, match="metric 'f1'"):
        result.plot("f1")
    assert result.plot("loss").axes


def test_compared_algorithms_start_from_the_same_model_and_split(tmp_path: Path) -> None:
    def compared() -> list[list[dict[str, object]]]:
        return [
            record.history for record in fedflat.compare(["fedavg", "scaffold"], seeds=2, out=tmp_path, **SMALL).records
        ]

    histories = compared()
    for fedavg, scaffold in (histories[:2], histories[2:]):
        # Variates are zero in the first round, so SCAFFOLD takes exactly FedAvg's steps if it sees the same batches.
        for key in ("round", "train_loss", "test", "samples"):
            assert [record[key] for record in fedavg[:2]] == [record[key] for record in scaffold[:2]]
        assert fedavg[2]["test"] != scaffold[2]["test"]
    partitions = [json.loads(path.read_text()) for path in tmp_path.glob("*/*/partition.json")]
    assert len(partitions) == 4 and len({partition["hash"] for partition in partitions}) == 2
    assert compared() == histories


def test_an_average_changes_nothing_in_training() -> None:
    alone = fedflat.run("fedmoswa", **SMALL).history
    beside = fedflat.run("fedmoswa+wima(window=3)+swa(start=0.5)+ema", **SMALL).history
    assert [r["test"]["server"] for r in alone] == [r["test"]["server"] for r in beside]
    assert set(beside[-1]["test"]) == {"server", "wima(window=3)", "swa(start=0.5)", "ema"}


def test_statistics_are_averaged_estimated_or_kept() -> None:
    averaged = fedflat.run("fedavg+ema(decay=0.5)", **(SMALL | {"model": Normalised()}))
    estimated = fedflat.run(
        "fedavg+ema(decay=0.5)", evaluation__statistics="estimated", **(SMALL | {"model": Normalised()})
    )
    one, other = (r.record.models["ema(decay=0.5)"] for r in (averaged, estimated))
    assert torch.equal(one.weights, other.weights) and not torch.equal(one.buffers, other.buffers)
    server = averaged.record.models["server"]
    assert server.integer_buffers["layers.2.num_batches_tracked"] == 3 * 6


@pytest.mark.parametrize(("cores", "clients_per_round", "workers"), [(2, 1, 2), (4, 20, 4), (64, 3, 8), (64, 20, 20)])
def test_no_more_workers_than_have_something_to_do(
    monkeypatch: pytest.MonkeyPatch, cores: int, clients_per_round: int, workers: int
) -> None:
    monkeypatch.setattr("fedflat.experiment.setup.engine.available_cores", lambda: cores)
    engine = Run(config({"federation": {"clients_per_round": clients_per_round}, "engine": {"device": "cpu"}})).engine
    assert isinstance(engine, LoopEngine) and engine.workers == workers


def test_estimated_statistics_are_those_of_the_training_data() -> None:
    model = Normalised()
    run = Run(
        config({"data": {"clients": 4}, "federation": {"clients_per_round": 2}, "engine": {"workers": 1}}), model=model
    )
    weights, _, integer_buffers = run.problem.initial()
    buffers = run.problem.buffers.views(run.problem.estimate_buffers(weights, integer_buffers))
    train = run.problem.data.train.inputs
    hidden = model.layers[1](run.problem.normalised(train).flatten(1).to(torch.float32))
    parts = hidden.split(run.problem.evaluation_batch)
    assert torch.allclose(buffers["layers.2.running_mean"], torch.stack([p.mean(0) for p in parts]).mean(0), atol=1e-5)


def test_kept_statistics_stay_with_their_clients(tmp_path: Path) -> None:
    """SiLoBN: the server's statistics never move, and a resumed run knows every client's own."""
    settings = SMALL | {"training__statistics": "own"}
    result = fedflat.run("fedavg", **(settings | {"model": Normalised()}), out=tmp_path / "run")
    assert torch.equal(result.record.models["server"].buffers, torch.cat([torch.zeros(8), torch.ones(8)]))
    rows = FileRowStore(tmp_path / "run/state/clients", 16, torch.float32)
    kept = [rows[client] for client in range(12) if client in rows]
    assert len(kept) > 4 and all(not torch.equal(a, b) for a in kept for b in kept if a is not b)


def test_keeping_statistics_of_a_model_without_any_is_warned_of() -> None:
    with pytest.warns(UserWarning, match="has no BatchNorm"):
        own = fedflat.run("fedavg", training__statistics="own", **SMALL)
    assert own.history == fedflat.run("fedavg", **SMALL).history


def test_sam_moves_statistics_once_per_step() -> None:
    settings = SMALL | {"model": Normalised(), "rounds": 1, "local_steps": 1, "batch_size": 64}
    plain, sam = (fedflat.run(text, **settings).record.models["server"] for text in ("fedavg", "fedsam(rho=1e-9)"))
    assert torch.allclose(plain.buffers, sam.buffers, atol=1e-6)
    assert sam.integer_buffers["layers.2.num_batches_tracked"] == 1


def test_own_data_model_and_task() -> None:
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
        rounds=15,
        workers=1,
        partition="iid",
        lr=0.5,
    )
    assert result.summary().last > 0.9 and result.config.model == "custom:Linear"


def test_callbacks_see_every_round() -> None:
    seen: list[tuple[str, int]] = []

    class Watcher(fedflat.Callback):
        def began(self, run: RunView) -> None:
            seen.append(("began", run.rounds))

        def round_done(self, run: RunView) -> None:
            seen.append(("round", run.rounds))

        def ended(self, run: RunView, record: object) -> None:
            seen.append(("ended", run.rounds))

    fedflat.run("fedavg", callbacks=[Watcher()], eval_every=3, **SMALL)
    assert seen == [("began", 0), *(("round", n) for n in range(1, 7)), ("ended", 6)]


def test_a_saved_model_is_the_evaluated_one(tmp_path: Path) -> None:
    result = fedflat.run("fedavg+ema(decay=0.5)", out=tmp_path / "run", **SMALL)
    loaded = fedflat.load(tmp_path / "run")
    assert loaded.history == result.history
    for name in ("server", "ema(decay=0.5)"):
        run = Run(loaded.config)
        outputs = loaded.model(name)(run.problem.normalised(run.problem.evaluation_sets["test"].inputs))
        accuracy = (outputs.argmax(1) == run.problem.evaluation_sets["test"].targets).float().mean().item()
        assert accuracy == pytest.approx(result.history[-1]["test"][name]["accuracy"])


def test_a_small_cache_writes_early_and_forgets_nothing(tmp_path: Path) -> None:
    rows = CachedRowStore(FileRowStore(tmp_path, 3, torch.float64), max_bytes=2 * 24)
    for round in range(1, 8):
        rows.current_round = round
        for key in range(5):
            rows[key] = torch.full((3,), 10.0 * round + key, dtype=torch.float64)
        if round in (3, 6):
            rows.flush()
            rows.commit(round)
    assert [rows[key][0].item() for key in range(5)] == [70.0, 71.0, 72.0, 73.0, 74.0]
    rows.flush()
    again = FileRowStore(tmp_path, 3, torch.float64)
    again.rewind(6)
    assert [again[key][0].item() for key in range(5)] == [60.0, 61.0, 62.0, 63.0, 64.0]


def test_the_last_rounds_are_each_evaluated_where_asked() -> None:
    result = fedflat.run("fedavg", evaluation__every=4, evaluation__final=3, **(SMALL | {"rounds": 10}))
    assert [record["round"] for record in result.history] == [0, 4, 8, 9, 10]
    plain = fedflat.run("fedavg", evaluation__every=4, **(SMALL | {"rounds": 10}))
    assert [record["round"] for record in plain.history] == [0, 4, 8, 10]
    assert plain.history[-1] == result.history[-1]


@dataclass(frozen=True)
class TopTwo(fedflat.Classification):
    """Reports two metrics, of which the second is the one that counts."""

    metric: str = "top2"

    def sums(self, output: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
        among = (output.topk(2).indices == target[:, None]).any(1)
        return {**super().sums(output, target), "top2": among.sum()}


def test_the_metric_of_a_task_stands_for_its_run_also_once_it_lies_on_disk(tmp_path: Path) -> None:
    found = fedflat.run("fedavg", task=TopTwo(), out=tmp_path / "run", **SMALL)
    last = found.history[-1]["test"]["server"]
    assert found.metric == fedflat.load(tmp_path / "run").metric == "top2"
    assert found.summary().last == last["top2"] > last["accuracy"]


def test_the_loss_can_be_the_metric_and_lower_is_better() -> None:
    task = fedflat.Classification(metric="loss")
    result = fedflat.run("fedavg", task=task, stop__target=2.25, evaluation__every=1, **SMALL)
    losses = [record["test"]["server"]["loss"] for record in result.history]
    assert result.status == "stopped" and losses[0] > 2.25 >= losses[-1]
    assert result.summary().best == min(losses) < losses[0]


def test_a_metric_that_the_task_does_not_report_is_refused() -> None:
    with pytest.raises(UserError, match=r"'top3', .* loss, accuracy, top2"):
        fedflat.run("fedavg", task=TopTwo("top3"), **SMALL)


def test_a_group_of_settings_adds_to_what_is_there() -> None:
    for settings in ({"rounds": 2, "training": {"local_epochs": 3}}, {"training": {"local_epochs": 3}, "rounds": 2}):
        assert (make_config(None, settings).training.rounds, make_config(None, settings).training.local_epochs) == (
            2,
            3,
        )
    kept = make_config(make_config(None, {"rounds": 2, "lr": 0.5}), {"training": {"local_epochs": 3}}).training
    assert (kept.rounds, kept.lr, kept.local_epochs) == (2, 0.5, 3)


def test_one_setting_under_two_names_is_refused() -> None:
    with pytest.raises(UserError, match=r"training\.rounds is given twice, .*rounds=2 .*training__rounds=3"):
        make_config(None, {"rounds": 2, "training__rounds": 3})
    with pytest.raises(UserError, match=r"training\.rounds is given twice, .*rounds=2 .*training\.rounds=3"):
        make_config(None, {"rounds": 2}, ["training.local_epochs=1", "training.rounds=3"])
    assert (
        make_config(make_config(None, {"rounds": 2}), {"rounds": 3}, ["training.local_epochs=1"]).training.rounds == 3
    )


def test_tf32_without_a_gpu_is_told_of() -> None:
    with pytest.warns(UserWarning, match="tf32.* CPU"):
        Run(make_config(None, SMALL | {"engine__precision": "tf32", "device": "cpu"}))


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("weighting", "federation__weighting"),
        ("momentum", "training__momentum"),
        ("learning_rate", "lr"),
        ("rate", "lr"),
        ("decay", "lr_decay"),
        ("batch", "batch_size"),
        ("epochs", "local_epochs"),
        ("num_rounds", "rounds"),
        ("per_round", "clients_per_round"),
        ("fraction_fit", "clients_per_round"),
        ("split", "partition"),
        ("split_seed", "data__partition_seed"),
        ("data_folder", "data_dir"),
        ("keep_every", "save_every"),
        ("ruonds", "rounds"),
    ],
)
def test_an_unknown_setting_gets_our_name_for_it(name: str, meant: str) -> None:
    with pytest.raises(UserError, match=rf"setting '{name}'; did you mean {meant}\b"):
        make_config(None, {name: 1})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"training": {"rate": 0.1}}, "training has no setting 'rate'; did you mean lr"),
        ({"training": {"num_clients": 3}}, r"training has no setting 'num_clients'; did you mean data\.clients"),
        ({"learning_rate": 0.1}, r"unknown setting 'learning_rate'; did you mean training\.lr"),
        ({"data": "digits"}, r"data='digits' .*did you mean data\.dataset"),
        ({"training": 3}, "training=3 .*group of settings"),
        ({"rounds": 3}, r"unknown setting 'rounds'; did you mean training\.rounds"),
        ({"training": {"romentum": 3}}, "training has no setting 'romentum'; did you mean momentum"),
    ],
)
def test_an_unknown_setting_of_a_file_gets_our_full_name_for_it(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        config(values)


def test_every_synonym_names_a_setting_and_hides_none() -> None:
    known = {*SHORT_NAMES, *setting_names(), "out"}
    assert set(SYNONYMS.values()) <= known
    assert set(SYNONYMS) & {*SHORT_NAMES, *Config.model_fields} == {"data"}


def test_a_callback_must_be_one() -> None:
    with pytest.raises(UserError, match=r"<class .* is not a callback"):
        fedflat.run("fedavg", rounds=1, callbacks=[fedflat.Callback])  # type: ignore[list-item]


def test_statistics_estimated_anew_see_no_validation_example() -> None:
    """Nor those of clients that never train."""
    data = load("digits")
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, 10))
    values = {
        "algorithm": "fedavg+wima",
        "model": "custom:Sequential",
        "data": {"clients": 6, "validation": 0.2, "partition": "iid+held-out(share=0.3)"},
        "federation": {"clients_per_round": 3},
        "training": {"rounds": 2, "local_steps": 1},
        "evaluation": {"statistics": "estimated", "batch_size": 7},
        "engine": {"workers": 1, "device": "cpu"},
    }
    unseen = torch.ones(len(data.train), 1, 1, 1, dtype=torch.bool)
    unseen[torch.from_numpy(Run(config(values), data=data, model=network).partition.trained_on)] = False
    assert 0.2 < unseen.double().mean() < 0.7
    found = []
    for inputs in (data.train.inputs, torch.where(unseen, 255 - data.train.inputs, data.train.inputs)):
        moved = replace(data, train=replace(data.train, inputs=inputs))
        found.append(Run(config(values), data=moved, model=network).execute().models["wima"].buffers)
    assert torch.equal(*found)


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
