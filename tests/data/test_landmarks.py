"""Landmarks-User-160k, small but in the original layouts."""

from __future__ import annotations

import csv
import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedflat.api import make_config
from fedflat.data import Dataset, MappedTensor, load, make_partition, registry, verify
from fedflat.data.files.cache import DiskSpace, require_space
from fedflat.data.files.download import download_source
from fedflat.data.sources.landmarks import LANDMARKS
from fedflat.errors import UserError
from fedflat.experiment.run import Run

DrawPicture = Callable[..., np.ndarray]
LoadTwice = Callable[[str, Path], Dataset]


@pytest.fixture
def landmarks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, picture: DrawPicture) -> Path:
    """3 photographers with 4 photographs, half of them in each of the two layouts, and 2 to test on."""
    root = tmp_path / "landmarks-user-160k"
    train = [
        ("10", "0a1b2c3d4e5f6071", 0),
        ("9", "ffee00112233aabb", 1),
        ("10", "1234567812345678", 1),
        ("117", "abcdabcdabcdabcd", 0),
    ]
    test = [("deadbeefdeadbeef", 1), ("cafecafecafecafe", 0)]
    for number, image in enumerate([row[1] for row in train] + [row[0] for row in test]):
        path = f"train/{image[0]}/{image[1]}/{image[2]}/{image}.jpg" if number % 2 else f"images/{image}.jpg"
        picture(root / path, number, (800, 600))
    for name, columns, rows in (
        ("federated_train", ["user_id", "image_id", "class"], train),
        ("test", ["image_id", "class"], test),
    ):
        with (root / f"{name}.csv").open("w", newline="") as stream:
            csv.writer(stream).writerows([columns, *rows])
    monkeypatch.setitem(
        registry.DATASETS._components, "landmarks", dataclasses.replace(LANDMARKS, num_classes=2, sizes=(4, 2))
    )
    return tmp_path


def test_landmarks(landmarks: Path, decoded_once: LoadTwice) -> None:
    dataset = decoded_once("landmarks(size=32)", landmarks)
    assert dataset.group_names == ("9", "10", "117", "other photographers") and dataset.num_classes == 2
    assert (
        dataset.train.groups is not None
        and dataset.train.groups.tolist() == [1, 0, 1, 2]
        and dataset.train.targets.tolist() == [0, 1, 1, 0]
    )
    assert (
        dataset.test.groups is not None
        and dataset.test.groups.tolist() == [3, 3]
        and dataset.test.targets.tolist() == [1, 0]
    )
    assert len(verify("landmarks", landmarks)) == 2 and not registry.DATASETS["landmarks"].missing(landmarks)
    partition = make_partition("natural", dataset.train.targets, 2, None, 0, groups=dataset.train.groups)
    assert [client.tolist() for client in partition.clients] == [[1], [0, 2], [3]]
    with Image.open(landmarks / "landmarks-user-160k/images/0a1b2c3d4e5f6071.jpg") as image:
        wanted = np.asarray(image.crop((100, 0, 700, 600)).resize((32, 32), Image.Resampling.BOX)).transpose(2, 0, 1)
    close = np.abs(dataset.train.inputs[0].numpy().astype(int) - wanted)
    assert np.median(close) <= 2, "the square in the middle, up to how JPEG is scaled down"


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("federated_train.csv", "user_id,image_id\n1,2\n", "column class;.*image_id, class, user_id"),
        ("federated_train.csv", "", "has no column image_id"),
        ("test.csv", "image_id,class\ndeadbeefdeadbeef,2\n", "has class 2 for deadbeefdeadbeef; expected 0 to 1"),
        ("test.csv", "image_id,class\ndeadbeefdeadbeef,1\n", "4 and 1 images.* 4 and 2"),
        (
            "test.csv",
            "image_id,class\ndeadbeefdeadbeef,1\n0000000000000000,1\n",
            "0000000000000000 is missing.*images/0000000000000000.jpg",
        ),
    ],
)
def test_invalid_landmark_lists_are_rejected(
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
        download_source(LANDMARKS, tmp_path)
    for part in (
        "incomplete",
        "landmarks-user-160k/images/<id>.jpg",
        "https://s3.amazonaws.com/google-landmark/train/",
    ):
        assert part in str(raised.value)


def test_landmarks_are_cached_at_the_stated_size_and_mobilenet_trains_on_them(landmarks: Path) -> None:
    """Photographers are the clients; neither decoding nor training holds the pictures in memory."""
    dataset = load("landmarks(size=32)", landmarks)
    for part in (dataset.train, dataset.test):
        assert isinstance(part.inputs, MappedTensor), "read from the file when it is asked for"
    store = dataset.train.inputs.path
    assert dataset.test.inputs.path == store and store.stat().st_size == 128 + 6 * 3 * 32 * 32, (
        "a byte per value, and a header"
    )
    settings = {
        "partition": "natural",
        "clients_per_round": 3,
        "rounds": 2,
        "local_steps": 1,
        "batch_size": 2,
        "workers": 1,
        "device": "cpu",
    }
    model = "mobilenetv2(width=0.25)"
    run = Run(
        make_config(None, {"dataset": "landmarks(size=32)", "data_dir": str(landmarks), "model": model, **settings})
    )
    assert isinstance(run.problem.data.train.inputs, MappedTensor) and len(run.partition.clients) == 3
    assert run.execute().status == "finished" and run.history[-1]["samples"] == 2 * (1 + 2 + 1)


def test_pictures_that_would_fill_the_disk_are_not_decoded(
    landmarks: Path, monkeypatch: pytest.MonkeyPatch, left_in_cache: Callable[[Path], list[str]]
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9 - 9000, 9000))  # type: ignore[attr-defined]
    with pytest.raises(UserError, match=r"landmarks\(size=32\) .*0\.018 MB .*decoded has 0\.009 MB free"):
        load("landmarks(size=32)", landmarks)
    assert left_in_cache(landmarks) == []
    assert len(load("landmarks(size=16)", landmarks).train) == 4


def test_the_required_disk_space_is_checked_beforehand(landmarks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """28 GB at 224 pixels for the 183,698 photographs of the original."""
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**11, 10**11 - 10**10, 10**10))  # type: ignore[attr-defined]
    assert LANDMARKS.sizes is not None
    with pytest.raises(UserError, match=r"landmarks .*27\.7 GB .* 10\.0 GB free; .*smaller size"):
        require_space(DiskSpace(sum(LANDMARKS.sizes) * 3 * 224**2, "landmarks", "take a smaller size"), landmarks)
