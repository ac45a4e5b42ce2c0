"""Landmarks-User-160k (Hsu et al. 2020): photographs of landmarks, a client per photographer.

``federated_train.csv`` has the columns user_id, image_id and class; ``test.csv`` has image_id and class, and its photographers are
others. The pictures are those of Google Landmarks v2, as ``images/<id>.jpg`` or as its archives have them, ``train/a/b/c/abc....jpg``.
"""

from __future__ import annotations

import csv
import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from fedflat.data.dataset import Dataset
from fedflat.data.images import Listing, PictureOptions, picture_dataset
from fedflat.data.sources.source import Download, FileReport, FileSource
from fedflat.data.streamed import streamed_dataset
from fedflat.data.tree import FolderTree
from fedflat.errors import UserError
from fedflat.text import param

ROOT = "landmarks-user-160k"
TRAIN, TEST, PICTURES = f"{ROOT}/federated_train.csv", f"{ROOT}/test.csv", f"{ROOT}/images"
Rows = list[dict[str, str]]


@dataclass(frozen=True)
class LandmarksOptions(PictureOptions):
    """How photographs of any shape are brought to one size, and when."""

    size: int = param(224, "height and width in pixels to which pictures are brought", low=1)
    fit: Literal["squash", "crop"] = param(
        "crop", "squash the whole picture into the square, or cut the largest square from its middle"
    )
    decode: Literal["once", "streamed"] = param(
        "once", "once, into a file that is mapped; or streamed: whenever a picture is asked for"
    )
    cache: float = param(2.0, "GB of decoded pictures that each process keeps in memory (decode=streamed)", low=0)


@dataclass(frozen=True)
class Landmarks(FileSource[Rows]):
    """Landmarks-User-160k, decoded once or on demand."""

    options: LandmarksOptions = field(default=LandmarksOptions(), kw_only=True)
    num_classes: int = 2028
    sizes: tuple[int, int] | None = (164_172, 19_526)
    """How many rows the two lists must have."""

    def parse(self, path: Path) -> tuple[Rows, str]:
        """The rows of a list, and the sha256 of the file."""
        raw = path.read_bytes()
        rows = list(csv.DictReader(raw.decode("utf-8", "replace").splitlines()))
        columns = ["image_id", "class"] + (["user_id"] if path.name == Path(TRAIN).name else [])
        lacking = [column for column in columns if not rows or rows[0].get(column) is None]
        if lacking:
            raise UserError(f"{path} has no column {lacking[0]}; expected {', '.join(columns)}; {self.remedy}")
        for row in rows:
            label = row["class"]
            if label is None or not label.isdigit() or int(label) >= self.num_classes:
                raise UserError(
                    f"{path} has class {label} for {row['image_id']}; expected 0 to {self.num_classes - 1}; {self.remedy}"
                )
        return rows, hashlib.sha256(raw).hexdigest()

    @property
    def files(self) -> tuple[str, ...]:
        """The two lists and the folder of pictures."""
        return TRAIN, TEST, PICTURES

    def find(self, folder: Path, file: str) -> Path | None:
        """Where a list lies, or the pictures in either layout."""
        if file != PICTURES:
            return super().find(folder, file)
        return next((folder / ROOT / place for place in ("images", "train") if (folder / ROOT / place).is_dir()), None)

    def verify(self, folder: Path) -> tuple[FileReport, ...]:
        """The hashes of the lists; no hash of the pictures is known."""
        return tuple(self._report(folder, file) for file in (TRAIN, TEST))

    def read(self, folder: Path) -> Dataset:
        """The dataset, from the cache after the first time."""
        lists = [self.open(folder, file) for file in (TRAIN, TEST)]
        if self.sizes is not None and tuple(map(len, lists)) != self.sizes:
            raise UserError(
                f"{folder / ROOT} lists {len(lists[0])} and {len(lists[1])} pictures instead of {self.sizes}; {self.remedy}"
            )
        tree = FolderTree(folder / ROOT)
        users = sorted({row["user_id"] for row in lists[0]}, key=lambda user: (len(user), user))
        number = {user: place for place, user in enumerate(users)}
        unknown = len(users)
        listing = Listing()
        for rows, test in zip(lists, (False, True), strict=True):
            for row in rows:
                group = unknown if test else number[row["user_id"]]
                listing.add([_picture(tree, row["image_id"])], int(row["class"]), group, test)
        classes = [str(label) for label in range(self.num_classes)]
        groups = (*users, "other photographers")
        if self.options.decode == "streamed":
            limit = int(self.options.cache * 1e9)
            return streamed_dataset(self.text, folder, tree, listing, classes, self.options, groups, limit)
        return picture_dataset(self.text, folder, tree, listing, classes, self.options, groups)


def _picture(tree: FolderTree, image: str) -> str:
    """The file of a picture, in either layout."""
    names = (f"images/{image}.jpg", f"train/{'/'.join(image[:3])}/{image}.jpg")
    for name in names:
        if name in tree.stamps:
            return name
    raise UserError(
        f"the picture {image} is neither {tree.where}/{names[0]} nor {tree.where}/{names[1]}; get the archive that holds it"
    )


LANDMARKS = Landmarks(
    "landmarks",
    "photographs of 2,028 landmarks by photographer (Landmarks-User-160k)",
    (
        Download(
            f"http://storage.googleapis.com/gresearch/federated-vision-datasets/{ROOT}.zip",
            "53c36bd7d5fc12f927af2820b7e4a57c",
            (TRAIN, TEST),
        ),
    ),
    instructions=(
        f"and the pictures as {ROOT}/images/<id>.jpg or {ROOT}/train/a/b/c/<id>.jpg, out of images_000.tar to images_499.tar at "
        "https://s3.amazonaws.com/google-landmark/train/ (500 GB in all)"
    ),
)
