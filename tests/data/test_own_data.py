"""User data: array files and torch datasets."""

from __future__ import annotations

import importlib.machinery
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import IterableDataset, Subset, TensorDataset

from fedflat.data import (
    MappedTensor,
    canonical_dataset,
    from_arrays,
    from_clients,
    from_torch,
    load,
    scaling,
    standardise,
)
from fedflat.data.arrays import as_native
from fedflat.data.sources import array_files
from fedflat.errors import UserError

RNG = np.random.default_rng(0)
IMAGES = RNG.integers(0, 256, (20, 3, 4, 4), dtype=np.uint8)
LABELS = np.arange(20) % 2
TRAIN = {"train_inputs": IMAGES[:15], "train_targets": LABELS[:15]}
FOUR = {**TRAIN, "test_inputs": IMAGES[15:], "test_targets": LABELS[15:]}
EXPECTED = from_arrays(IMAGES[:15], LABELS[:15], IMAGES[15:], LABELS[15:]).content


# --- arrays ---


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_an_npz_of_four_arrays(tmp_path: Path, save: Any) -> None:
    save(tmp_path / "mine.npz", **FOUR, train_groups=np.arange(15) // 5, classes=np.array(["cat", "dog"]))
    dataset = load(f"arrays(path={tmp_path / 'mine.npz'})", tmp_path)
    assert dataset.classes == ("cat", "dog") and torch.equal(dataset.test.inputs, torch.from_numpy(IMAGES[15:]))
    assert dataset.train.groups is not None and dataset.train.groups.tolist() == (np.arange(15) // 5).tolist()
    assert not isinstance(dataset.train.inputs, MappedTensor) and not (tmp_path / "decoded").exists()


def test_an_npz_with_the_names_that_keras_uses(tmp_path: Path) -> None:
    np.savez(tmp_path / "mine.npz", x_train=IMAGES[:15], y_train=LABELS[:15], x_test=IMAGES[15:], y_test=LABELS[15:])
    assert load(f"arrays(path={tmp_path / 'mine.npz'})", tmp_path).content == EXPECTED


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_an_npz_that_does_not_fit_in_memory_is_mapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save: Any
) -> None:
    save(tmp_path / "mine.npz", **FOUR)
    monkeypatch.setattr(array_files, "fits_in_memory", lambda size: False)
    for _ in range(2):
        dataset = load(f"arrays(path={tmp_path / 'mine.npz'})", tmp_path)
        assert isinstance(dataset.train.inputs, MappedTensor) and dataset.content == EXPECTED
    assert len(list((tmp_path / "decoded").iterdir())) == 1


def test_an_array_named_columns_does_not_name_columns(tmp_path: Path) -> None:
    np.savez(tmp_path / "mine.npz", inputs=np.ones((10, 2)), targets=np.arange(10) % 2, columns=np.arange(3))
    assert load(f"arrays(path={tmp_path / 'mine.npz'})").columns == ()


def test_standardising(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    targets = np.arange(10.0)
    arrays = {"inputs": np.arange(20.0).reshape(10, 2), "targets": targets}
    once = standardise(from_arrays(arrays["inputs"], targets, arrays["inputs"], targets))
    twice = standardise(once)
    assert twice.target_mean == once.target_mean == (4.5,) and twice.mean == once.mean == (9.0, 10.0)
    for split in ("train", "test"):
        for name, values in arrays.items():
            np.save(tmp_path / f"{split}_{name}.npy", values)
    mapped = load(f"arrays(path={tmp_path})")
    assert standardise(mapped).mean == once.mean
    monkeypatch.setattr(scaling, "fits_in_memory", lambda size: size < mapped.train.inputs.nbytes)
    with pytest.raises(UserError, match="do not fit in memory, so they cannot be standardised"):
        standardise(mapped)


def test_standardising_by_constants(tmp_path: Path) -> None:
    """All sites can use the same mean and standard deviation, instead of those of their own examples."""
    inputs, targets = np.arange(20.0).reshape(10, 2), np.arange(10.0)
    constants = {"mean": np.array([1.0, 2.0]), "std": np.array([2.0, 4.0]), "target_mean": 3.0, "target_std": 5.0}
    np.savez(tmp_path / "mine.npz", inputs=inputs, targets=targets, **constants)
    dataset = load(f"arrays(path={tmp_path / 'mine.npz'})")
    assert dataset.test.inputs.tolist() == [[3.5, 1.75], [8.5, 4.25]] and dataset.mean == (1.0, 2.0)
    assert dataset.test.targets.tolist() == [0.2, 1.2] and dataset.target_std == (5.0,)
    assert load(f"arrays(path={tmp_path / 'mine.npz'},standardise=true)").content == dataset.content
    assert not scaling.own_statistics_advice(dataset)
    plain = from_arrays(inputs, targets, inputs, targets)
    assert "own training examples" in scaling.own_statistics_advice(standardise(plain))
    assert standardise(plain, mean=[0, 0], std=[1, 1]).target_mean == (4.5,)
    whole = inputs.astype(np.int64)  # with constants, integers are numbers, not tokens
    assert from_arrays(whole, targets, whole, targets, mean=[1, 2], std=[2, 4]).test.inputs[0].tolist() == [-0.5, -0.25]
    for arguments, problem in (
        ({"mean": [0.0, 1.0]}, "only one of mean and std"),
        ({"mean": [0.0], "std": [1.0]}, "each of 2 columns"),
        ({"mean": [0, 0], "std": [1, 0]}, "must be positive"),
        ({"target_mean": [0]}, "only one of target_mean and target_std"),
    ):
        with pytest.raises(UserError, match=problem):
            standardise(plain, **arguments)
    with pytest.raises(UserError, match="already standardised"):
        standardise(dataset, mean=[0, 0], std=[1, 1])
    with pytest.raises(UserError, match="has classes as targets"):
        from_arrays(inputs, [0, 1] * 5, inputs, [0, 1] * 5, target_mean=[0], target_std=[1])


def test_options_for_tables_are_rejected_for_arrays(tmp_path: Path) -> None:
    np.savez(tmp_path / "mine.npz", inputs=np.ones((10, 2)), targets=np.arange(10) % 2, site=np.arange(10))
    with pytest.raises(UserError, match=r"group= selects a column .* clients in groups"):
        load(f"arrays(path={tmp_path / 'mine.npz'},group=site)")


def test_a_folder_of_npy_files_is_mapped(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    for name, array in FOUR.items():
        np.save(tmp_path / "mine" / f"{name}.npy", array)
    dataset = load(f"arrays(path={tmp_path / 'mine'})", tmp_path)
    assert isinstance(dataset.train.inputs, MappedTensor) and dataset.content == EXPECTED


def test_a_folder_of_npy_files_with_words_and_from_another_machine(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    values = RNG.random((20, 6)).astype(np.float32)
    np.save(tmp_path / "mine" / "inputs.npy", values.astype(">f4"))
    np.save(tmp_path / "mine" / "targets.npy", np.array(["dog", "cat"])[LABELS])
    np.save(tmp_path / "mine" / "classes.npy", np.array(["dog", "cat"]))
    dataset = load(f"arrays(path={tmp_path / 'mine'})", tmp_path)
    assert dataset.classes == ("dog", "cat") and dataset.test.targets.tolist() == [0, 1, 0, 1]
    assert torch.equal(dataset.test.inputs, torch.from_numpy(values[[8, 9, 18, 19]]))


def test_without_test_arrays_every_fifth_of_a_class_is_tested_on(tmp_path: Path) -> None:
    np.savez(tmp_path / "mine.npz", inputs=IMAGES, targets=LABELS, groups=np.array(["ann", "bob"] * 10))
    dataset = load(f"arrays(path={tmp_path / 'mine.npz'})", tmp_path)
    assert torch.equal(
        dataset.test.inputs, torch.from_numpy(IMAGES[[8, 9, 18, 19]])
    ) and dataset.test.targets.tolist() == [0, 1, 0, 1]
    assert (
        dataset.group_names == ("ann", "bob")
        and dataset.train.groups is not None
        and dataset.train.groups.tolist()[:3] == [0, 1, 0]
    )


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"a": LABELS}, r"mine\.npz .*array train_inputs.*: a$"),
        ({}, "array train_inputs.*none"),
        ({"inputs": IMAGES[:8], "targets": LABELS[:8]}, "too few examples to test on every fifth of a class; add"),
        ({"inputs": IMAGES[:4], "targets": LABELS[:4] / 2}, "too few examples to test on every fifth; add"),
        ({"inputs": IMAGES}, "array train_targets.*inputs"),
        ({k: v for k, v in FOUR.items() if k != "test_targets"}, "array test_targets.*test_inputs"),
        (FOUR | {"train_targets": LABELS[:15] + 5, "classes": np.array(["a", "b"])}, "label 6;.* 0 to 1"),
        (FOUR | {"train_inputs": np.array([{}] * 15)}, r"mine\.npz is not a complete.*\.astype\(str\)"),
    ],
)
def test_an_npz_without_the_expected_arrays(tmp_path: Path, arrays: dict[str, np.ndarray], message: str) -> None:
    np.savez(tmp_path / "mine.npz", **arrays)
    with pytest.raises(UserError, match=message):
        load(f"arrays(path={tmp_path / 'mine.npz'})", tmp_path)


