"""Data sets of pictures in files: Tiny ImageNet, Landmarks, PACS, Office-Home and a user's own, small but in the original layouts."""

from __future__ import annotations

import csv
import dataclasses
import io
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fedflat.data import Dataset, MappedTensor, describe, load, partition, pictures, registry, verify
from fedflat.data.arrays import channel_statistics
from fedflat.data.download import fetch_source
from fedflat.data.pictures import PictureOptions, to_pixels
from fedflat.data.sources.domains import OFFICE_HOME, PACS
from fedflat.data.sources.landmarks import LANDMARKS
from fedflat.data.sources.tiny_imagenet import TINY_IMAGENET
from fedflat.errors import UserError


def picture(path: Path, seed: int, size: tuple[int, int] = (64, 64), mode: str = "RGB") -> np.ndarray:
    """A picture of one colour per quarter, which survives JPEG well; what was written."""
    rng = np.random.default_rng(seed)
    quarters = rng.integers(0, 256, (2, 2, 3), dtype=np.uint8)
    pixels = np.kron(quarters, np.ones((size[1] // 2, size[0] // 2, 1), dtype=np.uint8))
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.fromarray(pixels).convert(mode)
    image.save(path, quality=95) if path.suffix.lower() in (".jpg", ".jpeg") else image.save(path)
    return np.asarray(image.convert("RGB")).transpose(2, 0, 1)


def decoded_once(monkeypatch: pytest.MonkeyPatch, text: str, folder: Path) -> Dataset:
    """The data set loaded a second time, which must not open a picture."""
    first = load(text, folder)
    monkeypatch.setattr(pictures, "decode_picture", lambda *_, **__: pytest.fail("decoded again"))
    second = load(text, folder)
    assert second.content == first.content and second.mean == first.mean
    return second


def left_in_cache(folder: Path) -> list[str]:
    cache = folder / "decoded"
    return sorted(path.name for path in cache.iterdir()) if cache.exists() else []


# --- Tiny ImageNet -------------------------------------------------------------------------------------------------------------------

IDS = ("n02124075", "n01443537", "n04067472")


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """3 classes of 2 pictures, and 4 to test on."""
    root = tmp_path / "tiny-imagenet-200"
    for number, name in enumerate(IDS):
        for index in range(2):
            picture(root / f"train/{name}/images/{name}_{index}.JPEG", 10 * number + index, mode="L" if index else "RGB")
        (root / f"train/{name}/{name}_boxes.txt").write_text(f"{name}_0.JPEG\t0\t0\t62\t46\n")
    for index in range(4):
        picture(root / f"val/images/val_{index}.JPEG", 100 + index)
    lines = [f"val_{index}.JPEG\t{IDS[index % 3]}\t0\t32\t44\t62" for index in range(4)]
    (root / "val/val_annotations.txt").write_text("\n".join(lines) + "\n")
    picture(root / "test/images/test_0.JPEG", 7)
    (root / "wnids.txt").write_text("\n".join(IDS) + "\n")
    (root / "words.txt").write_text("n01443537\tgoldfish, Carassius auratus\nn02124075\tEgyptian cat\nn09999999\tother\n")
    small = dataclasses.replace(TINY_IMAGENET, num_classes=3, train_per_class=2, test_pictures=4)
    monkeypatch.setitem(registry.DATASETS, "tiny_imagenet", small)
    return tmp_path


def test_tiny_imagenet(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load("tiny_imagenet(size=16)", tiny).input_shape == (3, 16, 16)
    dataset = decoded_once(monkeypatch, "tiny_imagenet", tiny)
    assert dataset.classes == ("goldfish", "Egyptian cat", "n04067472"), "in the order of identifiers, not of wnids.txt"
    assert dataset.train.targets.tolist() == [0, 0, 1, 1, 2, 2] and dataset.test.targets.tolist() == [1, 0, 2, 1]
    assert dataset.input_shape == (3, 64, 64) and isinstance(dataset.train.inputs, MappedTensor)
    with Image.open(tiny / "tiny-imagenet-200/train/n01443537/images/n01443537_1.JPEG") as image:
        assert image.mode == "L" and np.array_equal(dataset.train.inputs[1].numpy(), np.asarray(image.convert("RGB")).transpose(2, 0, 1))
    assert (dataset.mean, dataset.std) == channel_statistics(dataset.train.inputs)


def test_tiny_imagenet_from_its_archive(tiny: Path, tmp_path: Path) -> None:
    folder = tmp_path / "zipped"
    folder.mkdir()
    with zipfile.ZipFile(folder / "tiny-imagenet-200.zip", "w") as archive:
        for path in sorted((tiny / "tiny-imagenet-200").rglob("*")):
            archive.write(path, path.relative_to(tiny))
    assert load("tiny_imagenet", folder).content == load("tiny_imagenet", tiny).content
    assert [report.sha256 for report in verify("tiny_imagenet", folder)] == [report.sha256 for report in verify("tiny_imagenet", tiny)]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda root: (root / "train/n01443537/images/n01443537_0.JPEG").unlink(), "train/n01443537 holds 1 pictures, but 2 were expected"),
        (lambda root: (root / "train/n04067472").rename(root / "elsewhere"), "train/n04067472 holds 0 pictures"),
        (lambda root: (root / "val/images/val_3.JPEG").unlink(), "lacks val/images/val_3.JPEG"),
        (lambda root: (root / "wnids.txt").write_text("n01443537\n"), "wnids.txt names 1 classes, but 3 were expected"),
        (lambda root: (root / "wnids.txt").unlink(), "wnids.txt is missing"),
        (lambda root: (root / "val/val_annotations.txt").write_text("val_0.JPEG\tn00000000\n"), "gives no known class for val_0.JPEG"),
        (lambda root: (root / "val/val_annotations.txt").write_text("val_0.JPEG\tn02124075\n"), "has 1 test pictures instead of 4"),
    ],
)
def test_tiny_imagenet_incomplete(tiny: Path, damage: Callable[[Path], object], message: str) -> None:
    damage(tiny / "tiny-imagenet-200")
    with pytest.raises(UserError, match=message):
        load("tiny_imagenet", tiny)
    assert left_in_cache(tiny) == []


# --- Landmarks -----------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def landmarks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
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


def test_landmarks(landmarks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = decoded_once(monkeypatch, "landmarks(size=32)", landmarks)
    assert dataset.group_names == ("9", "10", "117", "other photographers") and dataset.num_classes == 2
    assert (
        dataset.train.groups is not None
        and dataset.train.groups.tolist() == [1, 0, 1, 2]
        and dataset.train.targets.tolist() == [0, 1, 1, 0]
    )
    assert dataset.test.groups is not None and dataset.test.groups.tolist() == [3, 3] and dataset.test.targets.tolist() == [1, 0]
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
def test_landmarks_whose_lists_are_wrong(landmarks: Path, file: str, text: str, message: str) -> None:
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
        "cannot all be fetched by itself",
        "landmarks-user-160k/images/<id>.jpg",
        "https://s3.amazonaws.com/google-landmark/train/",
    ):
        assert part in str(raised.value)


# --- domains -------------------------------------------------------------------------------------------------------------------------

CLASSES = ("dog", "elephant")


@pytest.fixture
def pacs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """4 domains of 2 classes, 5 pictures of one and 10 of the other."""
    for domain_number, domain in enumerate(PACS.sizes):
        for label, name in enumerate(CLASSES):
            for index in range(5 * (label + 1)):
                picture(tmp_path / f"PACS/{domain}/{name}/pic_{index:03d}.png", 1000 * domain_number + 100 * label + index, (16, 16))
    small = dataclasses.replace(PACS, sizes=dict.fromkeys(PACS.sizes, 15), num_classes=2)
    monkeypatch.setitem(registry.DATASETS, "pacs", small)
    return tmp_path


def test_without_a_held_out_domain_a_fifth_of_each_class_and_domain_is_for_testing(pacs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = decoded_once(monkeypatch, "pacs(size=16)", pacs)
    assert dataset.classes == CLASSES and dataset.group_names == tuple(PACS.sizes)
    counts = torch.stack([torch.bincount(dataset.test.targets[dataset.test.groups == domain], minlength=2) for domain in range(4)])
    assert counts.tolist() == [[1, 2]] * 4 and len(dataset.train) == 48
    pixels = picture(pacs / "again.png", 2100 + 4, (16, 16))
    photo = (dataset.test.groups == 2) & (dataset.test.targets == 1)
    assert np.array_equal(dataset.test.inputs[photo][0].numpy(), pixels), "the fifth picture of photo/elephant"


@pytest.mark.parametrize("domain", tuple(PACS.sizes))
def test_one_domain_can_be_held_out(pacs: Path, domain: str) -> None:
    dataset = load(f"pacs(size=16,test_domain={domain})", pacs)
    number = dataset.group_names.index(domain)
    assert dataset.train.groups is not None and dataset.test.groups is not None
    assert set(dataset.test.groups.tolist()) == {number} and len(dataset.test) == 15
    assert set(dataset.train.groups.tolist()) == {0, 1, 2, 3} - {number} and len(dataset.train) == 45
    assert (dataset.mean, dataset.std) == channel_statistics(dataset.train.inputs), "of what is trained on"
    assert len(partition("natural", dataset.train.targets, 2, None, 0, groups=dataset.train.groups).clients) == 3
    assert len(left_in_cache(pacs)) == 1 and describe(dataset)["groups"] == 3


def test_pictures_are_decoded_once_for_all_held_out_domains(pacs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [load(f"pacs(size=16,test_domain={domain})", pacs).test.inputs for domain in PACS.sizes]
    every = decoded_once(monkeypatch, "pacs(size=16)", pacs)
    first = torch.cat([every.train.inputs, every.test.inputs]).flatten(1).double().sum(1).sort().values
    assert torch.equal(first, torch.cat(list(parts)).flatten(1).double().sum(1).sort().values)
    assert registry.canonical_dataset("pacs( test_domain=sketch,size=64 )") == "pacs(test_domain=sketch)"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda root: (root / "photo/dog").rename(root / "photo/cat"), "has no folder cat with pictures, but other domains have"),
        (lambda root: (root / "photo/dog/pic_000.png").unlink(), "photo holds 14 pictures, but 15 were expected"),
        (
            lambda root: [(root / d / "dog").rename(root / d / "elephant/more") for d in PACS.sizes],
            "holds 10 pictures, but 15 were expected",
        ),
    ],
)
def test_domains_that_are_not_whole(pacs: Path, damage: Callable[[Path], object], message: str) -> None:
    damage(pacs / "PACS")
    with pytest.raises(UserError, match=message):
        load("pacs", pacs)
    assert left_in_cache(pacs) == []


