"""Landmarks-User-160k, small but in the original layouts."""

from __future__ import annotations

import csv
import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedflat.data import Dataset, load, partition, registry, verify
from fedflat.data.download import fetch_source
from fedflat.data.sources.landmarks import LANDMARKS
from fedflat.errors import UserError

DrawPicture = Callable[..., np.ndarray]
LoadTwice = Callable[[str, Path], Dataset]


@pytest.fixture
def landmarks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, picture: DrawPicture) -> Path:
    """3 photographers with 4 photographs, half of them in each of the two layouts, and 2 to test on."""
    root = tmp_path / "landmarks-user-160k"
    train = [("10", "0a1b2c3d4e5f6071", 0), ("9", "ffee00112233aabb", 1), ("10", "1234567812345678", 1), ("117", "abcdabcdabcdabcd", 0)]
    test = [("deadbeefdeadbeef", 1), ("cafecafecafecafe", 0)]
    for number, image in enumerate([row[1] for row in train] + [row[0] for row in test]):
        path = f"train/{image[0]}/{image[1]}/{image[2]}/{image}.jpg" if number % 2 else f"images/{image}.jpg"
        picture(root / path, number, (800, 600))
    for name, columns, rows in (("federated_train", ["user_id", "image_id", "class"], train), ("test", ["image_id", "class"], test)):
        with (root / f"{name}.csv").open("w", newline="") as stream:
            csv.writer(stream).writerows([columns, *rows])
    monkeypatch.setitem(registry.DATASETS, "landmarks", dataclasses.replace(LANDMARKS, num_classes=2, sizes=(4, 2)))
    return tmp_path


def test_landmarks(landmarks: Path, decoded_once: LoadTwice) -> None:
    dataset = decoded_once("landmarks(size=32)", landmarks)
    assert dataset.group_names == ("9", "10", "117", "other photographers") and dataset.num_classes == 2
    assert (
        dataset.train.groups is not None
        and dataset.train.groups.tolist() == [1, 0, 1, 2]
        and dataset.train.targets.tolist() == [0, 1, 1, 0]
    )
    assert dataset.test.groups is not None and dataset.test.groups.tolist() == [3, 3] and dataset.test.targets.tolist() == [1, 0]
    assert len(verify("landmarks", landmarks)) == 2 and not registry.DATASETS["landmarks"].missing(landmarks)
    split = partition("natural", dataset.train.targets, 2, None, 0, groups=dataset.train.groups)
    assert [client.tolist() for client in split.clients] == [[1], [0, 2], [3]]
    with Image.open(landmarks / "landmarks-user-160k/images/0a1b2c3d4e5f6071.jpg") as image:
        wanted = np.asarray(image.crop((100, 0, 700, 600)).resize((32, 32), Image.Resampling.BOX)).transpose(2, 0, 1)
    close = np.abs(dataset.train.inputs[0].numpy().astype(int) - wanted)
    assert np.median(close) <= 2, "the square in the middle, up to how JPEG is scaled down"


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("federated_train.csv", "user_id,image_id\n1,2\n", "has no column class; expected image_id, class, user_id"),
        ("federated_train.csv", "", "has no column image_id"),
        ("test.csv", "image_id,class\ndeadbeefdeadbeef,2\n", "has class 2 for deadbeefdeadbeef; expected 0 to 1"),
        ("test.csv", "image_id,class\ndeadbeefdeadbeef,1\n", r"lists 4 and 1 pictures instead of \(4, 2\)"),
        (
            "test.csv",
            "image_id,class\ndeadbeefdeadbeef,1\n0000000000000000,1\n",
            "the picture 0000000000000000 is neither .*images/0000000000000000.jpg",
        ),
    ],
)
def test_landmarks_whose_lists_are_wrong(
    landmarks: Path, file: str, text: str, message: str, left_in_cache: Callable[[Path], list[str]]
) -> None:
    (landmarks / "landmarks-user-160k" / file).write_text(text)
    with pytest.raises(UserError, match=message):
        load("landmarks", landmarks)
    assert left_in_cache(landmarks) == []


def test_landmarks_lists_can_be_fetched_but_pictures_cannot(tmp_path: Path) -> None:
    (tmp_path / "landmarks-user-160k").mkdir()
    for name, columns in (("federated_train", "user_id,image_id,class\n1,a,0\n"), ("test", "image_id,class\na,0\n")):
        (tmp_path / f"landmarks-user-160k/{name}.csv").write_text(columns)
    with pytest.raises(UserError) as raised:
        fetch_source(LANDMARKS, tmp_path)
    for part in (
        "must be put there by hand",
        "landmarks-user-160k/images/<id>.jpg",
        "https://s3.amazonaws.com/google-landmark/train/",
    ):
        assert part in str(raised.value)