def test_an_npz_cut_in_the_middle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.savez(tmp_path / "mine.npz", **FOUR)
    (tmp_path / "mine.npz").write_bytes((tmp_path / "mine.npz").read_bytes()[:-500])
    for fits in (True, False):
        monkeypatch.setattr(array_files, "fits_in_memory", lambda size, fits=fits: fits)
        with pytest.raises(UserError, match=r"mine\.npz is not a complete"):
            load(f"arrays(path={tmp_path / 'mine.npz'})", tmp_path)
    assert not (tmp_path / "decoded").exists()
    with pytest.raises(UserError, match=r"\.npz, \.parquet or \.csv"):
        load(f"arrays(path={tmp_path / 'other.npz'})", tmp_path)
    with pytest.raises(UserError, match=r"arrays\(path="):
        load("arrays", tmp_path)


# --- parquet ---


def test_parquet_without_pyarrow_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.parquet").touch()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pyarrow.*pip install 'fedflat\[hub\]'"):
        load(f"arrays(path={tmp_path / 'mine.parquet'})", tmp_path)


def test_parquet_of_lists_and_of_columns(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    import pandas

    flat = [image.ravel() for image in IMAGES]
    pandas.DataFrame({"inputs": flat, "target": LABELS, "group": ["a"] * 10 + ["b"] * 10}).to_parquet(
        tmp_path / "mine.parquet"
    )
    dataset = load(f"arrays(path={tmp_path / 'mine.parquet'},shape=3x4x4)", tmp_path)
    assert dataset.input_shape == (3, 4, 4) and torch.equal(
        dataset.test.inputs, torch.from_numpy(IMAGES[[8, 9, 18, 19]])
    )
    assert dataset.group_names == ("a", "b")
    with pytest.raises(UserError, match=r"shape=3x4 .*48 numbers"):
        load(f"arrays(path={tmp_path / 'mine.parquet'},shape=3x4)", tmp_path)
    form = r"column 'label'.*arrays\(path=FILE,target=COLUMN\)"
    for drop, columns in (("inputs", "target, group"), ("inputs|target|group", "none")):
        with pytest.raises(UserError, match=rf"{form} \(columns: {columns}\)"):
            load(f"arrays(path={tmp_path / 'mine.parquet'},target=label,drop={drop})", tmp_path)
    (tmp_path / "both").mkdir()
    for part, rows in (("train", slice(0, 15)), ("test", slice(15, 20))):
        table = pandas.DataFrame(
            {"a": np.arange(20.0)[rows], "b": 1, "word": "x", "kind": np.array(["no", "yes"])[LABELS[rows]]}
        )
        table.to_parquet(tmp_path / "both" / f"{part}.parquet")
    table.assign(b="7").to_parquet(tmp_path / "texts.parquet")
    with pytest.raises(UserError, match=r"'b' \(5 of 5 rows, first row 1\)"):  # numbers stored as text
        load(f"arrays(path={tmp_path / 'texts.parquet'},target=kind,drop=word)", tmp_path)
    columns = load(f"arrays(path={tmp_path / 'both'},target=kind,drop=word)", tmp_path)
    assert columns.kind == "vector" and columns.input_shape == (2,) and columns.classes == ("no", "yes")
    assert (
        columns.test.inputs[:, 0].tolist() == [15, 16, 17, 18, 19]
        and columns.test.targets.tolist() == LABELS[15:].tolist()
    )
    (tmp_path / "mine.parquet").write_bytes((tmp_path / "mine.parquet").read_bytes()[:-9])
    with pytest.raises(UserError, match=r"mine\.parquet is not a valid parquet file"):
        load(f"arrays(path={tmp_path / 'mine.parquet'})", tmp_path)


# --- torch ---


class Pictures:
    """A torch dataset like those of torchvision."""

    classes: tuple[str, ...] = ("cat", "dog")

    def __init__(self, mode: str = "RGB") -> None:
        self.mode = mode

    def __len__(self) -> int:
        return 20

    def __getitem__(self, place: int) -> tuple[Image.Image, int]:
        return Image.fromarray(IMAGES[place].transpose(1, 2, 0)).convert(self.mode), int(LABELS[place])


class Stream(IterableDataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 20

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, str]]:
        for image, label in zip(IMAGES, LABELS, strict=True):
            yield torch.from_numpy(image).float() / 255, torch.tensor(label), "ann" if label else "bob"


