"""In-run flatness measurements: their values, and that they do not affect training."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import fmean

import pytest
import torch
from torch import nn

import fedflat
from fedflat import flatness
from fedflat.data import Dataset, from_arrays
from fedflat.errors import UserError
from fedflat.experiment.analysis import model_measures, observer
from fedflat.experiment.analysis.model_measures import MODEL_MEASURES
from fedflat.experiment.analysis.similarity import client_similarity
from fedflat.experiment.config import parse_config
from fedflat.experiment.make_config import make_config
from fedflat.reporting.figures.flatness_log import logged
from fedflat.setting_names import MEASUREMENTS, parse_flatness, parse_measurements

SETTINGS = {
    "rounds": 4,
    "clients": 8,
    "clients_per_round": 3,
    "local_steps": 2,
    "workers": 1,
    "device": "cpu",
    "model": "mlp(hidden=8)",
}


def run(text: str = "scaffold+wima", out: Path | None = None, **more):
    return fedflat.run(text, out=out, **{**SETTINGS, **more})


def records(result) -> list[dict]:
    return [{name: value for name, value in record.items() if name != "flatness"} for record in result.history]


def looks(result) -> dict[int, dict]:
    return {record["round"]: record["flatness"] for record in result.history if "flatness" in record}


@pytest.fixture
def few_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure with few products and losses, for tests of which values do not matter."""
    for module in (observer, model_measures):
        monkeypatch.setattr(module, "TOLERANCE", 0.9)
        monkeypatch.setattr(module, "MAX_PRODUCTS", 10)
    monkeypatch.setattr(observer, "EIGENVECTORS", 2)
    monkeypatch.setattr(model_measures, "norms_of", lambda loss, **_: flatness.norms_of(loss, draws=2, directions=1))


