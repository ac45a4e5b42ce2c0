"""Images decoded on demand: the same images and runs, within the memory limit."""

from __future__ import annotations

import csv
import dataclasses
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fedflat.api import make_config
from fedflat.data import load, registry
from fedflat.data.files.images import ImageOptions
from fedflat.data.files.streamed import DecodedImageCache, StreamedTensor
from fedflat.data.files.tree import FolderTree
from fedflat.data.sources.landmarks import LANDMARKS
from fedflat.errors import UserError
from fedflat.experiment.run import Run
from fedflat.testing import check_dataset

COUNT, TESTED = 12, 3
ROOT = "landmarks-user-160k"


@pytest.fixture
def landmarks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Twelve photographs by three photographers and three to test on, as JPEG files in the layout of the archives."""
    rng = np.random.default_rng(0)
    names = [f"{number:x}{number * 7919 + 1:015x}" for number in range(COUNT + TESTED)]
    for number, name in enumerate(names):
        path = tmp_path / ROOT / "train" / "/".join(name[:3]) / f"{name}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.clip(40 * (number % 4) + rng.normal(60, 30, (30, 40, 3)), 0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(path)
    train = [(number % 3, name, number % 4) for number, name in enumerate(names[:COUNT])]
    test = [(name, number % 4) for number, name in enumerate(names[COUNT:])]
    for file, columns, rows in (
        ("federated_train", ["user_id", "image_id", "class"], train),
        ("test", ["image_id", "class"], test),
    ):
        with (tmp_path / ROOT / f"{file}.csv").open("w", newline="") as stream:
            csv.writer(stream).writerows([columns, *rows])
    monkeypatch.setitem(
        registry.DATASETS._components, "landmarks", dataclasses.replace(LANDMARKS, num_classes=4, sizes=(COUNT, TESTED))
    )
    return tmp_path


def streamed(landmarks: Path, more: str = "") -> StreamedTensor:
    inputs = load(f"landmarks(size=16,decode=streamed{more})", landmarks).train.inputs
    assert isinstance(inputs, StreamedTensor)
    return inputs


def test_the_same_pictures_labels_and_statistics_as_decoded_once(landmarks: Path) -> None:
    once, now = (load(f"landmarks(size=16,decode={how})", landmarks) for how in ("once", "streamed"))
    assert now.content == once.content and (now.mean, now.std) == (once.mean, once.std)
    assert len(check_dataset(now, linear=False)) == 6
    assert now.input_shape == (3, 16, 16) and now.group_names == once.group_names and len(now.test) == TESTED
    for one, other in ((now.train, once.train), (now.test, once.test)):
        for rows in (
            slice(None),
            slice(1, 3),
            [2, 0],
            torch.tensor([1, 1, 0]),
            torch.tensor([], dtype=torch.int64),
            -1,
        ):
            assert torch.equal(one.inputs[rows], other.inputs[rows])
        assert torch.equal(one.take(np.array([2, 1])).inputs, other.take(np.array([2, 1])).inputs)
        assert torch.equal(
            one.inputs.index_select(0, torch.tensor([2, 2])), other.inputs.index_select(0, torch.tensor([2, 2]))
        )


def test_a_run_is_the_same_to_the_bit(landmarks: Path) -> None:
    settings = {
        "partition": "natural",
        "clients_per_round": 2,
        "rounds": 2,
        "local_epochs": 1,
        "batch_size": 3,
        "workers": 1,
        "device": "cpu",
    }
    settings |= {
        "model": "mobilenetv2(stem=small,width=0.25)",
        "augmentation": "crop-flip(padding=2)",
        "data_dir": str(landmarks),
    }
    runs = [
        Run(make_config(None, settings | {"dataset": f"landmarks(size=16,decode={how})"}))
        for how in ("once", "streamed")
    ]
    once, now = (run.execute() for run in runs)
    assert torch.equal(once.models["server"].weights, now.models["server"].weights) and once.history == now.history


def test_the_cache_never_exceeds_its_limit(landmarks: Path) -> None:
    names = sorted(str(path.relative_to(landmarks)) for path in landmarks.rglob("*.jpg"))
    one = 3 * 8 * 8
    cache = DecodedImageCache(FolderTree(landmarks), names, ImageOptions(size=8), max_cached_bytes=4 * one + 5)
    assert cache.rows([0, 1, 2, 3]).shape == (4, 3, 8, 8) and cache.decoded == 4
    cache.rows([3, 2, 3, 0])
    assert cache.decoded == 4, "all of them were kept"
    cache.rows([9])
    assert cache.decoded == 5 and set(cache.images) == {2, 3, 0, 9}, "the one not asked for the longest is forgotten"
    before = cache.rows([1]).clone()
    assert cache.decoded == 6 and set(cache.images) == {2, 0, 9, 1}
    cache.rows(list(range(10)))
    assert sum(picture.nbytes for picture in cache.images.values()) <= cache.max_cached_bytes and len(cache.images) == 4
    assert torch.equal(cache.rows([1]), before)
    nothing = DecodedImageCache(FolderTree(landmarks), names, ImageOptions(size=8), max_cached_bytes=0)
    assert torch.equal(nothing.rows([1, 1])[1], before[0]) and not nothing.images and nothing.decoded == 1


def test_the_cache_is_bounded_in_gigabytes(landmarks: Path) -> None:
    inputs = streamed(landmarks, ",cache=0.000002")
    assert inputs.cache.max_cached_bytes == 2000 and len(inputs[:]) == COUNT and len(inputs.cache.images) == 2
    assert streamed(landmarks).cache.max_cached_bytes == 2 * 10**9
    with pytest.raises(UserError, match="cache=-1 is out of range"):
        streamed(landmarks, ",cache=-1")


def test_only_a_few_sums_are_written(landmarks: Path) -> None:
    streamed(landmarks)
    written = [path for path in (landmarks / "decoded").rglob("*") if path.is_file()]
    assert [path.name for path in written] == ["sums.npy"] and written[0].stat().st_size == 128 + COUNT * 2 * 3 * 8


def test_pickling_sends_names_without_pictures(landmarks: Path) -> None:
    inputs = streamed(landmarks).part(2, 5)
    inputs[:]
    assert len(inputs.cache.images) == 5
    again = pickle.loads(pickle.dumps(inputs))
    assert isinstance(again, StreamedTensor) and not again.cache.images and again.shape == (5, 3, 16, 16)
    assert torch.equal(again[:], inputs[:])


def test_operations_on_values_are_rejected(landmarks: Path) -> None:
    inputs = streamed(landmarks)
    assert (
        inputs.dtype == torch.uint8
        and inputs.ndim == 4
        and inputs.nbytes == COUNT * 3 * 16 * 16
        and not inputs.is_floating_point()
    )
    for wrong in (inputs.float, lambda: torch.add(inputs, 1), lambda: torch.stack([inputs]), inputs.sum):
        with pytest.raises(TypeError, match="decoded on access"):
            wrong()


def test_the_lane_engine_rejects_streamed_images(landmarks: Path) -> None:
    settings = {
        "dataset": "landmarks(size=16,decode=streamed)",
        "data_dir": str(landmarks),
        "partition": "natural",
        "clients_per_round": 2,
    }
    with pytest.raises(UserError, match=r"engine.name=lanes .*landmarks\(.*\)"):
        Run(make_config(None, settings | {"engine__name": "lanes", "device": "cpu"}))
