"""The notation for components: literal values, hyphens, positional values and paths."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

import pytest

import fedflat
from fedflat.data import canonical_dataset
from fedflat.errors import UserError
from fedflat.experiment.config import parse_config
from fedflat.text import make, param, parse, parse_one, respell, show


@dataclass(frozen=True)
class Choice:
    """A spec with numbers and words to choose from."""

    order: Literal[1, 2] = param(1)
    kind: Literal["plain", "true"] = param("plain")


@pytest.mark.parametrize("text", ["choice(order=true)", "choice(order=1.0)", "choice(order=3)", "choice(kind=true)"])
def test_a_literal_parameter_rejects_values_that_are_merely_equal(text):
    with pytest.raises(UserError, match="expected one of"):
        make(Choice, parse_one(text), "test")


def test_a_literal_parameter_accepts_its_choices():
    assert make(Choice, parse_one("choice(order=2,kind=plain)"), "test") == Choice(2, "plain")


def test_dataset_names_may_contain_hyphens():
    assert canonical_dataset("fashion-mnist") == canonical_dataset("fashion_mnist") == "fashion_mnist"
    assert parse_config({"data": {"dataset": "tiny-imagenet"}}) == parse_config({"data": {"dataset": "tiny_imagenet"}})
    assert parse_config({"data": {"dataset": "custom:my-own"}}).data.dataset == "custom:my-own"
    assert parse_config({"data": {"dataset": "arrays(path=/my-file.npz)"}}).data.dataset == "arrays(path=/my-file.npz)"


def test_a_mistyped_name_with_hyphens_gets_a_suggestion():
    with pytest.raises(UserError, match="fashion_mnist"):
        fedflat.run("fedavg", dataset="fashion-mnits", rounds=1)


@dataclass(frozen=True)
class File:
    """A spec with a positional path."""

    size: int = param(1)
    path: str = param("", path=True, positional=True)


def test_a_single_positional_value_sets_the_positional_parameter():
    with pytest.raises(UserError, match=r"needs a name, as in choice\(order=2\); its parameters are order, "):
        make(Choice, parse_one("choice(2)"), "test")
    assert make(File, parse_one("file(wine.npz)"), "test") == File(path="wine.npz")
    assert show("choice", parse("choice(2)")[0].values) == "choice(2)"


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("FedProx(0.2)", "fedprox(mu=0.2)"),
        ("FedSAM(0.2)", "fedsam(rho=0.2)"),
        ("fedavg+SAM(0.2)", "fedsam(rho=0.2)"),
        ("fedavg+wima(7)", "fedavg+wima(window=7)"),
    ],
)
def test_algorithms_accept_positional_values_and_any_case(text, canonical):
    assert fedflat.canonical(fedflat.algorithm(text)) == canonical


def test_a_named_algorithm_without_parameters_of_its_own_takes_no_positional_value():
    with pytest.raises(UserError, match="fedavg"):
        fedflat.algorithm("fedavg(0.1)")


@pytest.mark.parametrize(
    ("text", "correction"),
    [("fedavgm(0.9)", "fedavgm(server_lr=0.9)"), ("mofedsam(0.1)", "mofedsam(alpha=0.1)"),
     ("fedavg+adam(0.1)", "adam(server_lr=0.1)")],
)  # fmt: skip
def test_a_positional_value_among_several_parameters_needs_a_name(text, correction):
    with pytest.raises(UserError, match=re.escape(correction)):
        fedflat.algorithm(text)


@pytest.mark.parametrize("text", ["choice(2,plain)", "choice(2,kind=plain)", "choice(kind=plain,2)"])
def test_only_a_single_value_may_be_positional(text):
    with pytest.raises(UserError, match="parameter=value"):
        parse(text)


@pytest.mark.parametrize(
    "value", ["", "1", "1e5", "nan", "true", "none", "rock'", "'q'", 'a"b', "it's", " a", "a, (b)"]
)
def test_words_are_written_as_they_are_read(value):
    (call,) = parse(show("file", {"path": value}))
    assert call.values == {"path": value}


def test_a_component_without_parameters_takes_no_value():
    @dataclass(frozen=True)
    class Empty:
        pass

    with pytest.raises(UserError, match=r"empty.*no parameters"):
        make(Empty, parse_one("empty(3)"), "test")


def test_texts_are_respelled_and_paths_become_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    texts = {
        "file(path=a.npz)": f"file(path={tmp_path}/a.npz)",
        "file(a.npz)": f"file(path={tmp_path}/a.npz)",
        "FILE( size=2, path = a=b.npz ) + O-ther(path=c)": f"file(size=2,path={tmp_path}/a=b.npz)+other(path=c)",
        "unknown( 3 )": "unknown(3)",
        "File++other": "File++other",
        "file(path=/a.npz)": "file(path=/a.npz)",
        "file(size=2)": "file(size=2)",
        "file(path=)": "file(path=)",
        "file(path=~nobody-here/a.npz)": f"file(path={tmp_path}/~nobody-here/a.npz)",
    }
    assert {text: respell(text, {"file": File, "other": Choice}) for text in texts} == texts


def test_users_may_write_names_and_files_naturally(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = parse_config({"data": {"dataset": "wine.npz", "partition": "dirichlet(0.3)"}}).data
    assert (data.dataset, data.partition) == (f"arrays(path={tmp_path}/wine.npz)", "dirichlet(alpha=0.3)")
