"""Containers: their checks and descriptions."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from fedflat.data import Dataset, Examples, describe, from_arrays
from fedflat.errors import UserError


def images(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, 3, 5, 5), dtype=np.uint8)


def test_taking_examples_selects_the_rows_of_every_tensor() -> None:
    examples = Examples(torch.arange(10).view(10, 1), torch.arange(10), torch.arange(10) * 2, torch.arange(10) * 3)
    taken = examples.take(np.array([7, 1, 1]))
    assert len(taken) == 3
    assert [tensor.flatten().tolist() for tensor in taken.tensors().values()] == [
        [7, 1, 1],
        [7, 1, 1],
        [14, 2, 2],
        [21, 3, 3],
    ]
    assert Examples(examples.inputs, examples.targets).take(torch.tensor([0])).groups is None


def test_sharing_moves_the_tensors_themselves() -> None:
    examples = Examples(torch.zeros(3, 2), torch.zeros(3, dtype=torch.int64))
    examples.share()
    assert examples.inputs.is_shared() and examples.targets.is_shared()


def test_statistics_of_uint8_images_are_those_of_numpy() -> None:
    data = images(2500)
    data[:, 2] = 77
    dataset = from_arrays(data, np.zeros(2500, int), data[:2], [0, 0], name="mine")
    scaled = data / 255.0
    assert dataset.mean == pytest.approx(scaled.mean((0, 2, 3)))
    assert dataset.std[:2] == pytest.approx(scaled[:, :2].std((0, 2, 3)))
    assert dataset.std[2] == 1.0, "a constant channel must not be divided by zero"
    assert dataset.kind == "image" and dataset.input_shape == (3, 5, 5) and dataset.classes == ("0",)


def test_given_statistics_and_classes_are_kept() -> None:
    dataset = from_arrays(images(2), [0, 1], images(2), [1, 0], classes=["cat", "dog"], mean=[0.1] * 3, std=[0.2] * 3)
    assert (dataset.classes, dataset.mean, dataset.std) == (("cat", "dog"), (0.1,) * 3, (0.2,) * 3)
    of_numpy = from_arrays(images(2), [0, 1], images(2), [1, 0], mean=np.full(3, 0.1), std=np.full(3, 0.2))
    assert (of_numpy.mean, of_numpy.std) == (dataset.mean, dataset.std)
    floats = images(2).astype("float32")  # never normalised, so a description must not say that they are
    assert from_arrays(floats, [0, 1], floats, [1, 0], mean=[0.1] * 3, std=[0.2] * 3).mean == ()


def test_words_are_numbered_by_the_classes_where_these_are_given() -> None:
    words = {"targets": (["dog", "cat"], ["bird"]), "classes": ["dog", "bird", "cat"]}
    dataset = from_arrays(images(2), words["targets"][0], images(1), words["targets"][1], classes=words["classes"])
    assert (dataset.train.targets.tolist(), dataset.test.targets.tolist()) == ([0, 2], [1])
    assert from_arrays(images(2), ["dog", "cat"], images(1), ["bird"]).train.targets.tolist() == [2, 1], (
        "in alphabetical order"
    )
    with pytest.raises(UserError, match=r"mine .*'cta'.*cat"):
        from_arrays(images(2), ["dog", "cta"], images(1), ["dog"], name="mine", classes=["dog", "cat"])


def test_tensors_with_a_graph_are_arrays() -> None:
    inputs, targets = torch.eye(4, requires_grad=True), torch.arange(4.0, requires_grad=True)
    dataset = from_arrays(inputs, 2 * targets, inputs, 2 * targets)
    assert not dataset.train.inputs.requires_grad and dataset.train.targets.tolist() == [0, 2, 4, 6]


def test_tables_of_pandas_are_arrays() -> None:
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame({"a": [0.5, 1.5], "b": [1.0, 2.0], "kind": ["dog", "cat"]})
    dataset = from_arrays(table[["a", "b"]], table["kind"], table[["a", "b"]], table["kind"])
    assert dataset.train.inputs.tolist() == [[0.5, 1.0], [1.5, 2.0]] and dataset.classes == ("cat", "dog")
    with pytest.raises(UserError, match=r"inputs of arrays .*object.*numbers"):
        from_arrays(table, table["kind"], table, table["kind"])


@pytest.mark.parametrize("kind", [">f4", np.float16, bool])
def test_vectors_of_every_type_become_float32(kind: str) -> None:
    values = np.array([[0, 1], [1, 0]], dtype=kind)
    dataset = from_arrays(values, np.array([0, 1], dtype=">i4"), values, [0, 1])
    assert (
        dataset.kind == "vector"
        and dataset.train.inputs.dtype == torch.float32
        and dataset.train.targets.tolist() == [0, 1]
    )
    assert dataset.train.inputs.tolist() == [[0, 1], [1, 0]]


def test_other_inputs_than_images() -> None:
    assert from_arrays(images(2)[:, 0], [0, 1], images(2)[:, 0], [0, 1]).input_shape == (1, 5, 5)
    vectors = from_arrays(np.zeros((2, 5)), [0, 1], np.zeros((1, 5)), [1])
    assert vectors.kind == "vector" and vectors.train.inputs.dtype == torch.float64
    assert from_arrays(np.zeros((2, 5), int), [0, 1], np.zeros((1, 5), int), [1], train_groups=[4, 9]).kind == "text"


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ((images(2), [0], images(1), [0]), "training set of mine has 2 inputs, 1 targets"),
        ((images(2), [0, 1], images(1)[:0], []), "test set of mine is empty"),
        ((images(2), [0.0, 1.7], images(1), ["cat"]), "type float"),
        ((images(2).astype(int), [0, 1], images(1), [0]), "images of mine are torch.int64; expected uint8"),
        (([[1.0, 2.0], [3.0]], [0, 1], [[1.0, 2.0]], [0]), "examples differ in shape"),
        ((images(2), [0, -1], images(1), [0]), "training set of mine has label -1"),
        (
            (images(2), [0, 1], images(1)[:, :, :2], [0]),
            "the training inputs of mine are uint8 of shape (3, 5, 5), but its test inputs",
        ),
        ((np.full((1, 2), np.nan), [0], np.zeros((1, 2)), [0]), "NaN"),
        ((images(2).transpose(0, 2, 3, 1), [0, 1], images(2).transpose(0, 2, 3, 1), [0, 1]), "channels first"),
        ((images(2).reshape(2, -1), [0, 1], images(2).reshape(2, -1), [0, 1]), "[n, C, H, W]"),
    ],
)
def test_inconsistent_arrays_raise_a_clear_error(arrays: tuple, message: str) -> None:
    with pytest.raises(UserError) as raised:
        from_arrays(*arrays, name="mine")
    assert message in str(raised.value)


def test_labels_beyond_the_classes_and_wrong_types_are_rejected() -> None:
    good = Examples(torch.zeros(2, 3), torch.tensor([0, 1]))
    with pytest.raises(UserError, match=r"label 1;.* 0 to 0"):
        Dataset("mine", good, good, ("only",), kind="vector")
    with pytest.raises(UserError, match="int64"):
        Dataset("mine", Examples(torch.zeros(1, 3), torch.zeros(1)), good, ("a", "b"), kind="vector")
    with pytest.raises(UserError, match=r"3 channels.*mean"):
        Dataset("mine", *(Examples(torch.from_numpy(images(1)), torch.tensor([0])),) * 2, ("a",), (0.5,), (0.5,))


def test_the_content_hash_depends_only_on_the_data() -> None:
    dataset = from_arrays(images(3), [0, 1, 0], images(2, 1), [1, 0])
    assert dataclasses.replace(dataset, name="other", mean=(0.0,) * 3).content == dataset.content
    changed = images(3)
    changed[2, 2, 4, 4] ^= 1
    assert from_arrays(changed, [0, 1, 0], images(2, 1), [1, 0]).content != dataset.content
    assert from_arrays(images(3), [0, 1, 1], images(2, 1), [1, 0]).content != dataset.content
    assert from_arrays(images(3), [0, 1, 0], images(2, 2), [1, 0]).content != dataset.content


def test_the_description_counts() -> None:
    described = describe(from_arrays(images(3), [0, 2, 0], images(2, 1), [1, 0]))
    assert described["train_class_counts"] == [2, 0, 1] and described["test_class_counts"] == [1, 1, 0]
    assert described["train"] == 3 and described["input_shape"] == [3, 5, 5] and len(described["content"]) == 64
