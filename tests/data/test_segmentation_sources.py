"""CamVid, Cityscapes and IDDA, small but in the original layout; and masks that cannot be."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fedflat.data import (
    IGNORED,
    Dataset,
    Examples,
    augmentation,
    describe,
    from_arrays,
    load,
    make_partition,
    registry,
    verify,
)
from fedflat.data.batches import channel_statistics
from fedflat.data.files import masks
from fedflat.data.sources.cityscapes import CITYSCAPES, LABEL_IDS
from fedflat.errors import UserError

HEIGHT, WIDTH = 6, 8


def pair(
    picture: Path, mask: Path, seed: int, ids: int, size: tuple[int, int] = (HEIGHT, WIDTH)
) -> tuple[np.ndarray, np.ndarray]:
    """Write a random picture and a random mask with ids below ``ids``; returns what was written."""
    rng = np.random.default_rng(seed)
    pixels, numbers = rng.integers(0, 256, (*size, 3), dtype=np.uint8), rng.integers(0, ids, size, dtype=np.uint8)
    for path, array in ((picture, pixels), (mask, numbers)):
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(array).save(path)
    return pixels, numbers


@pytest.fixture
def camvid(tmp_path: Path) -> Path:
    """Two drives, in each part one frame of the one and two of the other."""
    for number, part in enumerate(("train", "val", "test")):
        for frame, drive in enumerate(("0001TP", "0016E5", "0016E5")):
            name = f"{drive}_{frame:06d}.png"
            pair(
                tmp_path / "CamVid" / part / name, tmp_path / "CamVid" / f"{part}annot" / name, 10 * number + frame, 12
            )
    return tmp_path


def decoded_once(text: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Dataset:
    first = load(text, folder)
    with monkeypatch.context() as patch:
        patch.setattr(masks, "decode_pair", lambda *_: pytest.fail("decoded again"))
        second = load(text, folder)
    assert second.content == first.content and second.mean == first.mean
    return second


def test_camvid_has_eleven_classes_and_void_is_ignored(camvid: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = decoded_once("camvid", camvid, monkeypatch)
    assert (data.kind, data.num_classes, data.input_shape, data.group_names) == (
        "segmentation",
        11,
        (3, 6, 8),
        ("0001TP", "0016E5"),
    )
    assert (
        data.train.targets.dtype == torch.uint8 and tuple(data.train.targets.shape) == (3, 6, 8) and len(data.test) == 3
    )
    pixels, numbers = pair(camvid / "a.png", camvid / "b.png", 21, 12)
    assert np.array_equal(data.test.inputs[1].numpy(), pixels.transpose(2, 0, 1)), "the second frame of test"
    assert np.array_equal(data.test.targets[1].numpy(), np.where(numbers == 11, IGNORED, numbers))
    assert (data.mean, data.std) == channel_statistics(data.train.inputs), "of what is trained on"
    assert data.train.groups is not None and data.train.groups.tolist() == [0, 1, 1]
    counts = describe(data)["test_class_counts"]
    assert counts == [int((data.test.targets == label).sum()) for label in range(11)] and sum(counts) < 3 * 48
    assert len(verify("camvid", camvid)) == 4


def test_masks_are_scaled_to_the_nearest_id_and_pictures_keep_their_shape(camvid: Path) -> None:
    small = load("camvid(size=3)", camvid)
    assert small.input_shape == (3, 3, 4) and small.name == "camvid(size=3)"
    _, numbers = pair(camvid / "a.png", camvid / "b.png", 0, 12)
    nearest = numbers[1::2, 1::2]  # the middle of a new pixel is the corner of four; the last of them holds it
    assert np.array_equal(small.train.targets[0].numpy(), np.where(nearest == 11, IGNORED, nearest))
    larger = load("camvid(size=12)", camvid)
    assert np.array_equal(
        larger.train.targets[0].numpy(),
        np.kron(load("camvid", camvid).train.targets[0].numpy(), np.ones((2, 2), np.uint8)),
    )
    assert len(load("camvid(with_val=true)", camvid).train) == 6


def test_frames_without_a_drive_have_no_groups(tmp_path: Path) -> None:
    for part in ("train", "test"):
        pair(tmp_path / f"CamVid/{part}/0000.png", tmp_path / f"CamVid/{part}annot/0000.png", 0, 3)
    data = load("camvid", tmp_path)
    assert data.train.groups is None and data.group_names == ()


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (
            lambda root: pair(root / "train/x_1.png", root / "trainannot/x_1.png", 0, 40),
            r"class id \d+.* from 0 to 11",
        ),
        (
            lambda root: Image.new("L", (5, 5)).save(root / "trainannot/0001TP_000000.png"),
            "6x8 pixels.* trainannot/0001TP_000000.png has 5x5",
        ),
        (lambda root: (root / "testannot/0001TP_000000.png").unlink(), "a mask of the same name"),
        (
            lambda root: (root / "train/0016E5_000001.png").write_bytes(b"PNG?"),
            "0016E5_000001.png is not a complete image",
        ),
    ],
)
def test_invalid_masks_are_rejected(camvid: Path, damage: Callable[[Path], object], sentence: str) -> None:
    damage(camvid / "CamVid")
    with pytest.raises(UserError, match=sentence):
        load("camvid", camvid)
    kept = camvid / "decoded"
    assert not kept.exists() or not list(kept.iterdir()), "nothing half-decoded is left"


@pytest.fixture
def cityscapes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two cities to train on, of 2 and 5 pictures, and one of 3 to test on."""
    for number, (part, city, count) in enumerate(
        (("train", "aachen", 2), ("train", "bochum", 5), ("val", "frankfurt", 3))
    ):
        for index in range(count):
            name = f"{city}_{index:06d}_000019"
            picture = tmp_path / f"cityscapes/leftImg8bit/{part}/{city}/{name}_leftImg8bit.png"
            mask = tmp_path / f"cityscapes/gtFine/{part}/{city}/{name}_gtFine_labelIds.png"
            pair(picture, mask, 10 * number + index, 34)
            Image.new("L", (WIDTH, HEIGHT)).save(mask.with_name(f"{name}_gtFine_instanceIds.png"))
    monkeypatch.setitem(registry.DATASETS._components, "cityscapes", dataclasses.replace(CITYSCAPES, sizes=(7, 3)))
    return tmp_path


