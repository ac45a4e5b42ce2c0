"""The grammar's finer points: what Python holds equal, a text need not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import pytest

import fedflat
from fedflat.data import canonical_dataset
from fedflat.errors import UserError
from fedflat.experiment.config import config
from fedflat.text import make, param, parse_one


@dataclass(frozen=True)
class Choice:
    """A spec with numbers and words to choose from."""

    order: Literal[1, 2] = param(1)
    kind: Literal["plain", "true"] = param("plain")


@pytest.mark.parametrize("text", ["choice(order=true)", "choice(order=1.0)", "choice(order=3)", "choice(kind=true)"])
def test_a_choice_takes_what_is_listed_and_nothing_that_is_equal_to_it(text):
    with pytest.raises(UserError, match="expected one of"):
        make(Choice, parse_one(text), "test")


def test_a_choice_is_taken():
    assert make(Choice, parse_one("choice(order=2,kind=plain)"), "test") == Choice(2, "plain")


def test_data_sets_may_be_written_with_hyphens():
    assert canonical_dataset("fashion-mnist") == canonical_dataset("fashion_mnist") == "fashion_mnist"
    assert config({"data": {"dataset": "tiny-imagenet"}}) == config({"data": {"dataset": "tiny_imagenet"}})
    assert config({"data": {"dataset": "custom:my-own"}}).data.name == "custom:my-own"
    assert config({"data": {"dataset": "arrays(path=/my-file.npz)"}}).data.name == "arrays(path=/my-file.npz)"


def test_a_mistyped_name_with_hyphens_is_told_the_nearest():
    with pytest.raises(UserError, match="did you mean fashion_mnist"):
        fedflat.run("fedavg", dataset="fashion-mnits", rounds=1)
