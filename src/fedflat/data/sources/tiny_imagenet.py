"""Tiny ImageNet (Le and Yang 2015): 200 classes of 500 images of 64x64 pixels, from its zip archive or unpacked.

``train/<class>/images/*.JPEG`` are the training images. ``val/images/*.JPEG``, with classes in
``val/val_annotations.txt``, are the test set, since the published test images have no labels. Classes are numbered in
the alphabetical order of their ids.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from fedflat.data.dataset import Dataset
from fedflat.data.files.images import ImageList, ImageOptions, image_dataset, is_image
from fedflat.data.files.tree import Tree, open_tree
from fedflat.data.sources.source import DatasetCard, DatasetSource, Download, FileReport, md5_of
from fedflat.errors import UserError

ARCHIVE, ROOT = "tiny-imagenet-200.zip", "tiny-imagenet-200"


@dataclass(frozen=True)
class TinyImageNet(DatasetSource):
    """The test set is the published validation set. Images are decoded on first use and cached."""

    options: ImageOptions = field(default=ImageOptions(), kw_only=True)
    num_classes: int = 200
    train_per_class: int = 500
    test_images: int = 10_000

    @property
    def remedy(self) -> str:
        return f"delete it, then {super().remedy}"  # `get` keeps an existing folder

    def find(self, data_dir: Path, file: str) -> Path | None:
        """Return the folder, else the archive, which need not be unpacked."""
        return next((data_dir / name for name in (ROOT, ARCHIVE) if (data_dir / name).exists()), None)

    def is_intact(self, data_dir: Path, file: str) -> bool:
        path = self.find(data_dir, file)
        return path is not None and (path.is_dir() or md5_of(path) == self.downloads[0].md5)

    def verify(self, data_dir: Path) -> tuple[FileReport, ...]:
        """Hash the folders train and val.

        Only the archive has a published md5, so an unpacked folder is reported as unknown (None).
        """
        path = self._required_path(data_dir)
        is_published = path.is_file() and md5_of(path) == self.downloads[0].md5
        tree = open_tree(path)
        return tuple(
            FileReport(f"{path.name}/{part}", tree.digest(part), as_published=True if is_published else None)
            for part in ("train", "val")
        )

    def read(self, data_dir: Path) -> Dataset:
        """List the images of each class, after checking their numbers, and decode them."""
        tree = open_tree(self._required_path(data_dir))
        ids = sorted(set(tree.read_text("wnids.txt").split()))
        if len(ids) != self.num_classes:
            raise UserError(
                f"{tree.path}/wnids.txt lists {len(ids)} classes; expected {self.num_classes}; {self.remedy}"
            )
        images = ImageList(tree, _class_names(tree, ids))
        for target, name in enumerate(ids):
            files = [file for file in tree.files_below(f"train/{name}/images") if is_image(file)]
            if len(files) != self.train_per_class:
                raise UserError(
                    f"{tree.path}/train/{name} contains {len(files)} images; expected {self.train_per_class}; "
                    f"{self.remedy}"
                )
            images.add(files, target, test=False)
        for file, target in self._read_test_targets(tree, ids).items():
            images.add([file], target, test=True)
        return image_dataset(self.text, data_dir, images, self.options)

    def _read_test_targets(self, tree: Tree, ids: list[str]) -> dict[str, int]:
        """Return the class of each test image, by file name; ``ids`` are the class ids in the order of the classes."""
        targets = {}
        for line in tree.read_text("val/val_annotations.txt").splitlines():
            if not line.strip():
                continue
            image, *fields = line.split("\t")  # the class id, then a bounding box
            if not fields or fields[0] not in ids:
                raise UserError(f"{tree.path}/val/val_annotations.txt has no known class for {image}; {self.remedy}")
            targets[f"val/images/{image}"] = ids.index(fields[0])
        for file in targets:
            if file not in tree.files:
                raise UserError(f"{tree.path} lacks {file}; {self.remedy}")
        if len(targets) != self.test_images:
            raise UserError(f"{tree.path} has {len(targets)} test images; expected {self.test_images}; {self.remedy}")
        return targets

    def _required_path(self, data_dir: Path) -> Path:
        """Return the folder or archive, or raise a ``UserError`` if neither exists."""
        path = self.find(data_dir, ROOT)
        if path is None:
            raise UserError(f"{self.name} is missing; {self.file_instructions(data_dir)}")
        return path


def _class_names(tree: Tree, ids: list[str]) -> list[str]:
    """Return a name for each class id: the first word listed for it in ``words.txt``, or the id without that file."""
    if "words.txt" not in tree.files:
        return ids
    words = dict(line.split("\t", 1) for line in tree.read_text("words.txt").splitlines() if "\t" in line)
    return [words.get(id_, id_).partition(",")[0] for id_ in ids]


TINY_IMAGENET = TinyImageNet(
    "tiny_imagenet",
    "natural images of 200 classes, 64x64",
    (Download(f"https://cs231n.stanford.edu/{ARCHIVE}", "90528d7ca1a48142e341f4ef8d21d0de", (ARCHIVE,)),),
    card=DatasetCard(
        examples="100,000 / 10,000",
        shape="3x64x64",
        classes="200",
        citation="Le and Yang 2015",
        licence="none stated; the images are from ImageNet, whose terms allow non-commercial research",
        size="248 MB",
        checks="md5 of the archive; 200 classes of 500 training images, 10,000 test images",
        model="resnet18",
    ),
)
SOURCES = (TINY_IMAGENET,)