def test_unknown_and_missing_domains(pacs: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no domain of pacs 'sketches'; did you mean sketch"):
        load("pacs(test_domain=sketches)", pacs)
    with pytest.raises(UserError, match=r"pacs is not all there; expected PACS/art_painting.*https://drive.google.com/\S+ .*renamed PACS"):
        load("pacs", tmp_path / "nothing")
    with pytest.raises(UserError, match="there is no parameter of data set pacs 'domain'"):
        load("pacs(domain=photo)", pacs)
    assert [report.file for report in verify("pacs", pacs)] == [f"PACS/{domain}" for domain in PACS.sizes]


def test_office_home_s_domains_have_spaces_and_capitals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, domain in enumerate(OFFICE_HOME.sizes):
        for label, name in enumerate(("Alarm_Clock", "TV")):
            picture(tmp_path / f"OfficeHomeDataset_10072016/{domain}/{name}/00001.jpg", 10 * number + label, (40, 20))
    (tmp_path / "OfficeHomeDataset_10072016/ImageInfo.csv").write_text("")
    small = dataclasses.replace(OFFICE_HOME, sizes=dict.fromkeys(OFFICE_HOME.sizes, 2), num_classes=2)
    monkeypatch.setitem(registry.DATASETS, "office_home", small)
    for text in ("office_home(test_domain=real_world)", "office_home(test_domain=Real World)"):
        dataset = load(text, tmp_path)
        assert dataset.group_names == ("Art", "Clipart", "Product", "Real World") and dataset.classes == ("Alarm_Clock", "TV")
        assert dataset.test.groups is not None and dataset.test.groups.tolist() == [3, 3] and dataset.input_shape == (3, 64, 64)
    assert sum(OFFICE_HOME.sizes.values()) == 15_588 and sum(PACS.sizes.values()) == 9_991


def test_a_user_s_own_domains(pacs: Path) -> None:
    own = load(f"domains(path={pacs / 'PACS'},size=16,test_domain=cartoon)", pacs)
    assert own.content == load("pacs(size=16,test_domain=cartoon)", pacs).content and own.group_names == tuple(PACS.sizes)
    with pytest.raises(UserError, match=r"domains needs to know where the pictures are; write domains\(path=FOLDER\)"):
        load("domains", pacs)
    with pytest.raises(UserError, match="has 0 domains; expected folders <domain>/<class>"):
        load(f"domains(path={pacs / 'PACS/photo'})", pacs)


# --- a user's own folder -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """train/ and test/ with cats and dogs of various sizes and formats."""
    for part, count in (("train", 6), ("test", 2)):
        for number, (name, suffix) in enumerate((("cat", "jpg"), ("dog", "png"))):
            for index in range(count):
                picture(tmp_path / f"mine/{part}/{name}/{index}.{suffix}", 100 * number + index, (20 + 2 * index, 30))
    (tmp_path / "mine/train/cat/notes.txt").write_text("not a picture")
    (tmp_path / "mine/train/cat/.hidden.jpg").write_text("not one either")
    return tmp_path


def test_a_folder_of_pictures_by_class(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = decoded_once(monkeypatch, f"images(path={own / 'mine'},size=8)", own)
    assert dataset.classes == ("cat", "dog") and len(dataset.train) == 12 and len(dataset.test) == 4
    assert dataset.input_shape == (3, 8, 8) and dataset.train.groups is None and isinstance(dataset.train.inputs, MappedTensor)
    assert dataset.train.targets.tolist() == [0] * 6 + [1] * 6


def test_without_a_test_folder_every_fifth_is_for_testing(own: Path) -> None:
    dataset = load(f"images(path={own / 'mine/train'},size=8)", own)
    assert len(dataset.train) == 10 and dataset.test.targets.tolist() == [0, 1]
    with_test = load(f"images(path={own / 'mine'},size=8)", own)
    assert torch.equal(dataset.test.inputs, with_test.train.inputs[[4, 10]]), "the fifth cat and the fifth dog"


def test_a_changed_picture_is_decoded_again(own: Path) -> None:
    before = load(f"images(path={own / 'mine'},size=8)", own).content
    picture(own / "mine/train/dog/0.png", 999, (50, 50))
    assert load(f"images(path={own / 'mine'},size=8)", own).content != before


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda root: (root / "train/cat/3.jpg").write_bytes((root / "train/cat/3.jpg").read_bytes()[:-200]),
            "train/cat/3.jpg is not a whole",
        ),
        (lambda root: (root / "train/cat/3.jpg").write_bytes(b"\xff\xd8 nonsense"), "train/cat/3.jpg is not a whole picture"),
        (lambda root: (root / "test/dog/1.png").write_bytes((root / "test/dog/1.png").read_bytes()[:60]), "test/dog/1.png is not a whole"),
        (lambda root: (root / "test/dog/1.png").write_bytes(b""), "test/dog/1.png is not a whole picture"),
        (lambda root: (root / "train/dog").rename(root / "gone"), "has 1 folders with pictures; expected one folder per class"),
        (lambda root: (root / "test/dog").rename(root / "test/wolf"), "has a class wolf, but there is no folder train/wolf"),
        (lambda root: (root / "train/bird").mkdir(), "train/bird holds no pictures"),
    ],
)
def test_a_damaged_folder_is_refused_in_one_sentence_and_nothing_stays_in_the_cache(
    own: Path, damage: Callable[[Path], object], message: str
) -> None:
    damage(own / "mine")
    with pytest.raises(UserError, match=message) as raised:
        load(f"images(path={own / 'mine'})", own)
    assert "\n" not in str(raised.value) and left_in_cache(own) == []


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere is neither a folder nor a zip archive"):
        load(f"images(path={tmp_path / 'nowhere'})", tmp_path)
    with pytest.raises(UserError, match=r"write images\(path=FOLDER\)"):
        load("images", tmp_path)
    (tmp_path / "broken.zip").write_bytes(b"PK nonsense")
    with pytest.raises(UserError, match=r"broken\.zip is not a whole zip archive"):
        load(f"images(path={tmp_path / 'broken.zip'})", tmp_path)