def test_torch_datasets_of_pictures() -> None:
    train, test = Subset(Pictures(), range(15)), Subset(Pictures(), range(15, 20))  # type: ignore[arg-type]
    dataset = from_torch(train, test, name="mine")
    assert dataset.content == EXPECTED and dataset.name == "mine" and dataset.classes == ("0", "1")
    assert from_torch(Pictures(), Pictures()).classes == ("cat", "dog")
    assert from_torch(Pictures("L"), Pictures("L")).input_shape == (1, 4, 4)


def test_torch_datasets_of_tensors_and_streams_with_clients() -> None:
    tensors = TensorDataset(torch.from_numpy(IMAGES[:15]), torch.from_numpy(LABELS[:15]))
    assert (
        from_torch(tensors, TensorDataset(torch.from_numpy(IMAGES[15:]), torch.from_numpy(LABELS[15:]))).content
        == EXPECTED
    )
    streamed = from_torch(Stream(), Stream())
    assert streamed.train.inputs.dtype == torch.float32 and streamed.group_names == ("ann", "bob")
    assert streamed.train.groups is not None and streamed.train.groups.tolist() == (1 - LABELS).tolist()


def test_lists_of_whole_numbers_and_fractions_are_read(tmp_path: Path) -> None:
    items = [([1, 2], 0)] * 256 + [([0.5, 1.0], 1)]
    assert from_torch(items, items).train.inputs[-1].tolist() == [0.5, 1.0]
    with pytest.raises(UserError, match="cannot hold inputs of types int64 and float64; convert them"):
        from_torch(items, items, folder=tmp_path)


