"""A user's own folder of pictures, and how pictures are decoded."""

from __future__ import annotations

import io
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fedflat.data import Dataset, MappedTensor, load
from fedflat.data.files.images import ImageOptions, to_pixels
from fedflat.errors import UserError

DrawPicture = Callable[..., np.ndarray]
LoadTwice = Callable[[str, Path], Dataset]


@pytest.fixture
def own(tmp_path: Path, picture: DrawPicture) -> Path:
    """train/ and test/ with cats and dogs of various sizes and formats."""
    for part, count in (("train", 6), ("test", 2)):
        for number, (name, suffix) in enumerate((("cat", "jpg"), ("dog", "png"))):
            for index in range(count):
                picture(tmp_path / f"mine/{part}/{name}/{index}.{suffix}", 100 * number + index, (20 + 2 * index, 30))
    (tmp_path / "mine/train/cat/notes.txt").write_text("not a picture")
    (tmp_path / "mine/train/cat/.hidden.jpg").write_text("not one either")
    return tmp_path


def test_a_folder_of_pictures_by_class(own: Path, decoded_once: LoadTwice) -> None:
    dataset = decoded_once(f"images(path={own / 'mine'},size=8)", own)
    assert dataset.classes == ("cat", "dog") and len(dataset.train) == 12 and len(dataset.test) == 4
    assert (
        dataset.input_shape == (3, 8, 8)
        and dataset.train.groups is None
        and isinstance(dataset.train.inputs, MappedTensor)
    )
    assert dataset.train.targets.tolist() == [0] * 6 + [1] * 6


def test_without_a_test_folder_every_fifth_is_tested_on(own: Path) -> None:
    dataset = load(f"images(path={own / 'mine/train'},size=8)", own)
    assert len(dataset.train) == 10 and dataset.test.targets.tolist() == [0, 1]
    with pytest.raises(UserError, match="too few images to test on every fifth of a class; add images or"):
        load(f"images(path={own / 'mine/test'},size=8)", own)
    with_test = load(f"images(path={own / 'mine'},size=8)", own)
    assert torch.equal(dataset.test.inputs, with_test.train.inputs[[4, 10]]), "the fifth cat and the fifth dog"


def test_domains_are_not_silently_used_as_classes(own: Path) -> None:
    (own / "mine/train").rename(own / "mine/Bergen")
    text = f"images(path={own / 'mine'},size=8)"
    with pytest.warns(UserWarning, match=r"2 classes .* has the subfolders cat, dog; .* use domains\(path="):
        assert load(text, own).classes == ("Bergen", "test")
    shutil.copy(own / "mine/Bergen/cat/1.jpg", own / "mine/Bergen/dog")
    for name in ("cat", "dog"):
        (own / f"mine/test/{name}").rename(own / f"mine/test/big {name}")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(text, own)  # no common subfolders
        load(f"images(path={own / 'mine/Bergen'},size=8)", own)  # no subfolders
        for name in ("Bergen", "test"):
            (own / "other" / name).mkdir(parents=True)
            (own / "mine" / name).rename(own / "other" / name / "images")
        load(f"images(path={own / 'other'},size=8)", own)  # <class>/images/, as in Tiny ImageNet


def test_a_damaged_entry_says_what_to_delete(own: Path, left_in_cache: Callable[[Path], list[str]]) -> None:
    load(f"images(path={own / 'mine'})", own)
    kept = own / "decoded" / left_in_cache(own)[0]
    (kept / "inputs.npy").write_bytes((kept / "inputs.npy").read_bytes()[:-1])
    with pytest.raises(UserError, match=rf"inputs\.npy .*; delete {kept} "):
        load(f"images(path={own / 'mine'})", own)


