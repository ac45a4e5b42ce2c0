"""Tiny ImageNet, small but in the original layout, unpacked and packed."""

from __future__ import annotations

import dataclasses
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedflat.data import Dataset, MappedTensor, load, registry, verify
from fedflat.data.batches import channel_statistics
from fedflat.data.sources.tiny_imagenet import TINY_IMAGENET
from fedflat.errors import UserError

DrawPicture = Callable[..., np.ndarray]
LoadTwice = Callable[[str, Path], Dataset]


IDS = ("n02124075", "n01443537", "n04067472")


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, picture: DrawPicture) -> Path:
    """3 classes of 2 pictures, and 4 to test on."""
    root = tmp_path / "tiny-imagenet-200"
    for number, name in enumerate(IDS):
        for index in range(2):
            picture(
                root / f"train/{name}/images/{name}_{index}.JPEG", 10 * number + index, mode="L" if index else "RGB"
            )
        (root / f"train/{name}/{name}_boxes.txt").write_text(f"{name}_0.JPEG\t0\t0\t62\t46\n")
    for index in range(4):
        picture(root / f"val/images/val_{index}.JPEG", 100 + index)
    lines = [f"val_{index}.JPEG\t{IDS[index % 3]}\t0\t32\t44\t62" for index in range(4)]
    (root / "val/val_annotations.txt").write_text("\n".join(lines) + "\n")
    picture(root / "test/images/test_0.JPEG", 7)
    (root / "wnids.txt").write_text("\n".join(IDS) + "\n")
    (root / "words.txt").write_text(
        "n01443537\tgoldfish, Carassius auratus\nn02124075\tEgyptian cat\nn09999999\tother\n"
    )
    small = dataclasses.replace(TINY_IMAGENET, num_classes=3, train_per_class=2, test_images=4)
    monkeypatch.setitem(registry.DATASETS._components, "tiny_imagenet", small)
    return tmp_path


def test_tiny_imagenet(tiny: Path, decoded_once: LoadTwice) -> None:
    assert load("tiny_imagenet(size=16)", tiny).input_shape == (3, 16, 16)
    dataset = decoded_once("tiny_imagenet", tiny)
    assert dataset.classes == ("goldfish", "Egyptian cat", "n04067472"), "in the order of identifiers, not of wnids.txt"
    assert dataset.train.targets.tolist() == [0, 0, 1, 1, 2, 2] and dataset.test.targets.tolist() == [1, 0, 2, 1]
    assert dataset.input_shape == (3, 64, 64) and isinstance(dataset.train.inputs, MappedTensor)
    with Image.open(tiny / "tiny-imagenet-200/train/n01443537/images/n01443537_1.JPEG") as image:
        assert image.mode == "L" and np.array_equal(
            dataset.train.inputs[1].numpy(), np.asarray(image.convert("RGB")).transpose(2, 0, 1)
        )
    assert (dataset.mean, dataset.std) == channel_statistics(dataset.train.inputs)


def test_tiny_imagenet_from_its_archive(tiny: Path, tmp_path: Path) -> None:
    folder = tmp_path / "zipped"
    folder.mkdir()
    with zipfile.ZipFile(folder / "tiny-imagenet-200.zip", "w") as archive:
        for path in sorted((tiny / "tiny-imagenet-200").rglob("*")):
            archive.write(path, path.relative_to(tiny))
    assert load("tiny_imagenet", folder).content == load("tiny_imagenet", tiny).content
    assert [report.sha256 for report in verify("tiny_imagenet", folder)] == [
        report.sha256 for report in verify("tiny_imagenet", tiny)
    ]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda root: (root / "train/n01443537/images/n01443537_0.JPEG").unlink(),
            "train/n01443537 contains 1 images; expected 2",
        ),
        (lambda root: (root / "train/n04067472").rename(root / "elsewhere"), "train/n04067472 contains 0 images"),
        (lambda root: (root / "val/images/val_3.JPEG").unlink(), "lacks val/images/val_3.JPEG"),
        (lambda root: (root / "wnids.txt").write_text("n01443537\n"), "wnids.txt lists 1 classes; expected 3"),
        (lambda root: (root / "wnids.txt").unlink(), "wnids.txt is missing"),
        (
            lambda root: (root / "val/val_annotations.txt").write_text("val_0.JPEG\tn00000000\n"),
            "val_annotations.txt .*val_0.JPEG",
        ),
        (
            lambda root: (root / "val/val_annotations.txt").write_text("val_0.JPEG\tn02124075\n"),
            "1 test images; expected 4",
        ),
    ],
)
def test_tiny_imagenet_incomplete(
    tiny: Path, damage: Callable[[Path], object], message: str, left_in_cache: Callable[[Path], list[str]]
) -> None:
    damage(tiny / "tiny-imagenet-200")
    with pytest.raises(UserError, match=rf"{message}.*; (delete it|unpack)"):
        load("tiny_imagenet", tiny)
    assert left_in_cache(tiny) == []