@pytest.mark.parametrize("kind", ["reversed", "read-only"])
def test_arrays_that_torch_cannot_share_are_copied(kind: str, recwarn: pytest.WarningsRecorder) -> None:
    arrays = IMAGES[:15], np.arange(15) // 5, LABELS[:15], LABELS[:15] / 2, np.eye(15, 3, dtype=int)
    if kind == "reversed":
        arrays = tuple(array[::-1].copy()[::-1] for array in arrays)
    else:
        arrays = tuple(np.broadcast_to(array, array.shape) for array in arrays)
    assert all(as_native(array).flags.writeable for array in arrays)
    inputs, groups, *columns = arrays
    for targets in columns:
        dataset = from_arrays(inputs, targets, inputs, targets, train_groups=groups)
        assert np.array_equal(dataset.train.inputs, IMAGES[:15]) and dataset.train.groups.tolist() == groups.tolist()
        for built in (dataset, from_clients([(inputs, targets)])):
            assert built.train.targets.tolist() == targets.tolist()
    assert not recwarn.list


def test_a_part_of_a_memory_map_stays_mapped(tmp_path: Path) -> None:
    np.save(tmp_path / "inputs.npy", IMAGES)
    part = np.load(tmp_path / "inputs.npy", mmap_mode="r")[:15]
    assert np.shares_memory(as_native(part), part)


