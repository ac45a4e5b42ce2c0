"""``check_dataset`` accepts valid datasets and names what is wrong with others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch

from fedflat.data import Dataset, Examples, from_arrays, from_clients, load
from fedflat.errors import UserError
from fedflat.testing import Broken, check_dataset


def pictures(**more: Any) -> Dataset:
    """Bright squares in one of four corners, the corner being the class."""
    draw = np.random.default_rng(0)
    labels = np.arange(120) % 4
    images = draw.integers(0, 60, size=(120, 1, 6, 6))
    for image, label in zip(images, labels, strict=True):
        row, column = 3 * (label // 2), 3 * (label % 2)
        image[0, row : row + 3, column : column + 3] += 150
    images = images.astype(np.uint8)
    return from_arrays(
        images[:80], labels[:80], images[80:], labels[80:], name="corners", train_groups=np.arange(80) // 20, **more
    )


def test_valid_datasets_pass() -> None:
    assert len(check_dataset(pictures)) == 8
    assert "loading is deterministic" not in check_dataset(pictures())
    assert check_dataset(load("digits"))
    clients = [(torch.randn(30, 4) + 2 * label, torch.full((30,), label)) for label in (0, 1)]
    assert "every natural client has examples" in check_dataset(
        from_clients(clients, (torch.randn(5, 4), torch.zeros(5).long()))
    )


def leaking(data: Dataset) -> Dataset:
    inputs = data.test.inputs.clone()
    inputs[3] = data.train.inputs[7]
    return replace(data, test=replace(data.test, inputs=inputs))


def shuffled(data: Dataset) -> Dataset:
    """Labels that have lost their images, as when only one of two arrays is shuffled."""
    order = torch.from_numpy(np.random.default_rng(1).permutation(80))
    return replace(data, train=replace(data.train, targets=data.train.targets[order]))


def without_a_class(data: Dataset) -> Dataset:
    keep = data.train.targets != 2
    return replace(data, train=Examples(data.train.inputs[keep], data.train.targets[keep]))


@pytest.mark.parametrize(
    ("broken", "identity", "reason"),
    [
        (leaking, "no training example is in the test set", "1 of 40"),
        (without_a_class, "every class has training examples", "none for 2"),
        (lambda data: replace(data, mean=(127.0,)), "mean and std match the training pixels", "mean is 127.000"),
        (lambda data: replace(data, std=(1.0,)), "mean and std match the training pixels", "std is 1.000"),
        (
            lambda data: replace(data, train=replace(data.train, groups=2 * data.train.groups)),
            "every natural client has examples",
            "client 1",
        ),
        (shuffled, "labels are predictable from inputs", "shuffled labels"),
    ],
)
def test_mistakes_are_named(broken: Callable[[Dataset], Dataset], identity: str, reason: str) -> None:
    with pytest.raises(Broken, match=reason) as caught:
        check_dataset(broken(pictures()))
    assert caught.value.property_name == identity and identity in str(caught.value)


def test_datasets_are_checked_by_name() -> None:
    assert "loading is deterministic" in check_dataset("digits")
    with pytest.raises(UserError, match="expected the name of a dataset"):
        check_dataset(3)  # type: ignore[arg-type]


def test_random_loading_is_detected() -> None:
    number = count()
    with pytest.raises(Broken, match="loading is deterministic"):
        check_dataset(lambda: pictures(mean=[0.3], std=[0.25]) if next(number) else load("digits"))