# --- decoding ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA", "P", "CMYK", "1"])
def test_every_kind_of_picture_becomes_three_channels(mode: str) -> None:
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (6, 6, 3), dtype=np.uint8)).convert(mode)
    assert to_pixels(image, PictureOptions(4)).shape == (3, 4, 4)
    same = to_pixels(image, PictureOptions(6))
    assert np.array_equal(same, np.asarray(image.convert("RGB")).transpose(2, 0, 1)), "nothing is done to what has the size already"


@pytest.mark.parametrize("fit", ["squash", "crop"])
def test_squash_keeps_everything_and_crop_the_middle(fit: str) -> None:
    pixels = np.zeros((10, 30, 3), dtype=np.uint8)
    pixels[:, 10:20] = 200
    small = to_pixels(Image.fromarray(pixels), PictureOptions(10, fit))  # type: ignore[arg-type]
    assert (small == 200).all() == (fit == "crop") and (fit == "crop" or small[0, 0, 0] == 0)


def test_large_jpegs_are_decoded_at_a_fraction_of_their_size(tmp_path: Path) -> None:
    raw = picture(tmp_path / "large.jpg", 3, (1024, 1024))
    buffer = io.BytesIO((tmp_path / "large.jpg").read_bytes())
    with Image.open(buffer) as image:
        small = to_pixels(image, PictureOptions(32))
        assert max(image.size) <= 128
    assert np.median(np.abs(small.astype(int) - raw[:, 16::32, 16::32])) <= 2
