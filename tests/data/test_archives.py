"""Datasets that come as archives of other kinds than CIFAR's, from addresses on this machine."""

from __future__ import annotations

import dataclasses
import hashlib
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest

from fedflat.data.files.download import download_source
from fedflat.data.sources.corruptions import CIFAR10_C
from fedflat.data.sources.landmarks import LANDMARKS, ROOT, TEST, TRAIN
from fedflat.data.sources.source import DatasetSource, Download
from fedflat.data.sources.tiny_imagenet import ARCHIVE, TINY_IMAGENET
from fedflat.errors import UserError


def published(source: DatasetSource, archive: Path, files: tuple[str, ...]) -> DatasetSource:
    """The source with an archive on this machine instead of the publisher's."""
    md5 = hashlib.md5(archive.read_bytes()).hexdigest()
    return dataclasses.replace(source, downloads=(Download(archive.as_uri(), md5, files),))


def files_below(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def lists(tmp_path: Path) -> Path:
    with zipfile.ZipFile(tmp_path / f"{ROOT}.zip", "w") as archive:
        archive.writestr(TRAIN, "user_id,image_id,class\n1,a,0\n")
        archive.writestr(TEST, "image_id,class\na,0\n")
        archive.writestr("../escaped.txt", "x")
        archive.writestr(f"{ROOT}/readme.txt", "x")
    return tmp_path / f"{ROOT}.zip"


def test_only_the_required_files_of_a_zip_are_unpacked(lists: Path, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    (folder / ROOT / "images").mkdir(parents=True)
    download_source(published(LANDMARKS, lists, (TRAIN, TEST)), folder)
    assert files_below(tmp_path) == {f"data/{TRAIN}", f"data/{TEST}", lists.name}


def test_a_zip_without_the_required_files_is_rejected(lists: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"landmarks-user-160k\.zip .*landmarks-user-160k/more\.csv"):
        download_source(published(LANDMARKS, lists, (TRAIN, f"{ROOT}/more.csv")), tmp_path / "data")
    assert not files_below(tmp_path / "data") & {TRAIN, TEST}


def test_a_tar_without_compression(tmp_path: Path) -> None:
    files = tuple(CIFAR10_C.files)
    for file in files:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        np.save(tmp_path / file, np.zeros(3, np.uint8))
    with tarfile.open(tmp_path / "CIFAR-10-C.tar", "w") as tar:
        tar.add(tmp_path / "CIFAR-10-C", "CIFAR-10-C")
    source = published(dataclasses.replace(CIFAR10_C, file_md5s={}), tmp_path / "CIFAR-10-C.tar", files)
    download_source(source, tmp_path / "data")
    assert files_below(tmp_path / "data") == set(files)
    # One file that is not as published: everything is fetched again, and still it is not.
    strict = dataclasses.replace(source, file_md5s={files[0]: "0" * 32})  # type: ignore[call-arg]
    assert not strict.is_intact(tmp_path / "data", files[0]) and strict.is_intact(tmp_path / "data", files[1])


def test_an_archive_that_is_read_in_place_stays_packed(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / ARCHIVE, "w") as archive:
        archive.writestr("tiny-imagenet-200/wnids.txt", "n01443537\n")
    source = published(TINY_IMAGENET, tmp_path / ARCHIVE, (ARCHIVE,))
    folder = tmp_path / "data"
    download_source(source, folder)
    assert files_below(folder) == {ARCHIVE} and source.is_intact(folder, ARCHIVE)
    (folder / ARCHIVE).write_bytes(b"PK damaged")
    assert not source.is_intact(folder, ARCHIVE)
    download_source(source, folder)
    assert (folder / ARCHIVE).read_bytes() == (tmp_path / ARCHIVE).read_bytes()