def restless(dropped: float) -> nn.Module:
    """A model with BatchNorm and dropout."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Dropout(dropped), nn.Linear(4, 10)
    )


def small_data() -> Dataset:
    inputs = torch.randn(80, 5, generator=torch.Generator().manual_seed(0))
    return from_arrays(inputs[:64], torch.arange(64) % 3, inputs[64:], torch.arange(16) % 3, name="small")


@pytest.mark.parametrize(
    ("text", "more"),
    [
        ("fedmoswa+wima", {"engine__name": "lanes"}),
        (
            "scaffold+sam",
            {
                "model": restless(0.3),
                "training__momentum": 0.5,
                "training__statistics": "own",
                "data__augmentation": "mixup",
            },
        ),
    ],
)
def test_measurements_leave_training_bit_identical(text: str, more: dict, few_products: None) -> None:
    more = {"model": "mlp(hidden=2)", **more, "rounds": 2, "clients_per_round": 2}
    without, beside = (
        run(text, **more),
        run(text, **more, flatness="every=2,what=all", flatness__examples=8, flatness__clients=2),
    )
    assert records(without) == records(beside)
    for name, model in without.record.models.items():
        assert torch.equal(model.weights, beside.record.models[name].weights)
        assert torch.equal(model.buffers, beside.record.models[name].buffers)


def test_all_requested_measurements_are_present(few_products: None) -> None:
    found = looks(run(rounds=2, flatness="every=2,what=all", flatness__examples=50, flatness__clients=3))
    assert list(found) == [0, 2]
    assert "cohort" not in found[0]
    last = found[2]
    assert last.keys() == {
        *("models", "stability_threshold", "accuracy", "features", "constants", "gradients", "cohort"),
    }
    assert last["models"].keys() == {"server", "wima"}
    assert last["models"]["wima"].keys() == {
        "lambda_max",
        "sharpness",
        "m_sharpness",
        *("fisher_lambda_max", "fisher_trace"),
        *("relative_flatness", "fisher_rao", "pac_bayes_sigma", "magnitude_sigma"),
        *("lambda_max of 1.weight", "lambda_max of 3.weight"),
        "train_loss",
        "test_loss",
        "gap",
        "accuracy_gap",
    }
    cohort = last["cohort"]
    assert len(cohort["clients"]) == len(cohort["cosine"]) == len(cohort["local"]["lambda_max"]) == 3
    assert cohort["similarity"]["cka"].keys() == set(map(str, cohort["clients"]))
    assert cohort["client_vectors"].keys() == cohort["server_vectors"].keys() == {"drift.c"}
    assert len(last["accuracy"]["classes"]) == 10
    assert len(last["features"]) == len(last["accuracy"]["clients"]) == 3
    assert json.loads(json.dumps(last)) == last


def test_measures_of_models_are_those_of_the_flatness_commands(tmp_path: Path) -> None:
    what = {"flatness": "every=1,what=m_sharpness+fisher+norms+layers", "rounds": 1, "dataset": small_data()}
    result = run("fedavg", out=tmp_path / "run", **what)
    values = looks(result)[1]["models"]["server"]
    objective = result.flatness().objective()
    norms = flatness.norms_of(objective, draws=10, directions=5)
    fisher = flatness.spectrum_of(objective, 1, matrix="gauss-newton")
    layers = flatness.spectrum_of(objective, 1, per_layer=True).layers
    expected = {
        **{f"lambda_max of {layer.name}": layer.lambda_max for layer in layers if layer.name.endswith("weight")},
        "m_sharpness": flatness.sharpness_of(objective, m=32).value,
        "fisher_lambda_max": fisher.lambda_max,
        "fisher_trace": fisher.trace.value,
        "relative_flatness": norms.relative_flatness.value,
        "fisher_rao": norms.fisher_rao,
        "pac_bayes_sigma": norms.sigma,
        "magnitude_sigma": norms.magnitude_sigma,
    }
    assert values.keys() == expected.keys() == logged(result.record).keys()
    for name, value in expected.items():
        assert values[name] == pytest.approx(value, rel=1e-3), name


def test_similarity_is_that_of_the_replayed_round(tmp_path: Path) -> None:
    what = {"flatness": "every=2,what=similarity", "rounds": 2, "flatness__seed": 1, "dataset": small_data()}
    result = run("fedavg", out=tmp_path / "run", save_every=1, lr=1.0, **what)
    logged_values = looks(result)[2]["cohort"]["similarity"]
    replayed = client_similarity(result.flatness("server", rounds=1), seed=1)
    assert logged_values.keys() == {"overlap_at_server", "cka"} and len(replayed) == 3
    for row in replayed:
        for name, values in logged_values.items():
            assert values[str(row["client"])] == pytest.approx(row[name], rel=1e-5 if name == "cka" else 1e-2), name
        assert row["cka"] < 0.999  # the client's model has moved
    means = {name: fmean(row[name] for row in replayed) for name in logged_values}
    assert logged(result.record)["overlap"] == [(2, pytest.approx(means["overlap_at_server"], rel=1e-2))]
    assert logged(result.record)["cka"] == [(2, pytest.approx(means["cka"], rel=1e-2))]


def test_products_and_losses_are_as_many_as_documented() -> None:
    documented = (Path(__file__).parents[2] / "docs" / "flatness-clients.md").read_text()
    rows = {line.split("`")[1]: line for line in documented.splitlines() if line.startswith("| `")}
    torch.manual_seed(0)
    data, network = small_data().train, nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))
    counts: dict[str, Counter] = {}
    for measure in ("norms", "fisher", "layers"):
        objective = flatness.Objective(network, nn.functional.cross_entropy, (data.inputs, data.targets))
        counts[measure] = Counter()

        def counted(function: Callable, unit: str, found: Counter = counts[measure]) -> Callable:
            def call(*arguments, **options):
                found[unit] += len(arguments[1]) if unit == "products" else 1
                return function(*arguments, **options)

            return call

        for name, unit in (("hessian_products", "products"), ("gauss_newton_products", "products"), ("loss", "losses")):
            setattr(objective, name, counted(getattr(objective, name), unit))
        MODEL_MEASURES[measure](objective, 0)
    for text in (rows["norms"], MEASUREMENTS["norms"]):
        assert f"{counts['norms']['products']} products and about 400 losses" in text
    assert counts["norms"]["losses"] == pytest.approx(400, rel=0.1)
    assert "about 50 products" in rows["fisher"] and counts["fisher"]["products"] == pytest.approx(50, rel=0.2)
    assert "15 to 30 products" in rows["layers"] and 2 * 15 <= counts["layers"]["products"] <= 2 * 30


def test_the_edge_of_stability_follows_the_learning_rate(few_products: None) -> None:
    settings = {"flatness": "every=2,what=lambda_max", "flatness__examples": 10, "training__lr_decay": 0.5}
    log = looks(run("fedswa", lr=0.1, **settings))  # the linear schedule starts each round at the round's rate
    assert [look["stability_threshold"] for look in log.values()] == pytest.approx([20, 40, 160])
    log = looks(run("fedavg", lr=0.1, training__momentum=0.5, **settings))
    assert [look["stability_threshold"] for look in log.values()] == pytest.approx([30, 60, 240])
    assert looks(run("local-adamw", **settings))[4]["stability_threshold"] is None


def test_the_last_round_is_always_measured() -> None:
    assert list(looks(run(flatness="every=3,what=drift"))) == [0, 3, 4]
    assert not looks(run())


def test_engines_agree() -> None:
    what = {"flatness": "every=2,what=drift+clients+gap", "engine__precision": "float64"}
    loop, lanes = (looks(run("fedmoswa", rounds=2, engine__name=name, **what)) for name in ("loop", "lanes"))
    for one, other in (
        (loop[2]["cohort"], lanes[2]["cohort"]),
        (loop[2]["models"]["server"], lanes[2]["models"]["server"]),
    ):
        flat, same = (
            json.loads(json.dumps(some), parse_float=lambda text: round(float(text), 5)) for some in (one, other)
        )
        assert flat == same


@pytest.mark.parametrize("text", ["scaffold+wima", "fedwmsam"])  # fedwmsam has several server vectors
def test_a_resumed_run_ends_with_the_same_log(tmp_path: Path, text: str, few_products: None) -> None:
    what = {
        "flatness": "every=2,what=drift+noise" + "+similarity+layers" * (text == "fedwmsam"),
        "flatness__examples": 40,
        "flatness__clients": 2,
        "engine__checkpoint_every": 1,
        "model": "mlp(hidden=2)",
        "clients_per_round": 2,
    }
    run(text, out=tmp_path / "whole", **what)

    class Stop(fedflat.Callback):
        def evaluated(self, run) -> None:
            if run.server.rounds == 3:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(text, out=tmp_path / "halves", callbacks=[Stop()], **what)
    fedflat.resume(tmp_path / "halves")
    assert (tmp_path / "halves" / "metrics.jsonl").read_bytes() == (tmp_path / "whole" / "metrics.jsonl").read_bytes()
    timing = [json.loads(line) for line in (tmp_path / "whole" / "timing.jsonl").read_text().splitlines()]
    assert [line["round"] for line in timing if "flatness" in line] == [0, 2, 4]


def test_an_asynchronous_run_times_each_measurement_once(tmp_path: Path) -> None:
    what = {"policy": "fedbuff(buffer=2)", "clock": "lognormal", "flatness": "every=1,what=lambda_max"}
    run("fedavg", out=tmp_path / "run", flatness__examples=20, **what)
    timing = [json.loads(line) for line in (tmp_path / "run" / "timing.jsonl").read_text().splitlines()]
    assert sum(line["flatness"] for line in timing) <= timing[-1]["seconds"]


def test_a_diverging_run_ends_as_without_measurements(few_products: None) -> None:
    """Measurements of non-finite weights are empty; the run ends as without measurements."""
    settings = {"lr": 1e25, "model": "mlp(hidden=8,layers=2)", "local_steps": 4}
    without, beside = (
        run("scaffold", **settings),
        run("scaffold", **settings, flatness="every=1,what=all", flatness__examples=20, flatness__clients=2),
    )
    assert without.status == beside.status == "diverged"
    assert without.record.reason == beside.record.reason


def test_the_short_form_is_parsed() -> None:
    assert parse_flatness("50") == {"every": 50}
    assert parse_flatness("every=5, what=drift+gap ,examples=100") == {
        "every": 5,
        "what": "drift,gap",
        "examples": 100,
    }
    assert parse_config({"flatness": "every=5"}).flatness.every == 5
    assert parse_measurements("all") == parse_measurements("drift+all") == list(MEASUREMENTS)
    made = make_config(parse_config({"flatness": {"every": 5, "seed": 3}}), {"flatness": "what=drift"})
    assert made.flatness.model_dump() == {"every": 5, "what": "drift", "examples": 500, "clients": 10, "seed": 3}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"flatness": "every"}, "cannot read 'every' in --flatness 'every'; expected every=50"),
        ({"flatness": "every=2,what=drfit"}, "'drfit'; did you mean drift"),
        ({"flatness": "every=2,what=,"}, "cannot read 'what='"),
        ({"flatness": {"what": " "}}, "flatness.what is empty"),
        ({"flatness": "every=0"}, "flatness.every=0"),
        ({"flatness": "every=²"}, "flatness.every='²' is invalid"),
        ({"flatness": "evry=2"}, "'evry'"),
        ({"flatness": "every=5", "evaluation": {"every": 2}}, "use flatness.every=6"),
    ],
)
def test_invalid_input_raises_a_clear_error(values: dict, words: str) -> None:
    with pytest.raises(UserError) as found:
        parse_config(values)
    assert words in str(found.value)