def test_masked_arrays_are_rejected() -> None:
    masked = np.ma.masked_array(np.ones((4, 2)), mask=np.eye(4, 2))
    with pytest.raises(UserError, match=r"masked values; .*\.filled\(value\)"):
        from_arrays(masked, [0, 1, 0, 1], np.ones((4, 2)), [0, 1, 0, 1])
    with pytest.raises(UserError, match=r"client 1 is not a pair .*masked values"):
        from_clients([(np.ones((4, 2)), [0, 1, 0, 1]), (masked, [0, 1, 0, 1])])


def test_tensors_of_any_float_type_and_with_gradients_are_read() -> None:
    items = [(torch.ones(2, dtype=torch.bfloat16), 0), (torch.ones(2, dtype=torch.bfloat16, requires_grad=True), 1)]
    assert from_torch(items, items).train.inputs.tolist() == [[1.0, 1.0], [1.0, 1.0]]
    wide = np.ones((2, 2), dtype=np.longdouble)
    assert from_arrays(wide, [0, 1], wide, [0, 1]).train.inputs.dtype == torch.float64
    with pytest.raises(UserError, match="got a complex one"):
        from_arrays(torch.ones(2, 2) * 1j, [0, 1], torch.ones(2, 2), [0, 1])


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            (IMAGES[:2] / 255, [0, 1]),
            "inputs of client 1 are of type torch.float64, those of client 0 of torch.uint8",
        ),
        ((IMAGES[:2], [0.5, 1.5]), "the targets of client 1 are of type float64"),
        ((IMAGES[:2], ["cat", "dog"]), "expected one type for all clients"),
    ],
)
def test_clients_with_data_of_different_types_are_rejected(other: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        from_clients([(IMAGES[:2], [0, 1]), other])
    unsigned, small = np.array([0, 1], dtype=np.uint8), IMAGES[:2] / np.float32(255)
    assert len(from_clients([(small, unsigned), (IMAGES[:2] / 255, [0, 1])]).train) == 4


def test_torch_datasets_can_be_written_to_files(tmp_path: Path) -> None:
    dataset = from_torch(Pictures(), Pictures(), name="mine", folder=str(tmp_path / "here"))
    assert isinstance(dataset.train.inputs, MappedTensor) and torch.equal(
        dataset.train.inputs, torch.from_numpy(IMAGES)
    )
    assert sorted(path.name for path in (tmp_path / "here").iterdir()) == ["mine-test.npy", "mine-train.npy"]


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([], "training set of mine is empty"),
        (None, "training set of mine is a NoneType"),
        (TensorDataset(torch.from_numpy(IMAGES)), "has 1 tensors; expected inputs, targets"),
        ([(IMAGES[0], 0), (IMAGES[1], 1, "ann")], "only some items have a client"),
        ([(IMAGES[0], [0]), (IMAGES[1], [0, 1])], "targets of the training set of mine differ in shape"),
        ([(IMAGES[0], 0), (IMAGES[0] / 255, 0)], "type float64, but the first has .* uint8"),
        ([(torch.eye(2).to_sparse(), 0)], "expected dense real tensors, but got a sparse one"),
        ([IMAGES[0]], "item 0 of the training set of mine is a ndarray"),
        (
            [(IMAGES[0], 0), (IMAGES[0, :, :2], 1)],
            r"item 1 of the training set of mine has shape \(3, 2, 4\) and type uint8, but the first has \(3, 4, 4\)",
        ),
        ([(IMAGES[0], "cat")], "training labels and the test labels"),
    ],
)
def test_invalid_torch_datasets_are_rejected(tmp_path: Path, items: list[Any], message: str) -> None:
    for folder in (None, tmp_path):
        with pytest.raises(UserError, match=message):
            from_torch(items, Pictures(), name="mine", folder=folder)
    assert not list(tmp_path.glob(".*")), "nothing half-written"


