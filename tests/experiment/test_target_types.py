"""Regression and multi-label data: sources, tasks, partitions, the direction of metrics, reports and flatness."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import fedflat
from fedflat.data import Dataset, describe, from_arrays, from_clients, load, make_partition
from fedflat.display import shown_metric
from fedflat.engines.cpu.engine import LoopEngine
from fedflat.engines.gpu.engine import LaneEngine
from fedflat.engines.problem.task import Task, Totals, lower_is_better, task_for
from fedflat.errors import UserError
from fedflat.experiment.campaign.sweep_file import read_sweep
from fedflat.experiment.campaign.tune import evaluate_best, plan_search, run_search
from fedflat.experiment.config import StopSettings
from fedflat.experiment.make_config import make_config
from fedflat.experiment.run import Run
from fedflat.experiment.stopping import stopping_verdict
from fedflat.reporting.tables.summary import rank_algorithms
from fedflat.testing import check_dataset
from tests.cli.conftest import call

RNG = np.random.default_rng(0)
INPUTS = RNG.normal(size=(80, 4)).astype(np.float32)
NUMBERS = (INPUTS[:, 0] - 2 * INPUTS[:, 1] + 0.1 * RNG.normal(size=80)).astype(np.float32)
LABELS = np.stack([NUMBERS > 0, INPUTS[:, 0] > 0.5, INPUTS[:, 2] > -1], 1)
SMALL = {"partition": "iid", "clients": 4, "clients_per_round": 4, "rounds": 4, "local_steps": 5, "workers": 1}
SMALL |= {"lr": 0.05, "device": "cpu", "model": "mlp(hidden=8)"}


def dataset(targets: Any, **options: Any) -> Dataset:
    return from_arrays(INPUTS[:60], targets[:60], INPUTS[60:], targets[60:], name="mine", **options)


def totals(task: Task, output: torch.Tensor, target: torch.Tensor) -> dict[str, float]:
    """Metrics over two batches."""
    summed = Totals(task)
    for rows in (slice(0, 30), slice(30, None)):
        summed.add(task.sums(output[rows], target[rows]), len(target[rows]))
    return summed.metrics()


@pytest.mark.parametrize("task", [fedflat.Regression(), fedflat.Huber(delta=0.5)])
@pytest.mark.parametrize("columns", [1, 3])
def test_the_metrics_of_a_regression_are_those_of_scikit_learn(task: Any, columns: int) -> None:
    from sklearn import metrics as sklearn  # here, because it takes a second in every process that collects tests

    target = 2000 + RNG.normal(size=(50, columns)).astype(np.float32)
    output = torch.from_numpy(target + RNG.normal(size=(50, columns)).astype(np.float32))
    shaped = torch.from_numpy(target[:, 0] if columns == 1 else target)
    metrics = totals(task, output, shaped)
    assert metrics["rmse"] == pytest.approx(np.sqrt(np.mean((output.numpy() - target) ** 2)), rel=1e-5)
    assert columns > 1 or metrics["rmse"] == pytest.approx(sklearn.root_mean_squared_error(target, output), rel=1e-5)
    assert metrics["mae"] == pytest.approx(sklearn.mean_absolute_error(target, output), rel=1e-4)
    assert metrics["r2"] == pytest.approx(sklearn.r2_score(target, output), rel=1e-4)
    residual = (output.numpy() - target).astype(np.float64)
    huber = np.where(abs(residual) < 0.5, residual**2 / 2, 0.5 * (abs(residual) - 0.25)).mean()
    expected = huber if isinstance(task, fedflat.Huber) else (residual**2).mean()
    assert float(task.loss(output, shaped)) == pytest.approx(expected, rel=1e-3) == pytest.approx(metrics["loss"])


def test_the_metrics_of_labels_are_those_of_scikit_learn() -> None:
    from sklearn.metrics import average_precision_score

    target = torch.from_numpy(RNG.random((50, 4)) < [0.5, 0.2, 0.9, 0])
    logits = torch.from_numpy(RNG.normal(size=(50, 4))) + 2 * target
    task, occurring = fedflat.MultiLabel(), target[:, :3]
    metrics = totals(task, logits, target)
    scores = average_precision_score(occurring, logits[:, :3], average=None)
    assert metrics["mAP"] == pytest.approx(np.mean(scores), abs=1e-3)
    assert metrics["label_accuracy"] == pytest.approx(float(((logits > 0) == target).double().mean()))
    assert metrics["loss"] == pytest.approx(float(task.loss(logits, target)))
    by_label = task.by_class(task.sums(logits, target))
    assert [metrics["mAP"] for metrics in by_label.values()] == pytest.approx(scores, abs=1e-3)
    assert [metrics["examples"] for metrics in by_label.values()] == occurring.sum(0).tolist()
    for scale in (1e-3, 100):
        assert totals(task, scale * logits, target)["mAP"] == pytest.approx(np.mean(scores), abs=3e-3)


@pytest.mark.parametrize("base", [fedflat.Classification, fedflat.Regression, fedflat.MultiLabel])
def test_a_loss_that_a_subclass_overrides_is_the_reported_loss(base: Any) -> None:
    class Steeper(base):
        def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return 3 * super().loss(output, target)

    output, labels = torch.from_numpy(INPUTS[:60, :3]), torch.from_numpy(LABELS[:60])
    target = labels.long().argmax(1) if base is fedflat.Classification else labels
    metrics, usual = totals(Steeper(), output, target), totals(base(), output, target)
    assert metrics.pop("loss") == pytest.approx(3 * usual.pop("loss"), rel=1e-5)
    assert metrics == usual


@pytest.mark.parametrize("base", [fedflat.Regression, fedflat.MultiLabel])
def test_scalars_that_a_task_adds_to_the_sums_become_metrics(base: Any) -> None:
    class Added(base):
        def sums(self, output: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
            return {**super().sums(output, target), "positive_sum": output.relu().mean(1).sum()}

    output = torch.from_numpy(INPUTS[:60, :3])
    metrics = totals(Added(), output, torch.from_numpy(LABELS[:60]))
    assert metrics.pop("positive_sum") == pytest.approx(float(output.relu().mean()))
    assert metrics == totals(base(), output, torch.from_numpy(LABELS[:60]))


def test_targets_determine_task_and_outputs() -> None:
    regression, columns, labels = dataset(NUMBERS), dataset(INPUTS[:, :2]), dataset(LABELS)
    assert [data.target_type for data in (regression, columns, labels)] == ["numbers", "numbers", "labels"]
    assert [data.num_outputs for data in (regression, columns, labels)] == [1, 2, 3]
    assert regression.classes == () and labels.classes == ("0", "1", "2")
    assert [type(task_for(data)).__name__ for data in (regression, labels)] == ["Regression", "MultiLabel"]
    assert task_for(regression, "huber") == fedflat.Huber()
    assert describe(labels)["train_class_counts"] == LABELS[:60].sum(0).tolist()
    assert describe(regression)["targets"] == "numbers" and describe(regression)["train_class_counts"] == []
    assert "it can be partitioned" in check_dataset(regression) and check_dataset(labels)
    clients = from_clients([(INPUTS[:40], NUMBERS[:40]), (INPUTS[40:], NUMBERS[40:])])
    assert clients.target_type == "numbers" and clients.train.groups is not None


@pytest.mark.parametrize(
    ("targets", "task", "message"),
    [
        (np.where(NUMBERS > 2, np.nan, NUMBERS), "auto", r"missing \(NaN\)"),
        (NUMBERS, "classification", "the task classification needs classes.*use task mse or huber"),
        (NUMBERS, "bce", "0 or 1 for each"),
        (LABELS, "mse", "use task bce"),
        (LABELS.astype(int) * 2, "auto", r"shape \(3,\).*\[n, labels\]"),
        (np.where(LABELS[:, 0], "yes", "no"), "mse", "store them as floats"),
    ],
)
def test_targets_that_do_not_fit_the_task(targets: Any, task: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        fedflat.run("fedavg", dataset=dataset(targets), task=task, **SMALL)


def test_tasks_and_models_that_do_not_fit_the_targets() -> None:
    with pytest.raises(UserError, match=r"Classification predicts classes.*derived from fedflat\.Regression"):
        fedflat.run("fedavg", dataset=dataset(NUMBERS), task=fedflat.Classification(), **SMALL)
    with pytest.raises(UserError, match="both given"):
        fedflat.run("fedavg", dataset=dataset(NUMBERS), task=fedflat.Huber(), training__task="mse", **SMALL)
    with pytest.raises(UserError, match="1 number, one per target column"):
        fedflat.run("fedavg", dataset=dataset(NUMBERS), **(SMALL | {"model": torch.nn.Linear(4, 2)}))


@pytest.mark.parametrize("targets", [NUMBERS, LABELS], ids=["numbers", "labels"])
def test_partitions_without_classes(targets: Any) -> None:
    data = dataset(targets)
    for text in ("iid", "virtual(size=5)", "centralised"):
        clients = None if text == "centralised" else 4
        partition = make_partition(text, data.train.targets, data.num_classes, clients, 0, validation=0.2)
        assert len(partition.validation) == 12 and len(partition.clients) in (1, 4)
        assert partition.describe(data.train.targets, data.num_classes)["heterogeneity"] < 0.3
    problem = "are numbers" if targets is NUMBERS else "each has 3"
    with pytest.raises(UserError, match=f"dirichlet needs one label.*{problem}.*use iid, natural, virtual"):
        make_partition("dirichlet", data.train.targets, data.num_classes, 4, 0)


def test_integers_are_regression_targets_if_the_task_requires_it(tmp_path: Path) -> None:
    counts = np.round(np.abs(10 * NUMBERS)).astype(int)
    result = fedflat.run("fedavg", dataset=dataset(counts), task="mse", **(SMALL | {"lr": 1e-4}))
    assert result.metric == "rmse" and result.model()(torch.from_numpy(INPUTS[:3])).shape == (3, 1)
    file = tmp_path / "mine.npz"
    for targets in (-counts, 100_000 * counts, np.stack([counts, counts > 3], axis=1), counts > 3):
        np.savez(file, inputs=INPUTS, targets=targets)  # no classes
        data = load(f"arrays(path={file},standardise=true)", numbers=True)
        assert data.target_type == "numbers" and data.num_outputs == targets[0].size
        restored = data.test.targets.numpy() * data.target_std + data.target_mean
        assert restored == pytest.approx(targets[4::5].astype(float), abs=1e-5)
    np.savez(file, inputs=INPUTS, targets=counts.astype(str))
    with pytest.raises(UserError, match="targets that are not numbers"):
        load(str(file), numbers=True)
    pd.DataFrame({"x": INPUTS[:, 0], "a": counts, "b": counts}).to_csv(tmp_path / "mine.csv", index=False)
    settings = SMALL | {"dataset": f"arrays(path={tmp_path}/mine.csv,target=a|b)", "task": "huber", "lr": 1e-4}
    assert fedflat.run("fedavg", **settings).metric == "rmse"


def test_tables_of_numbers_and_labels(tmp_path: Path) -> None:
    frame = pd.DataFrame(INPUTS, columns=list("abcd")).assign(target=NUMBERS, **{"is-up": NUMBERS > 0, "is-high": 1})
    frame.to_csv(tmp_path / "mine.csv", index=False)
    frame.to_parquet(tmp_path / "mine.parquet")
    for suffix in ("csv", "parquet"):
        data = load(f"arrays(path={tmp_path}/mine.{suffix})")
        assert (len(data.train), len(data.test), data.num_outputs) == (64, 16, 1)
        assert data.test.targets.numpy() == pytest.approx(NUMBERS[4::5], rel=1e-5)
    several = load(f"arrays(path={tmp_path}/mine.csv,target=target|d)")
    assert several.num_outputs == 2 and several.input_shape == (5,)
    frame["is-up"] = frame["is-up"].astype(int)
    frame.to_csv(tmp_path / "mine.csv", index=False)
    labels = load(f"arrays(path={tmp_path}/mine.csv,target=is-up|is-high)")
    assert labels.target_type == "labels" and labels.classes == ("is-up", "is-high")
    np.savez(tmp_path / "mine.npz", inputs=INPUTS, targets=NUMBERS)
    assert load(f"arrays(path={tmp_path}/mine.npz)").test.targets.numpy() == pytest.approx(NUMBERS[4::5])


@pytest.mark.parametrize("targets", [NUMBERS, LABELS], ids=["numbers", "labels"])
def test_engines_agree(targets: Any) -> None:
    settings = {**SMALL, "algorithm": "scaffold+sam", "engine__precision": "float64", "rounds": 2}
    weights = []
    for make in (partial(LoopEngine, workers=1), LaneEngine):
        run = Run(make_config(None, settings), data=dataset(targets))
        run.engine = make(run.problem)
        run.execute()
        weights.append(run.server.model.weights)
    assert (weights[0] - weights[1]).abs().max() < 1e-12


@dataclass(frozen=True)
class LargestError(fedflat.Regression):
    """A user-defined metric that is better if lower."""

    metric: str = "largest"
    lower_is_better: bool = True

    def finish(self, totals: Any, count: int) -> dict[str, float]:
        metrics = super().finish(totals, count)
        return {**metrics, "largest": 2 * metrics["rmse"]}


def test_the_task_declares_the_direction_and_the_run_stores_it(tmp_path: Path) -> None:
    assert not lower_is_better(fedflat.Regression(metric="r2")) and not lower_is_better(fedflat.MultiLabel())
    result = fedflat.run(
        "fedavg", dataset=dataset(NUMBERS), task=LargestError(), stop__target=3.1, out=tmp_path / "run", **SMALL
    )
    values = [entry["test"]["server"]["largest"] for entry in result.history]
    assert result.status == "stopped" and values[-1] <= 3.1 < values[-2]
    stored = fedflat.load(tmp_path / "run")
    assert stored.record.lower_is_better and stored.summary().best == min(values)
    assert shown_metric(max(values), "rmse") not in stored._repr_html_(), "the highest error is not the best"
    assert json.loads((tmp_path / "run" / "status.json").read_text())["lower_is_better"]
    assert stored.summary(metric="r2").best == max(entry["test"]["server"]["r2"] for entry in result.history)


def test_patience_and_ranks_follow_the_direction() -> None:
    history = [{"round": r, "test": {}, "validation": {"server": {"rmse": v}}} for r, v in enumerate((3.0, 2.0, 1.0))]
    stop = StopSettings(patience=2)
    assert stopping_verdict(history, stop, "server", "rmse", True) is None
    assert stopping_verdict(history, stop, "server", "rmse", False) is not None
    ranks = rank_algorithms({"a": {0: 2.0}, "b": {0: 1.0}, "c": {0: -np.inf}}, lower_is_better=True)
    assert ranks is not None and list(ranks.mean) == ["b", "a", "c"]


def test_a_search_minimises_an_error(tmp_path: Path) -> None:
    pytest.importorskip("optuna", minversion="4.0")
    np.savez(tmp_path / "mine.npz", inputs=INPUTS, targets=NUMBERS)
    base = {**SMALL, "dataset": str(tmp_path / "mine.npz"), "data.validation": 0.2, "rounds": 2}
    del base["lr"]
    search = plan_search(
        read_sweep({"base": base, "tune": {"trials": 2, "space": {"lr": [1e-4, 0.1]}}}), tmp_path / "t"
    )
    trials = list(run_search(search))
    assert evaluate_best(search)["validation"] == min(trial.score for trial in trials if trial.score is not None)


def test_a_regression_on_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a CSV file to a comparison, a report and flatness; fedavg with a tiny learning rate is worse."""
    monkeypatch.chdir(tmp_path)
    pd.DataFrame(INPUTS, columns=list("abcd")).assign(target=NUMBERS).to_csv("mine.csv", index=False)
    assert "numbers (regression), 1 per example" in call("data", "describe", "mine.csv", "--partition", "iid").stdout
    small = ("--partition", "iid", "--clients", 4, "--clients-per-round", 4, "--rounds", 3, "--local-steps", 4)
    small = (
        *small,
        "--dataset",
        "mine.csv",
        "--task",
        "mse",
        "--lr",
        0.05,
        "--workers",
        1,
        "--device",
        "cpu",
        "--quiet",
    )
    algorithms = ("fedavg+ema(decay=0.999)", "fedavg")
    shown = call("compare", *algorithms, *small, "--seeds", 1, "--target", 1.9, "--out", "runs").stdout
    assert "lower is better" in shown and "relative to" in shown
    assert "fedavg is best" in shown.replace("\n", " ")
    wrong = call("compare", "fedavg", *small[2:], "--out", "other")
    assert wrong.exit_code and "use iid" in wrong.output.replace("\n", " ")
    document = json.loads(call("show", "runs", "--json").stdout)
    assert document["lower_is_better"] and document["metric"] == "rmse"
    averaged, server = (
        next(row for row in document["rows"] if row["label"].endswith(end)) for end in ("ema(decay=0.999)", "fedavg")
    )
    assert server["best"]["mean"] < averaged["last"]["mean"]
    assert call("report", "runs", "--out", "report", "--target", 1.9, "--no-figures").exit_code == 0
    page = Path("report/report.html").read_text()
    assert "(lower is better)" in page and "negative differences are improvements" in page
    assert "lower is better" in Path("report/results.md").read_text()
    run = next(Path("runs").rglob("config.yaml")).parent
    landscape = call("flatness", "landscape", run, "--dimensions", 1, "--points", 3, "--value", "test_rmse", "--quiet")
    assert landscape.exit_code == 0 and "test rmse" in landscape.stdout
    for command in ("clients", "bounds"):
        result = call("flatness", command, run, "--quiet", "--json")
        assert result.exit_code == 0, (command, result.output)
    evaluation = json.loads(call("evaluate", run, "--json").stdout)
    assert "classes" in evaluation["missing"] and evaluation["on"]["clients"]["worst_tenth"] > 0


@pytest.mark.parametrize("targets", [NUMBERS, LABELS], ids=["numbers", "labels"])
def test_weights_from_labels_need_one_class_per_example(targets: Any) -> None:
    with pytest.raises(UserError, match="the examples of mine do not have one class each; use another algorithm"):
        fedflat.run("feddisco", dataset=dataset(targets), **SMALL)
