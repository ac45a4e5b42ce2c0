"""User data: images in one folder per class."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from pathlib import Path

from fedflat.data.dataset import Dataset
from fedflat.data.files.images import ImageList, ImageOptions, image_dataset, is_image
from fedflat.data.files.tree import Tree, open_tree
from fedflat.data.sources.source import DatasetSource
from fedflat.errors import UserError
from fedflat.text import absolute_path, param

TRAIN, TEST = ("train", "training"), ("test", "val", "valid", "validation")


@dataclass(frozen=True)
class ImageFolderOptions(ImageOptions):
    """Location and size of the images."""

    path: str = param(
        "",
        "folder or zip archive with train/<class>/*.jpg and test/<class>/*.jpg, or only <class>/*.jpg",
        path=True,
        positional=True,
    )


@dataclass(frozen=True)
class ImageFolder(DatasetSource):
    """Images are in one folder per class; without a test folder, every fifth image of each class is a test example."""

    options: ImageFolderOptions = field(default=ImageFolderOptions(), kw_only=True)

    def read(self, data_dir: Path) -> Dataset:
        """List the images of each class in the training and the test folder.

        Without a training folder, the folders of the classes are at the top level, and there is no test folder.
        """
        tree = open_tree(absolute_path(self.path))
        folders = {name.partition("/")[0] for name in tree.files if "/" in name}
        train = next((name for name in TRAIN if name in folders), "")
        test = next((name for name in TEST if name in folders), "")
        train_files = _files_by_class(tree, train)
        test_files = _files_by_class(tree, test) if train and test else {}
        classes = sorted(train_files)
        if len(classes) < 2:
            raise UserError(
                f"{tree.path}/{train} has {len(classes)} folders with images; expected one per class, at least 2"
            )
        if not train:
            _warn_of_domains(tree.path, train_files)
        unknown = sorted(set(test_files) - set(classes))
        if unknown:
            raise UserError(
                f"{tree.path}/{test} has a class {unknown[0]} without training images; "
                f"expected a folder {train}/{unknown[0]}"
            )
        images = ImageList(tree, classes)
        for target, name in enumerate(classes):
            # Without a test folder (None), every fifth image becomes a test example.
            images.add(train_files[name], target, test=False if test_files else None)
        for target, name in enumerate(classes):
            images.add(test_files.get(name, []), target, test=True)
        return image_dataset(self.text, data_dir, images, self.options)


def _files_by_class(tree: Tree, folder: str) -> dict[str, list[str]]:
    """Return the images below each subfolder of ``folder``, at any depth, by the subfolder's name, which is the class.

    An empty ``folder`` means the top level. Raises a ``UserError`` if a subfolder contains no images.
    """
    files: dict[str, list[str]] = {}
    prefix = f"{folder}/" if folder else ""
    for name in tree.files:
        label, slash, _ = name.removeprefix(prefix).partition("/")
        if name.startswith(prefix) and slash and is_image(name):
            files.setdefault(label, []).append(name)
    for label in tree.subfolders(folder):
        if label not in files:
            raise UserError(f"{tree.path}/{prefix}{label} contains no images; add some, or remove the folder")
    return files


def _warn_of_domains(path: Path, files: dict[str, list[str]]) -> None:
    """Warn if all images (``files`` by class) are in subfolders that every class has: probably <domain>/<class>."""
    subfolders = [{name.split("/")[1] for name in names} for names in files.values()]
    shared = sorted(set.intersection(*subfolders))
    if len(shared) > 1 and not any(is_image(name) for names in subfolders for name in names):
        listed = ", ".join(shared[:3]) + ", ..." * (len(shared) > 3)
        warnings.warn(
            f"each of the {len(files)} classes (folders) of {path} has the subfolders {listed}; if these are the "
            f"classes, and the folders are sites or domains, use domains(path={path})",
            stacklevel=3,
        )


IMAGES = ImageFolder(
    "images", "your images, as train/<class>/*.jpg and test/<class>/*.jpg", example="images(path=pets,size=64)"
)
SOURCES = (IMAGES,)