def test_cityscapes_ids_become_train_ids_and_cities_are_clients(
    cityscapes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = decoded_once("cityscapes(size=none)", cityscapes, monkeypatch)
    assert data.num_classes == 19 and data.group_names == ("aachen", "bochum", "frankfurt")
    _, numbers = pair(cityscapes / "a.png", cityscapes / "b.png", 12, 34)
    expected = np.full((6, 8), IGNORED, np.uint8)
    for label, number in enumerate(LABEL_IDS):
        expected[numbers == number] = label
    assert np.array_equal(data.train.targets[4].numpy(), expected), "the third picture of bochum"
    assert data.test.groups is not None and data.test.groups.tolist() == [2, 2, 2], "a city that training has not seen"
    by_city = make_partition("natural", data.train.targets, 19, None, 0, groups=data.train.groups)
    assert [len(client) for client in by_city.clients] == [2, 5]
    smaller = make_partition("natural(largest=2)", data.train.targets, 19, None, 0, groups=data.train.groups)
    assert [len(client) for client in smaller.clients] == [2, 2, 2, 1]
    assert data.train.groups is not None and all(
        len(set(data.train.groups[client].tolist())) == 1 for client in smaller.clients
    )
    assert sorted(np.concatenate(smaller.clients).tolist()) == list(range(7))
    assert load("cityscapes", cityscapes).input_shape == (3, 512, 683)


def test_uniform_clients_and_splits_that_need_labels(cityscapes: Path) -> None:
    data = load("cityscapes(size=none)", cityscapes)
    uniform = make_partition("iid", data.train.targets, 19, 3, 0).describe(data.train.targets, 19)
    assert uniform["sizes"] == {"min": 2, "median": 2.0, "max": 3} and uniform["coverage"] == 1
    assert np.array(uniform["histogram"]).sum() == int((data.train.targets != IGNORED).sum()), "pixels that count"
    assert 0 <= uniform["heterogeneity"] < 1
    for partition in ("dirichlet", "pathological", "iid+longtail"):
        with pytest.raises(UserError, match="each has 48"):
            make_partition(partition, data.train.targets, 19, 3, 0)


def test_incomplete_cityscapes_are_rejected(cityscapes: Path) -> None:
    mask = next((cityscapes / "cityscapes/gtFine/val/frankfurt").glob("*labelIds.png"))
    mask.unlink()
    with pytest.raises(UserError, match=f"{mask.name} is missing; .*gtFine_trainvaltest.zip"):
        load("cityscapes", cityscapes)
    next((cityscapes / "cityscapes/leftImg8bit/val/frankfurt").iterdir()).unlink()
    with pytest.raises(UserError, match=r"7 training and 2 validation.* 7 and 3"):
        load("cityscapes", cityscapes)
    with pytest.raises(
        UserError, match=r"expected cityscapes/leftImg8bit/train.*https://www.cityscapes-dataset.com/downloads/"
    ):
        load("cityscapes", cityscapes / "nothing")


@pytest.fixture
def idda(tmp_path: Path) -> Path:
    """Three domains of five pictures; masks have the id in the first of three colours."""
    for number, domain in enumerate(("T01_CN_A", "T01_HRN_B", "T07_CN_A")):
        for index in range(5):
            picture, mask = (tmp_path / f"IDDAsmall/{domain}/{kind}/{index}_{domain}" for kind in ("RGB", "Semantic"))
            _, numbers = pair(picture.with_suffix(".jpg"), mask.with_suffix(".png"), 10 * number + index, 24)
            Image.fromarray(np.stack([numbers, 0 * numbers, 0 * numbers], -1)).save(mask.with_suffix(".png"))
    return tmp_path


@pytest.mark.parametrize(
    ("unseen", "train", "test"),
    [("country", [4, 4, 0], [1, 1, 5]), ("rainy", [4, 0, 4], [1, 5, 1]), ("none", [4] * 3, [1] * 3)],
)
def test_idda_seen_and_unseen_domains(idda: Path, unseen: str, train: list[int], test: list[int]) -> None:
    data = load(f"idda(size=none,unseen={unseen})", idda)
    assert data.num_classes == 16 and data.group_names == ("T01_CN_A", "T01_HRN_B", "T07_CN_A")
    for part, expected in ((data.train, train), (data.test, test)):
        assert part.groups is not None and torch.bincount(part.groups, minlength=3).tolist() == expected


def test_idda_ids(idda: Path) -> None:
    data = load("idda(size=none)", idda)
    _, numbers = pair(idda / "a.png", idda / "b.png", 0, 24)
    of_id = dict(
        zip(range(21), (255, 2, 4, 255, 11, 5, 0, 0, 1, 8, 13, 3, 7, 6, 255, 255, 15, 14, 12, 9, 10), strict=True)
    )
    assert data.train.targets[0].tolist() == [
        [of_id.get(number, IGNORED) for number in row] for row in numbers.tolist()
    ]


def test_invalid_idda_domains_are_rejected(idda: Path) -> None:
    (idda / "IDDAsmall/T01_CN_A/Semantic/0_T01_CN_A.png").unlink()
    with pytest.raises(UserError, match=r"0_T01_CN_A\.png is missing"):
        load("idda", idda)
    (idda / "IDDAsmall/T01_CN_A").rename(idda / "IDDAsmall/A_country")
    with pytest.raises(UserError, match=r"idda .*'rain'.*rainy"):
        load("idda(unseen=rain)", idda)
    with pytest.raises(UserError, match=r"A_country.*T01_CN_A"):
        load("idda(unseen=none)", idda)


def made(targets: torch.Tensor, side: int = 4) -> Dataset:
    part = Examples(torch.zeros(len(targets), 3, side, side, dtype=torch.uint8), targets)
    return Dataset("mine", part, part, ("a", "b"), (0.5,) * 3, (0.5,) * 3, "segmentation")


@pytest.mark.parametrize(
    ("targets", "sentence"),
    [
        (torch.full((2, 4, 4), 7, dtype=torch.uint8), "mask id 7; expected 0 to 1, or 255"),
        (torch.zeros(2, 4, 5, dtype=torch.uint8), "images of 4x4 pixels and masks of 4x5"),
        (torch.zeros(2, 4, 4, dtype=torch.int64), "both of type uint8"),
    ],
)
def test_user_masks(targets: torch.Tensor, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        made(targets)
    data = made(torch.tensor([0, 1, 255, 1] * 8, dtype=torch.uint8).view(2, 4, 4))
    assert describe(data)["train_class_counts"] == [8, 16]


def test_user_mask_arrays(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    images, ids = rng.integers(0, 256, (10, 3, 4, 6), dtype=np.uint8), rng.choice([0, 1, 2, 255], (10, 4, 6))
    groups = ["north", "south"] * 5
    data = from_arrays(images[:8], ids[:8], images[8:], ids[8:], train_groups=groups[:8], test_groups=groups[8:])
    assert (data.kind, data.classes, data.group_names) == ("segmentation", ("0", "1", "2"), ("north", "south"))
    assert data.train.targets.dtype == torch.uint8 and np.array_equal(data.test.targets.numpy(), ids[8:])
    np.savez(tmp_path / "mine.npz", inputs=images, targets=ids)
    whole = load(f"arrays(path={tmp_path / 'mine.npz'})", tmp_path)
    assert whole.kind == "segmentation" and (len(whole.train), len(whole.test)) == (8, 2), "every fifth is for testing"
    with pytest.raises(UserError, match=r"masks .* 0 to 255"):
        from_arrays(images, ids - 1, images, ids)
    with pytest.raises(UserError, match="has images of 4x6 pixels and masks of 4x5"):
        from_arrays(images, ids[:, :, :5], images, ids)


@pytest.mark.parametrize("text", ["mixup", "cutout", "random-resized-crop"])
def test_augmentations_that_ignore_masks_are_rejected(text: str) -> None:
    data = made(torch.zeros(2, 4, 4, dtype=torch.uint8))
    with pytest.raises(UserError, match=f"{text} .*crop-flip, scale-crop, flip or 'none'"):
        augmentation(text).check(data)
    augmentation("crop-flip+scale-crop+flip").check(data)
