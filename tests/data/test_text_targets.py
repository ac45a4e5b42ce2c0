"""Targets with a class per position, groups with names, labels that are words."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedflat.data import Dataset, Examples, describe, from_arrays, from_clients
from fedflat.errors import UserError

TOKENS = torch.arange(12).view(3, 4) % 5


def test_tokens_may_be_integers_of_any_size() -> None:
    for dtype in ("int8", "uint16", "int32"):
        data = from_arrays(TOKENS.numpy().astype(dtype), TOKENS, TOKENS[:1].numpy().astype(dtype), TOKENS[:1])
        assert data.kind == "text" and data.train.inputs.tolist() == TOKENS.tolist()
        assert data.train.inputs.dtype == (torch.int32 if dtype == "int32" else torch.int64)


def test_text_may_have_a_target_per_position() -> None:
    dataset = from_arrays(TOKENS, TOKENS, TOKENS[:1], TOKENS[:1], name="words")
    assert dataset.kind == "text" and dataset.train.targets.shape == (3, 4) and dataset.num_classes == 5
    assert describe(dataset)["target_shape"] == [4] and describe(dataset)["train_class_counts"] == [3, 3, 2, 2, 2]
    assert dataset.train.take(np.array([2])).targets.tolist() == [[3, 4, 0, 1]]


@pytest.mark.parametrize(
    ("inputs", "targets", "message"),
    [
        (
            TOKENS,
            TOKENS[:, :3],
            r"the targets of the training set of words have shape \(3,\) per example; expected one class .* \(4,\)",
        ),
        (TOKENS, TOKENS + 1, "has label 5; expected labels from 0 to 4"),
        (TOKENS.float(), TOKENS, r"have shape \(4,\) per example; expected one class per example, or 0"),
    ],
)
def test_other_targets_are_rejected(inputs: torch.Tensor, targets: torch.Tensor, message: str) -> None:
    with pytest.raises(UserError, match=message):
        from_arrays(inputs, targets, inputs, targets, name="words", classes=list("abcde"))


def test_labels_and_groups_may_be_words() -> None:
    groups = ["zoe", "ann", "zoe"]
    dataset = from_arrays(
        np.zeros((3, 2)), ["no", "yes", "no"], np.zeros((1, 2)), ["yes"], train_groups=groups, test_groups=["bob"]
    )
    assert (
        dataset.classes == ("no", "yes")
        and dataset.train.targets.tolist() == [0, 1, 0]
        and dataset.test.targets.tolist() == [1]
    )
    assert dataset.group_names == ("ann", "bob", "zoe") and dataset.train.groups is not None
    assert dataset.train.groups.tolist() == [2, 0, 2]
    pairs = [(np.zeros((2, 3)), ["no", "yes"]), (np.zeros((1, 3)), ["maybe"])]
    assert from_clients(pairs).train.targets.tolist() == [1, 2, 0]
    with pytest.raises(UserError, match=r"targets of client 1 have shape \(1,\), those of client 0 \(\)"):
        from_clients([pairs[0], (np.zeros((1, 3)), [["maybe"]])])
    with pytest.raises(UserError, match="training labels and the test labels"):
        from_arrays(np.zeros((1, 2)), ["no"], np.zeros((1, 2)), [1])


def test_every_group_has_a_name_or_none_has() -> None:
    examples = Examples(torch.zeros(2, 3), torch.tensor([0, 0]), torch.tensor([0, 2]))
    with pytest.raises(UserError, match="group 2, but only 2 group names"):
        Dataset("mine", examples, examples, ("a",), kind="vector", group_names=("x", "y"))
    with pytest.raises(UserError, match=r"groups of the training set of mine have shape \(2, 1\); expected one"):
        from_arrays(np.zeros((2, 3)), [0, 0], np.zeros((2, 3)), [0, 0], name="mine", train_groups=np.zeros((2, 1), int))
