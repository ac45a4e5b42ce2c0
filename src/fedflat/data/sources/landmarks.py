"""Landmarks-User-160k (Hsu et al. 2020): photographs of landmarks; natural clients are photographers.

``federated_train.csv`` has the columns user_id, image_id and class; ``test.csv`` has image_id and class, and other
photographers. The images are those of Google Landmarks v2, as ``images/<id>.jpg`` or in the layout of its archives,
``train/a/b/c/abc....jpg``.
"""

from __future__ import annotations

import csv
import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from fedflat.data.dataset import Dataset
from fedflat.data.files.images import ImageList, ImageOptions, image_dataset
from fedflat.data.files.streamed import streamed_dataset
from fedflat.data.files.tree import FolderTree
from fedflat.data.sources.source import DatasetCard, Download, FileReport, FileSource
from fedflat.errors import UserError
from fedflat.text import param

ROOT = "landmarks-user-160k"
TRAIN, TEST, IMAGES = f"{ROOT}/federated_train.csv", f"{ROOT}/test.csv", f"{ROOT}/images"
CsvRows = list[dict[str, str]]


@dataclass(frozen=True)
class LandmarksOptions(ImageOptions):
    """How and when photographs are decoded."""

    size: int = param(224, "height and width in pixels to which images are resized", low=1)
    fit: Literal["squash", "crop"] = param(
        "crop", "how images become square: resize the whole image (squash), or use its largest centred square (crop)"
    )
    decode: Literal["once", "streamed"] = param(
        "once", "when images are decoded: all of them once, into a memory-mapped file (once), or on access (streamed)"
    )
    cache: float = param(2.0, "GB of decoded images that each process keeps in memory (decode=streamed)", low=0)


@dataclass(frozen=True)
class Landmarks(FileSource[CsvRows]):
    """Each photographer in the training set is a natural client; the test set contains photos by others.

    Attributes:
        num_classes: number of classes.
        sizes: required numbers of training and test rows; None accepts any.
    """

    options: LandmarksOptions = field(default=LandmarksOptions(), kw_only=True)
    files = (TRAIN, TEST, IMAGES)
    num_classes: int = 2028
    sizes: tuple[int, int] | None = (164_172, 19_526)

    def parse(self, path: Path) -> tuple[CsvRows, str]:
        """Read the rows of a CSV file, after checking its columns and classes; returns them and the file's sha256.

        Only the training list has a column with the photographer, ``user_id``.
        """
        raw = path.read_bytes()
        rows = list(csv.DictReader(raw.decode("utf-8", "replace").splitlines()))
        columns = ["image_id", "class"]
        if path.name == Path(TRAIN).name:
            columns.append("user_id")
        for column in columns:
            if not rows or rows[0].get(column) is None:
                raise UserError(f"{path} has no column {column}; expected {', '.join(columns)}; {self.remedy}")
        for row in rows:
            label = row["class"]
            if label is None or not label.isdecimal() or int(label) >= self.num_classes:
                raise UserError(
                    f"{path} has class {label} for {row['image_id']}; expected 0 to {self.num_classes - 1}; "
                    f"{self.remedy}"
                )
        return rows, hashlib.sha256(raw).hexdigest()

    def find(self, data_dir: Path, file: str) -> Path | None:
        """Return the path of a CSV file or, for ``IMAGES``, the folder of the images; None if it is missing.

        Images are in ``images``, or in ``train`` if the archives were unpacked unchanged.
        """
        if file != IMAGES:
            return super().find(data_dir, file)
        folders = (data_dir / ROOT / name for name in ("images", "train"))
        return next((folder for folder in folders if folder.is_dir()), None)

    def verify(self, data_dir: Path) -> tuple[FileReport, ...]:
        """Hash the lists; no hashes of the images are published."""
        return tuple(self._verify_file(data_dir, file) for file in (TRAIN, TEST))

    def read(self, data_dir: Path) -> Dataset:
        """List the images with their photographers; all photographers of the test set form one further group."""
        train_rows, test_rows = self.read_file(data_dir, TRAIN), self.read_file(data_dir, TEST)
        if self.sizes is not None and self.sizes != (len(train_rows), len(test_rows)):
            raise UserError(
                f"{data_dir / ROOT} lists {len(train_rows)} and {len(test_rows)} images; "
                f"expected {self.sizes[0]} and {self.sizes[1]}; {self.remedy}"
            )
        tree = FolderTree(data_dir / ROOT)
        users = sorted({row["user_id"] for row in train_rows}, key=lambda user: (len(user), user))  # 2 before 10
        group_of_user = {user: group for group, user in enumerate(users)}
        images = ImageList(tree, [str(label) for label in range(self.num_classes)], (*users, "other photographers"))
        for row in train_rows:
            file = _find_image(tree, row["image_id"])
            images.add([file], int(row["class"]), group_of_user[row["user_id"]], test=False)
        for row in test_rows:
            images.add([_find_image(tree, row["image_id"])], int(row["class"]), len(users), test=True)
        if self.options.decode == "streamed":
            cache_bytes = int(self.options.cache * 1e9)  # the option is in GB
            return streamed_dataset(self.text, data_dir, images, self.options, cache_bytes)
        return image_dataset(self.text, data_dir, images, self.options)


def _find_image(tree: FolderTree, image: str) -> str:
    """Return the name in the tree of the image with this id, in the folder ``images`` or the layout of the archives."""
    names = (f"images/{image}.jpg", f"train/{'/'.join(image[:3])}/{image}.jpg")
    for name in names:
        if name in tree.files:
            return name
    raise UserError(
        f"image {image} is missing; expected {tree.path}/{names[0]} or {tree.path}/{names[1]}: "
        "unpack the archive that contains it"
    )


LANDMARKS = Landmarks(
    "landmarks",
    "photographs of 2,028 landmarks by photographer (Landmarks-User-160k)",
    (
        Download(
            f"https://storage.googleapis.com/gresearch/federated-vision-datasets/{ROOT}.zip",
            "53c36bd7d5fc12f927af2820b7e4a57c",
            (TRAIN, TEST),
        ),
    ),
    instructions=(
        "download images_000.tar to images_499.tar at https://s3.amazonaws.com/google-landmark/train/ (500 GB) "
        f"and put the images into the data directory, as {ROOT}/images/<id>.jpg or {ROOT}/train/a/b/c/<id>.jpg"
    ),
    card=DatasetCard(
        examples="164,172 / 19,526",
        shape="3x224x224",
        classes="2,028",
        clients="1,262 photographers",
        citation="Hsu et al. 2020",
        licence="lists CC BY 4.0; each photograph has its author's licence",
        checks="md5 of the lists' archive; number of rows, range of classes; every image exists",
        model="mobilenetv2",
    ),
)
SOURCES = (LANDMARKS,)
