"""Tiny ImageNet: 200 classes of 500 pictures of 64x64 (Le and Yang 2015), from its zip archive or the folder that is in it.

``train/<class>/images/*.JPEG`` are the training pictures; ``val/images/*.JPEG``, whose classes ``val/val_annotations.txt`` tells, are
the test set, since the published test pictures have no labels. Classes are numbered in the order of their names, as most code does.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from fedflat.data.dataset import Dataset
from fedflat.data.images import Listing, PictureOptions, is_picture, picture_dataset
from fedflat.data.sources.source import Download, FileReport, Source, md5_of
from fedflat.data.tree import Tree, open_tree
from fedflat.errors import UserError

ARCHIVE, ROOT = "tiny-imagenet-200.zip", "tiny-imagenet-200"


@dataclass(frozen=True)
class TinyImageNet(Source):
    """Tiny ImageNet, decoded once."""

    options: PictureOptions = field(default=PictureOptions(), kw_only=True)
    num_classes: int = 200
    train_per_class: int = 500
    test_pictures: int = 10_000

    def find(self, folder: Path, file: str) -> Path | None:
        """The folder, or else the archive, which need not be unpacked."""
        return next((folder / place for place in (ROOT, ARCHIVE) if (folder / place).exists()), None)

    def is_intact(self, folder: Path, file: str) -> bool:
        """Whether the folder is there, or the archive as it was published."""
        found = self.find(folder, file)
        return found is not None and (found.is_dir() or md5_of(found) == self.downloads[0].md5)

    def verify(self, folder: Path) -> tuple[FileReport, ...]:
        """The hash over all files; of the archive it is known."""
        where = self._place(folder)
        published = where.is_file() and md5_of(where) == self.downloads[0].md5
        tree = open_tree(where)
        return tuple(
            FileReport(f"{where.name}/{part}", tree.hash(part), published or None) for part in ("train", "val")
        )

    def read(self, folder: Path) -> Dataset:
        """The dataset, from the cache after the first time."""
        tree = open_tree(self._place(folder))
        ids = sorted(set(tree.text("wnids.txt").split()))
        if len(ids) != self.num_classes:
            raise UserError(
                f"{tree.where}/wnids.txt names {len(ids)} classes, but {self.num_classes} were expected; {self.remedy}"
            )
        listing = Listing()
        for target, name in enumerate(ids):
            found = [file for file in tree.below(f"train/{name}/images") if is_picture(file)]
            if len(found) != self.train_per_class:
                raise UserError(
                    f"{tree.where}/train/{name} holds {len(found)} pictures, but {self.train_per_class} were expected; {self.remedy}"
                )
            listing.add(found, target, test=False)
        for file, target in self._test(tree, ids).items():
            listing.add([file], target, test=True)
        return picture_dataset(self.text, folder, tree, listing, _class_names(tree, ids), self.options)

    def _test(self, tree: Tree, ids: list[str]) -> dict[str, int]:
        number = {name: target for target, name in enumerate(ids)}
        lines = [line.split("\t") for line in tree.text("val/val_annotations.txt").splitlines() if line.strip()]
        wrong = [line[0] for line in lines if len(line) < 2 or line[1] not in number]
        if wrong:
            raise UserError(f"{tree.where}/val/val_annotations.txt gives no known class for {wrong[0]}; {self.remedy}")
        found = {f"val/images/{line[0]}": number[line[1]] for line in lines}
        absent = [name for name in found if name not in tree.stamps]
        if absent or len(found) != self.test_pictures:
            lacking = (
                f"lacks {absent[0]}" if absent else f"has {len(found)} test pictures instead of {self.test_pictures}"
            )
            raise UserError(f"{tree.where} {lacking}; {self.remedy}")
        return found

    def _place(self, folder: Path) -> Path:
        found = self.find(folder, ROOT)
        if found is None:
            raise UserError(f"{self.name} is not there; {self.expected(folder)}")
        return found


def _class_names(tree: Tree, ids: list[str]) -> list[str]:
    """The first of the words for each class, where there is a list of them."""
    if "words.txt" not in tree.stamps:
        return ids
    words = dict(line.split("\t", 1) for line in tree.text("words.txt").splitlines() if "\t" in line)
    return [words.get(name, name).partition(",")[0] for name in ids]


TINY_IMAGENET = TinyImageNet(
    "tiny_imagenet",
    "pictures of 200 kinds of things, 64x64",
    (Download(f"http://cs231n.stanford.edu/{ARCHIVE}", "90528d7ca1a48142e341f4ef8d21d0de", (ARCHIVE,)),),
)
