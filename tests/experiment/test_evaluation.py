"""Evaluation of models and data with known metrics."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import fedflat
from fedflat.data import Dataset, Examples, from_arrays
from fedflat.engines.problem.task import Classification
from fedflat.experiment.analysis.fine_tuning import FineTuning
from fedflat.experiment.analysis.scoring import spread_over
from fedflat.experiment.config import parse_config
from fedflat.experiment.setup.problem import build_problem

WRITERS = {"ada": [0] * 8, "bob": [0] * 4 + [1] * 4, "cy": [1] * 4 + [2] * 4, "dee": [2] * 2 + [0] * 6}
ACCURACY = {"ada": 1.0, "bob": 0.5, "cy": 0.0, "dee": 0.75}
"""Accuracy of a model that always predicts 0, by writer."""
STILL = {
    "lr": 1e-12,
    "rounds": 1,
    "local_steps": 1,
    "clients_per_round": 2,
    "workers": 1,
    "device": "cpu",
    "partition": "natural",
}


def always_zero(margin: float = 5.0) -> nn.Linear:
    model = nn.Linear(2, 3)
    with torch.no_grad():
        model.weight.zero_()
        model.bias.copy_(torch.tensor([margin, 0.0, 0.0]))
    return model


def writers() -> Dataset:
    """Four writers for training, two for testing: one wrote only zeros, the other one third zeros."""
    targets = [label for labels in WRITERS.values() for label in labels]
    groups = [name for name, labels in WRITERS.items() for _ in labels]
    test, of = [0, 0, 0, 1, 2], ["ada", "ada", "bob", "bob", "bob"]
    inputs = torch.zeros(len(targets) + 5, 2)
    return from_arrays(inputs[5:], targets, inputs[:5], test, name="letters", train_groups=groups, test_groups=of)


@pytest.fixture(scope="module")
def result() -> fedflat.api.Result:
    return fedflat.run("fedavg", dataset=writers(), model=always_zero(), **STILL)


def test_the_test_set_and_its_classes(result):
    found = result.evaluate(on=("test", "classes"))
    assert found["test"]["accuracy"] == pytest.approx(0.6) and found["test"]["examples"] == 5
    wrong = math.log(math.exp(5) + 2)
    assert found["test"]["loss"] == pytest.approx(wrong - 3)
    assert {name: scores["accuracy"] for name, scores in found["classes"]["each"].items()} == {
        "0": 1.0,
        "1": 0.0,
        "2": 0.0,
    }
    assert {name: scores["examples"] for name, scores in found["classes"]["each"].items()} == {"0": 3, "1": 1, "2": 1}
    assert found["classes"]["mean"] == pytest.approx(1 / 3) and found["classes"]["worst_tenth"] == 0
    assert found["classes"]["each"]["1"]["loss"] == pytest.approx(wrong)


def test_metrics_do_not_depend_on_the_batch_size(result):
    small = fedflat.run("fedavg", dataset=writers(), model=always_zero(), evaluation__batch_size=2, **STILL)
    one, other = (r.evaluate(on=("test", "classes", "clients", "domains")).to_pandas() for r in (result, small))
    assert one[["on", "name", "figure"]].equals(other[["on", "name", "figure"]])
    assert np.allclose(one["value"], other["value"])


def test_training_clients_by_name(result):
    found = result.evaluate(on=["clients"])["clients"]
    assert {name: scores["accuracy"] for name, scores in found["each"].items()} == ACCURACY
    values = list(ACCURACY.values())
    assert found["mean"] == pytest.approx(np.mean(values)) and found["std"] == pytest.approx(np.std(values))
    assert found["worst_tenth"] == 0 and found["count"] == found["of"] == 4


def test_clients_that_share_a_group_have_different_names():
    settings = STILL | {"partition": "natural(clients=6)"}
    found = fedflat.run("fedavg", dataset=writers(), model=always_zero(), **settings).evaluate(on=["clients"])
    assert found["clients"]["count"] == len(found["clients"]["each"]) == 6
    assert {name.split()[0] for name in found["clients"]["each"]} == set(ACCURACY)


def test_domains_are_the_groups_of_the_test_set(result):
    found = result.evaluate(on=["domains"])["domains"]
    assert {name: scores["accuracy"] for name, scores in found["each"].items()} == pytest.approx(
        {"ada": 1.0, "bob": 1 / 3}
    )
    assert found["mean"] == pytest.approx(2 / 3)


def test_the_participation_gap():
    result = fedflat.run(
        "fedavg", dataset=writers(), model=always_zero(), **(STILL | {"partition": "natural+held-out(share=0.5)"})
    )
    found = result.evaluate(on=["unseen", "clients"])
    unseen, seen = (set(found[part]["each"]) for part in ("unseen", "clients"))
    assert len(unseen) == 2 and seen | unseen == set(ACCURACY) and not seen & unseen
    gap = np.mean([ACCURACY[name] for name in seen]) - np.mean([ACCURACY[name] for name in unseen])
    assert found["unseen"]["participation_gap"] == pytest.approx(gap)
    assert result.evaluate(on=["unseen"])["unseen"] == found["unseen"]


def test_the_worst_tenth_is_rounded_up():
    each = {str(i): {"accuracy": i / 10, "loss": 1.0} for i in range(11)}
    assert spread_over(each, "accuracy")["worst_tenth"] == pytest.approx(0.05)


def test_the_long_tail_has_a_head_and_a_tail():
    labels = np.repeat(np.arange(6), 40)
    inputs = torch.eye(6)[labels]
    data = from_arrays(inputs, labels, inputs[::4], labels[::4], name="six")
    model = nn.Linear(6, 6)
    with torch.no_grad():
        model.bias.zero_()
        model.weight.copy_(torch.diag(torch.tensor([1.0, 1, 1, -1, -1, -1])))
    more = {"partition": "iid+longtail(factor=20)", "clients": 4}
    found = fedflat.run("fedavg", dataset=data, model=model, **(STILL | more)).evaluate(on=("longtail", "classes"))
    assert {name: part["accuracy"] for name, part in found["longtail"]["each"].items()} == {
        "head": 1.0,
        "middle": 0.5,
        "tail": 0.0,
    }
    assert [part["classes"] for part in found["longtail"]["each"].values()] == [2, 2, 2]
    assert found["classes"]["mean"] == pytest.approx(0.5)


def test_corruptions_are_averaged_over_severities(result):
    def of(targets: list[int]) -> Examples:
        return Examples(torch.zeros(len(targets), 2), torch.tensor(targets))

    severities = {
        "fog": {1: of([0, 0]), 2: of([0, 1])},
        "snow": {1: of([0, 1]), 2: of([1, 1])},
        "spatter": {1: of([1]), 2: of([1])},
    }
    found = result.evaluate(on=["corruptions"], corruptions=severities)["corruptions"]
    assert {name: scores["accuracy"] for name, scores in found["each"].items()} == {
        "fog": 0.75,
        "snow": 0.25,
        "spatter": 0.0,
    }
    assert found["each"]["fog"]["severity 2"] == 0.5
    assert found["mean_corruption_error"] == pytest.approx(0.5) and found["count"] == 2, (
        "spatter is not one of the benchmark's"
    )


def test_corruptions_of_a_published_dataset(monkeypatch, tmp_path):
    """Corruptions are found by dataset name; missing files name the download command."""
    labels = torch.arange(20) % 10
    images = Examples(torch.zeros(20, 3, 32, 32, dtype=torch.uint8), labels)
    data = Dataset("cifar10", images, images, tuple("0123456789"), (0.5,) * 3, (0.5,) * 3)
    monkeypatch.setattr("fedflat.data.load", lambda *_, **__: data)
    more = STILL | {"partition": "iid", "clients": 2, "data_dir": tmp_path}
    result = fedflat.run("fedavg", dataset="cifar10", model="mlp(hidden=2)", **more)
    assert "fedflat data get cifar10_c" in result.evaluate(on=["corruptions"]).missing["corruptions"]
    source = type(fedflat.data.DATASETS["cifar10_c"])
    monkeypatch.setattr(source, "missing", lambda *_: ())
    monkeypatch.setattr(source, "examples", lambda *_: {"fog": {1: images}})
    assert result.evaluate(on=["corruptions"])["corruptions"]["count"] == 1


def test_fine_tuning_helps_clients_of_another_class():
    """Clients have one class each: the model is right for class 0, and after fine-tuning also for the others."""
    labels = np.repeat([0, 1, 2, 1], 10)
    inputs = torch.zeros(len(labels), 2)
    data = from_arrays(inputs, labels, inputs, labels, name="ones", train_groups=np.repeat(range(4), 10))
    result = fedflat.run("fedavg", dataset=data, model=always_zero(0.1), **STILL)
    weights = result.record.models["server"].weights.clone()
    tuning = FineTuning(clients=4, epochs=3, lr=1.0, share=0.7)
    found = result.evaluate(on=["fine-tuned"], fine_tuning=tuning)["fine-tuned"]
    assert [(one["before"], one["after"]) for one in found["each"].values()] == [(1, 1), (0, 1), (0, 1), (0, 1)]
    assert [(one["trained_on"], one["examples"]) for one in found["each"].values()] == [(7, 3)] * 4
    assert (found["before"], found["after"], found["gain"], found["improved"]) == (0.25, 1, 0.75, 0.75)
    assert (found["lr"], found["batch_size"], found["count"], found["of"]) == (1.0, 10, 4, 4)
    assert torch.equal(weights, result.record.models["server"].weights), "the run's own model stays as it was"


def test_the_seed_selects_the_clients_that_fine_tune():
    tuning = FineTuning(clients=3)
    sizes = [5, 1, 9, 2, 8, 7, 1, 4]
    chosen = tuning.choose_clients(sizes, seed=0)
    assert chosen == tuning.choose_clients(sizes, seed=0) == sorted(chosen) and len(set(chosen)) == 3
    assert {i for seed in range(30) for i in tuning.choose_clients(sizes, seed)} == {0, 2, 3, 4, 5, 7}, (
        "who has one example cannot"
    )
    train, rest = tuning.divide(np.arange(100, 102), 0, 3)
    assert len(train) == len(rest) == 1 and sorted([*train, *rest]) == [100, 101]


def test_fine_tuning_of_unseen_clients():
    partition = {"partition": "natural+held-out(share=0.5)"}
    found = fedflat.run("fedavg", dataset=writers(), model=always_zero(), **(STILL | partition)).evaluate(
        on=["fine-tuned-unseen", "unseen"]
    )
    assert set(found["fine-tuned-unseen"]["each"]) == set(found["unseen"]["each"])


def test_missing_parts_have_a_reason(result):
    found = result.evaluate()
    assert list(found.parts) == ["test", "classes", "clients", "domains", "fine-tuned"]
    reasons = {
        "longtail": "+longtail",
        "unseen": "+held-out",
        "corruptions": "cifar10 and cifar100",
        "fine-tuned-unseen": "+held-out",
    }
    assert found.missing.keys() == reasons.keys() and all(word in found.missing[part] for part, word in reasons.items())
    with pytest.raises(fedflat.UserError, match=r"'unseen'.*held-out"):
        found["unseen"]
    with pytest.raises(fedflat.UserError, match="'clases'; did you mean classes"):
        result.evaluate(on=["clases"])
    with pytest.raises(fedflat.UserError, match="'wima'"):
        result.evaluate("wima")


def test_document_and_frame(result):
    found = result.evaluate()
    assert json.loads(json.dumps(found.document(), allow_nan=False))["on"]["clients"]["each"]["bob"]["accuracy"] == 0.5
    frame = found.to_pandas()
    assert list(frame.columns) == ["on", "name", "figure", "value"]
    assert frame.set_index(["on", "name", "figure"])["value"]["domains", "ada", "accuracy"] == 1
    assert set(frame["on"]) == set(found.parts)


def test_a_loaded_model_equals_the_model_in_memory(tmp_path):
    more = STILL | {
        "lr": 0.1,
        "local_steps": 3,
        "rounds": 2,
        "partition": "dirichlet(alpha=0.3)+held-out",
        "clients": 10,
    }
    result = fedflat.run("fedmoswa+wima", out=tmp_path / "run", **more)
    for name in ("server", "wima"):
        assert fedflat.load(tmp_path / "run").evaluate(name).document() == result.evaluate(name).document()
    last = result.history[-1]["test"]["server"]
    assert result.evaluate(on="test")["test"]["accuracy"] == pytest.approx(last["accuracy"])


def test_user_supplied_objects_must_be_passed_again(tmp_path):
    class Upside(Classification):
        """Another metric than accuracy."""

        def sums(self, output, target):
            sums = super().sums(output, target)
            return {"loss": sums["loss"], "errors": len(target) - sums["accuracy"]}

    data, model, task = writers(), always_zero(), Upside(metric="errors")
    here = fedflat.run("fedavg", dataset=data, model=model, task=task, out=tmp_path / "run", **STILL)
    loaded = fedflat.load(tmp_path / "run")
    with pytest.raises(fedflat.UserError, match=r"custom:letters.*evaluate\(dataset="):
        loaded.evaluate()
    with pytest.raises(fedflat.UserError, match=r"custom:Linear.*evaluate\(network="):
        loaded.evaluate(dataset=data)
    with pytest.raises(fedflat.UserError, match=r"custom task.*pass it again"):
        loaded.evaluate(dataset=data, network=model)
    assert loaded.evaluate(dataset=data, network=model, task=task).document() == here.evaluate().document()
    assert here.evaluate()["clients"]["each"]["cy"]["errors"] == 1


def test_classes_of_characters():
    """A model that always predicts b, on texts of a and b."""
    rows = torch.tensor([[0, 1, 0, 1], [1, 1, 1, 1]])
    data = Dataset("text", Examples(rows, rows), Examples(rows, rows), ("a", "b"), kind="text")

    class AlwaysB(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(1, 2)
            nn.init.zeros_(self.head.weight)
            self.head.bias.data = torch.tensor([0.0, 3.0])

        def forward(self, characters: torch.Tensor) -> torch.Tensor:
            return self.head(characters[..., None].float())

    found = fedflat.run(
        "fedavg", dataset=data, model=AlwaysB(), **(STILL | {"partition": "iid", "clients": 2})
    ).evaluate(on=("test", "classes"))
    assert found["test"]["accuracy"] == pytest.approx(0.75) and found["test"]["examples"] == 2
    assert {name: (one["accuracy"], one["examples"]) for name, one in found["classes"]["each"].items()} == {
        "a": (0, 2),
        "b": (1, 6),
    }


def test_a_virtual_partition_is_evaluated_on_its_first_clients(monkeypatch):
    monkeypatch.setattr("fedflat.data.partition.MAX_SUMMARISED", 20)
    more = STILL | {"partition": "virtual(clients=100000,size=2)", "model": "mlp(hidden=2)"}
    found = fedflat.run("fedavg", **more).evaluate(on=["clients"])["clients"]
    assert (found["count"], found["of"]) == (20, 100_000)


def test_an_earlier_model_has_no_own_statistics(tmp_path):
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 4), nn.BatchNorm1d(4), nn.Linear(4, 10))
    more = STILL | {"partition": "iid", "clients": 5, "training__statistics": "own", "rounds": 2, "save_every": 1}
    run = fedflat.run("fedavg", model=model, out=tmp_path / "run", **more)
    settings = {"on": ("test", "clients", "domains", "fine-tuned"), "fine_tuning": FineTuning(batch_size=64)}
    earlier, last, final = (run.evaluate(rounds=rounds, **settings) for rounds in (1, 2, None))
    assert earlier.parts.keys() == {"test", "fine-tuned"} and last["clients"] == final["clients"]
    assert "only after the last round" in earlier.missing["clients"] and "no domain" in earlier.missing["domains"]
    with pytest.warns(UserWarning, match="no BatchNorm layers"):
        run = fedflat.run("fedavg", out=tmp_path / "mlp", **more)
        assert run.evaluate(on="clients", rounds=1)["clients"]["count"] == 5


def test_models_that_normalise_by_batch():
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 4), nn.BatchNorm1d(4), nn.Linear(4, 10))
    more = STILL | {"partition": "iid", "clients": 5, "training__statistics": "own"}
    found = fedflat.run("fedavg", model=model, **more).evaluate(on=("test", "classes", "clients"))
    tests = found["classes"]["each"].values()
    whole = sum(one["accuracy"] * one["examples"] for one in tests) / sum(one["examples"] for one in tests)
    assert whole == pytest.approx(found["test"]["accuracy"]), "classes are scored in the mixture in which they come"


@pytest.mark.parametrize(
    "wrong",
    [{"clients": 0}, {"epochs": 0}, {"share": 0.0}, {"share": 1.0}, {"lr": -1.0}, {"lr": math.nan}, {"batch_size": 0}],
)
def test_invalid_fine_tuning_settings(wrong):
    with pytest.raises(fedflat.UserError, match=f"fine-tuning .*{next(iter(wrong))}"):
        FineTuning(**wrong)


def test_a_run_may_be_evaluated_on_a_sample_of_the_test_set():
    made = parse_config({"evaluation": {"examples": 50}, "engine": {"device": "cpu"}})
    one, other = (build_problem(made.model_copy(update={"seed": seed}))[0].evaluation_sets["test"] for seed in (0, 1))
    assert len(one) == 50 and torch.equal(one.inputs, other.inputs), "the same sample for every seed"
    result = fedflat.run("fedavg", evaluation__examples=50, **(STILL | {"partition": "iid"}))
    assert result.evaluate(on="test")["test"]["examples"] > 300, "the evaluation afterwards is on the whole"
    assert (
        len(
            build_problem(
                made.model_copy(update={"evaluation": made.evaluation.model_copy(update={"examples": 10**6})})
            )[0].evaluation_sets["test"]
        )
        > 300
    )


def test_an_evaluation_writes_nothing(tmp_path):
    result = fedflat.run("fedavg", out=tmp_path / "run", **(STILL | {"partition": "iid"}))
    before = {path: path.stat().st_mtime_ns for path in Path(tmp_path).rglob("*")}
    result.evaluate()
    assert {path: path.stat().st_mtime_ns for path in Path(tmp_path).rglob("*")} == before
