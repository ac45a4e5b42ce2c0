"""A user's own pictures in one folder per class."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from fedflat.data.dataset import Dataset
from fedflat.data.images import Listing, PictureOptions, is_picture, picture_dataset
from fedflat.data.sources.source import Source
from fedflat.data.tree import Tree, open_tree
from fedflat.errors import UserError
from fedflat.text import param

TRAIN, TEST = ("train", "training"), ("test", "val", "valid", "validation")


@dataclass(frozen=True)
class ImageFolderOptions(PictureOptions):
    """Where the pictures lie, and how they are brought to one size."""

    path: str = param(
        "",
        "a folder or zip archive with train/<class>/*.jpg and test/<class>/*.jpg, or just <class>/*.jpg",
        path=True,
    )


@dataclass(frozen=True)
class ImageFolder(Source):
    """Pictures by class; without a test folder every fifth of a class, in the order of names, is for testing."""

    options: ImageFolderOptions = field(default=ImageFolderOptions(), kw_only=True)

    def read(self, folder: Path) -> Dataset:
        """The dataset, from the cache after the first time."""
        if not self.options.path:
            raise UserError(f"{self.name} needs to know where the pictures are; write {self.name}(path=FOLDER)")
        tree = open_tree(Path(self.options.path).expanduser().absolute())
        folders = {name.partition("/")[0] for name in tree.stamps if "/" in name}
        train, test = (next((name for name in names if name in folders), "") for names in (TRAIN, TEST))
        train_pictures, test_pictures = _by_class(tree, train), _by_class(tree, test) if train and test else {}
        classes = sorted(train_pictures)
        if len(classes) < 2:
            raise UserError(
                f"{tree.where}/{train} has {len(classes)} folders with pictures; expected one folder per class, at least 2"
            )
        strange = sorted(set(test_pictures) - set(classes))
        if strange:
            raise UserError(
                f"{tree.where}/{test} has a class {strange[0]}, but there is no folder {train}/{strange[0]} to learn it from"
            )
        listing = Listing()
        for target, name in enumerate(classes):
            listing.add(train_pictures[name], target, test=False if test_pictures else None)
        for target, name in enumerate(classes):
            listing.add(test_pictures.get(name, []), target, test=True)
        return picture_dataset(self.text, folder, tree, listing, classes, self.options)


def _by_class(tree: Tree, folder: str) -> dict[str, list[str]]:
    """The pictures of each class below a folder, at any depth; a class folder without pictures is a mistake."""
    found: dict[str, list[str]] = {}
    prefix = f"{folder}/" if folder else ""
    for name in tree.stamps:
        label, deeper, _ = name.removeprefix(prefix).partition("/")
        if name.startswith(prefix) and deeper and is_picture(name):
            found.setdefault(label, []).append(name)
    empty = [label for label in tree.folders(folder) if label not in found]
    if empty:
        raise UserError(f"{tree.where}/{prefix}{empty[0]} holds no pictures; put some there, or take the folder away")
    return found


IMAGES = ImageFolder("images", "your own pictures, train/<class>/*.jpg and test/<class>/*.jpg")