def test_pictures_of_a_torch_dataset_become_bytes_in_every_mode() -> None:
    grey = np.arange(16, dtype=np.uint16).reshape(4, 4) * 4000
    for image, expected in (
        (Image.fromarray(grey), grey[None] // 256),
        (Image.fromarray(grey > 30000), np.where(grey > 30000, 255, 0)[None]),
        (Pictures("P")[3][0], np.asarray(Pictures("P")[3][0].convert("RGB")).transpose(2, 0, 1)),
    ):
        dataset = from_torch([(image, 0)], [(image, 0)])
        assert dataset.train.inputs.dtype == torch.uint8 and np.array_equal(dataset.train.inputs[0].numpy(), expected)


def test_a_path_with_a_known_suffix_is_a_dataset(tmp_path: Path) -> None:
    np.savez(tmp_path / "my-wine.npz", **FOUR)
    path = tmp_path / "my-wine.npz"
    assert canonical_dataset(str(path)) == f"arrays(path={path})"
    assert load(str(path), tmp_path).content == load(f"arrays(path={path})", tmp_path).content
    path.rename(tmp_path / "WINE.NPZ")
    assert load(str(tmp_path / "WINE.NPZ"), tmp_path).content == load(f"arrays(path={tmp_path / 'WINE.NPZ'})").content
    (tmp_path / "WINE.NPZ").rename(tmp_path / "wine.zip")
    with pytest.raises(UserError, match=r"wine\.zip has an unknown format.*images\(path="):
        load(str(tmp_path / "wine.zip"), tmp_path)
    with pytest.raises(UserError, match="is a folder; use images"):
        load(str(tmp_path), tmp_path)
    with pytest.raises(UserError, match="expected name"):
        load("(" * 300, tmp_path)  # too long for a file name


def test_csv_files(tmp_path: Path) -> None:
    rows = "\n".join(f"{number},{2 * number},{'cat' if number % 2 else 'dog'}" for number in range(20))
    (tmp_path / "animals.csv").write_text(f"a,b,target\n{rows}\n")
    dataset = load(str(tmp_path / "animals.csv"), tmp_path)
    assert dataset.classes == ("cat", "dog") and dataset.kind == "vector" and dataset.input_shape == (2,)
    assert (len(dataset.train), len(dataset.test)) == (16, 4)
    assert torch.equal(dataset.train.inputs[:, 1], 2 * dataset.train.inputs[:, 0])
    (tmp_path / "ANIMALS.CSV").write_text(f"a,b,target\n{rows}\n")
    assert load(str(tmp_path / "ANIMALS.CSV"), tmp_path).content == dataset.content
    (tmp_path / "gaps.csv").write_text(f"a,b,target\n{rows}\n1,,\n2,inf,cat\n")
    gaps = r"'b' \(2 of 22 rows, first row 21\); 'target' \(1 of 22 rows, first row 21\).*drop=b\)$"
    with pytest.raises(UserError, match=gaps):
        load(str(tmp_path / "gaps.csv"), tmp_path)
    (tmp_path / "words.csv").write_text(f"a,b,target\n{rows}\n?,none?,cat\n2,?,cat\n")
    (tmp_path / "rows.csv").write_text("a,b,target\n")
    with pytest.raises(UserError, match=r"rows\.csv has no rows"):
        load(str(tmp_path / "rows.csv"), tmp_path)
    words = r"not numbers in 'a' \(1 of 22 rows, first row 21\); 'b' \(2 of 22.*group=NAME.*drop=a\|b\)"
    with pytest.raises(UserError, match=words):
        load(str(tmp_path / "words.csv"), tmp_path)
    (tmp_path / "european.csv").write_text(f"a,b,target\n{rows}\n".replace(",", ";"))
    with pytest.raises(UserError, match="separated by ';'; expected commas"):
        load(str(tmp_path / "european.csv"), tmp_path)
    with pytest.raises(UserError, match=r"absent\.csv"):
        load(str(tmp_path / "absent.csv"), tmp_path)
