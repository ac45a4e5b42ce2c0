"""The lookup commands: algorithms, models, settings, data."""

from __future__ import annotations

import json

import pytest

from fedflat import algorithm
from fedflat.algorithms.composition import parts
from fedflat.algorithms.named import NAMED, RELEASED
from fedflat.cli.lookup.algorithm_card import cost_of, in_units_of_p
from fedflat.data import PARTITIONERS, names
from fedflat.experiment.config import Config
from fedflat.models import MODELS


def test_every_named_algorithm_is_listed_with_its_paper(fedflat):
    document = json.loads(fedflat("algorithms", "--json").stdout)
    assert [line["name"] for line in document["algorithms"]] == list(NAMED)
    assert all(line["paper"] for line in document["algorithms"])
    assert [part["part"] for part in document["parts"]] == list(parts())
    shown = fedflat("algorithms").stdout
    assert all(name in shown for name in (*NAMED, *parts()))


@pytest.mark.parametrize("name", NAMED)
def test_every_named_algorithm_can_be_described(fedflat, name):
    document = json.loads(fedflat("algorithms", name, "--json").stdout)
    assert document["name"] == document["algorithm"] == name
    assert all(slot["equations"] for slot in document["slots"])
    assert all(parameter["meaning"] for parameter in document["parameters"])
    assert bool(document["released"]) == (name in RELEASED)
    assert name in fedflat("algorithms", name).stdout


def test_a_composition_is_described_in_its_shortest_form(fedflat):
    shown = fedflat("algorithms", "scaffold+sam(rho=0.2)+wima(window=50)").stdout
    for word in (
        "fedgamma(rho=0.2)+wima(window=50)",
        "Dai et al., TNNLS 2023",
        "d_k = g - c_i + c",
        "rho",
        "vector",
        "2P",
    ):
        assert word in shown
    document = json.loads(fedflat("algorithms", "scaffold+sam(rho=0.2)+wima(window=50)", "--json").stdout)
    by_name = {parameter["parameter"]: parameter for parameter in document["parameters"]}
    assert (by_name["rho"]["value"], by_name["rho"]["default"], by_name["rho"]["range"]) == ("0.2", "0.1", "at least 0")
    assert by_name["window"]["default"] == "100"
    assert {"where": "every client", "name": "c", "slot": "drift", "kind": "vector", "sent": "never"} in document[
        "state"
    ]


def test_the_released_variant_is_described(fedflat):
    changes = json.loads(fedflat("algorithms", "fedmoswa", "--json").stdout)["released"]
    assert {"parameter": "gamma", "paper": "0.2", "released": "0.1"} in changes
    shown = fedflat("algorithms", "fedmoswa").stdout
    assert "variant=released" in shown and "D23" in shown and "option II" in shown


def test_costs_in_units_of_p():
    assert in_units_of_p(lambda p: p) == "P" and in_units_of_p(lambda p: 3 * p + 1) == "3P + 1"
    assert cost_of(algorithm("fedwmsam")) == {"down": "3P + 1", "up": "2P + 1", "passes": 1, "full_gradient": False}
    assert cost_of(algorithm("mime+sam")) == {"down": "2P", "up": "2P", "passes": 3, "full_gradient": True}


def test_models(fedflat):
    found = {line["name"]: line for line in json.loads(fedflat("models", "--json").stdout)}
    assert set(found) == set(MODELS)
    assert found["cnn"]["numbers_cifar10"] == 797962 and found["char-lstm"]["numbers_cifar10"] is None
    shown = fedflat("models").stdout
    assert "797,962" in shown and "resnet18(norm=group,groups=2,stem=small)" in shown


def test_one_model(fedflat):
    document = json.loads(fedflat("models", "resnet18( norm=batch )", "--json").stdout)
    assert document["name"] == "resnet18(norm=batch)" and document["numbers"]["cifar10"] == 11173962
    assert {p["parameter"]: p["value"] for p in document["parameters"]}["norm"] == "batch"
    assert "group or batch" in fedflat("models", "resnet18").stdout
    assert "80" in fedflat("models", "char-lstm").stdout
    assert fedflat("models", "lenet5").exit_code == 0


def test_settings_are_those_of_the_config(fedflat):
    found = {line["name"]: line for line in json.loads(fedflat("settings", "--json").stdout)}
    sections = Config().model_dump()
    full = [f"{name}.{key}" for name, value in sections.items() if isinstance(value, dict) for key in value]
    assert set(found) == {name for name, value in sections.items() if not isinstance(value, dict)} | set(full)
    assert found["training.rounds"] == {
        "name": "training.rounds",
        "flag": "--rounds",
        "type": "integer",
        "default": "100",
        "description": "communication rounds",
    }
    assert (
        found["training.clip"]["type"] == "number or none"
        and found["federation.sampling"]["type"] == "fixed or bernoulli"
    )
    assert "training.clip_mode" in fedflat("settings").stdout


def test_datasets_are_listed_with_partitions_and_augmentations(fedflat):
    document = json.loads(fedflat("data", "list", "--json").stdout)
    assert [line["name"] for line in document["data"]] == list(names())
    assert [line["name"] for line in document["partitions"]] == list(PARTITIONERS)
    assert document["data"][0]["files"] == "built in"
    shown = fedflat("data").stdout
    assert shown == fedflat("data", "list").stdout
    assert "dirichlet(alpha=0.1" in shown and "crop-flip" in shown
    assert "\nin data[b]:cat:\n" in fedflat("data", "list", "--data-dir", "data[b]:cat:").stdout  # no markup, no emoji


def test_data_is_described(fedflat):
    flags = (
        "data",
        "describe",
        "digits",
        "--partition",
        "dirichlet-reuse(alpha=0.2)",
        "--clients",
        "12",
        "--seed",
        "3",
    )
    partition = json.loads(fedflat(*flags, "--json").stdout)["partition"]
    assert (
        partition["clients"] == 12
        and partition["duplicates"] > 0
        and partition["coverage"] < 1
        and 0 < partition["heterogeneity"] < 1
    )
    shown = fedflat(*flags).stdout
    for word in (
        "1,442 for training, 355 for testing",
        "dirichlet-reuse(alpha=0.2",
        "heterogeneity",
        "the first 10 of 12 clients",
    ):
        assert word in shown
    assert "Examples of each class" in shown
    assert "Pixels of each class" in fedflat("data", "describe", "digit_masks", "--partition", "iid").stdout
    assert "Partition" not in fedflat("data", "describe", "digits").stdout
    assert "1 on average" not in fedflat("data", "describe", "digits", "--partition", "centralised").stdout


def test_built_in_datasets_are_complete(fedflat):
    for command in ("get", "verify"):
        assert fedflat("data", command, "digits").stdout == "digits is built in and has no files\n"
    assert json.loads(fedflat("data", "get", "digits", "--json").stdout)["name"] == "digits"
    missing = fedflat("data", "verify", "cifar10", "--data-dir", "my data").stderr
    assert "fedflat data get cifar10 --data-dir 'my data'" in " ".join(missing.split())
    assert json.loads(fedflat("data", "verify", "digits", "--json").stdout)["files"] == []