def test_a_changed_picture_is_decoded_again(own: Path, picture: DrawPicture) -> None:
    before = load(f"images(path={own / 'mine'},size=8)", own).content
    picture(own / "mine/train/dog/0.png", 999, (50, 50))
    assert load(f"images(path={own / 'mine'},size=8)", own).content != before


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda root: (root / "train/cat/3.jpg").write_bytes((root / "train/cat/3.jpg").read_bytes()[:-200]),
            "train/cat/3.jpg is not a complete image",
        ),
        (
            lambda root: (root / "train/cat/3.jpg").write_bytes(b"\xff\xd8 nonsense"),
            "train/cat/3.jpg is not a complete image",
        ),
        (
            lambda root: (root / "test/dog/1.png").write_bytes((root / "test/dog/1.png").read_bytes()[:60]),
            "test/dog/1.png is not a complete image",
        ),
        (lambda root: (root / "test/dog/1.png").write_bytes(b""), "test/dog/1.png is not a complete image"),
        (lambda root: (root / "train/dog").rename(root / "gone"), "1 folders with images"),
        (lambda root: (root / "test/dog").rename(root / "test/wolf"), "class wolf .*train/wolf"),
        (lambda root: (root / "train/bird").mkdir(), "train/bird contains no images"),
    ],
)
def test_a_damaged_folder_raises_a_clear_error_and_leaves_no_cache_entry(
    own: Path, damage: Callable[[Path], object], message: str, left_in_cache: Callable[[Path], list[str]]
) -> None:
    damage(own / "mine")
    with pytest.raises(UserError, match=message) as raised:
        load(f"images(path={own / 'mine'})", own)
    assert "\n" not in str(raised.value) and left_in_cache(own) == []


def test_a_missing_folder_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere .*zip archive"):
        load(f"images(path={tmp_path / 'nowhere'})", tmp_path)
    with pytest.raises(UserError, match=r"images\(path="):
        load("images", tmp_path)
    (tmp_path / "broken.zip").write_bytes(b"PK nonsense")
    with pytest.raises(UserError, match=r"broken\.zip is not a complete"):
        load(f"images(path={tmp_path / 'broken.zip'})", tmp_path)


@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA", "P", "CMYK", "1"])
def test_every_kind_of_picture_becomes_three_channels(mode: str) -> None:
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (6, 6, 3), dtype=np.uint8)).convert(mode)
    assert to_pixels(image, ImageOptions(4)).shape == (3, 4, 4)
    same = to_pixels(image, ImageOptions(6))
    assert np.array_equal(same, np.asarray(image.convert("RGB")).transpose(2, 0, 1)), (
        "nothing is done to what has the size already"
    )


@pytest.mark.parametrize("suffix", ["png", "tif"])
def test_pictures_of_16_bits_keep_their_shades(tmp_path: Path, suffix: str) -> None:
    shades = np.arange(0, 65536, 4096, dtype=np.uint16).reshape(4, 4)
    for number in range(10):
        path = tmp_path / "pets" / ("cat" if number < 5 else "dog") / f"{number}.{suffix}"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(shades).save(path)
    dataset = load(f"images(path={tmp_path / 'pets'},size=4)", tmp_path)
    assert np.array_equal(dataset.train.inputs[0].numpy(), np.broadcast_to(shades // 256, (3, 4, 4)))


def test_a_picture_without_a_white_level_is_rejected() -> None:
    with pytest.raises(UserError, match=r"32-bit .*8 or 16 bits"):
        to_pixels(Image.fromarray(np.zeros((4, 4), dtype=np.float32)), ImageOptions(4))


@pytest.mark.parametrize("fit", ["squash", "crop"])
def test_squash_keeps_everything_and_crop_the_middle(fit: str) -> None:
    pixels = np.zeros((10, 30, 3), dtype=np.uint8)
    pixels[:, 10:20] = 200
    small = to_pixels(Image.fromarray(pixels), ImageOptions(10, fit))  # type: ignore[arg-type]
    assert (small == 200).all() == (fit == "crop") and (fit == "crop" or small[0, 0, 0] == 0)


def test_large_jpegs_are_decoded_at_a_fraction_of_their_size(tmp_path: Path, picture: DrawPicture) -> None:
    raw = picture(tmp_path / "large.jpg", 3, (1024, 1024))
    buffer = io.BytesIO((tmp_path / "large.jpg").read_bytes())
    with Image.open(buffer) as image:
        small = to_pixels(image, ImageOptions(32))
        assert max(image.size) <= 128
    assert np.median(np.abs(small.astype(int) - raw[:, 16::32, 16::32])) <= 2
