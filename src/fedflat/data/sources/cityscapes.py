"""Cityscapes (Cordts et al. 2016): streets of cities, each pixel of one of 19 classes; a natural client per city.

``leftImg8bit/<part>/<city>/<city>_..._leftImg8bit.png`` and ``gtFine/<part>/<city>/<city>_..._gtFine_labelIds.png``. ``train`` is
trained on, its 18 cities; ``val`` is the test set, 3 cities that training has not seen. The labels of the published test set are secret.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from fedflat.data.dataset import IGNORED, Dataset
from fedflat.data.masks import MaskOptions, Pairs, mask_dataset
from fedflat.data.sources.source import FileReport, Source
from fedflat.data.tree import Tree, open_tree
from fedflat.errors import UserError
from fedflat.text import param

CLASSES = (
    "road", "sidewalk", "building", "wall", "fence", "pole", "traffic light", "traffic sign", "vegetation", "terrain", "sky",
    "person", "rider", "car", "truck", "bus", "train", "motorcycle", "bicycle",
)  # fmt: skip
LABEL_IDS = (7, 8, 11, 12, 13, 17, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 31, 32, 33)
"""The label id of each class; of the ids from 0 to 33 all others do not count."""
IMAGES, MASKS = "leftImg8bit", "gtFine"
PICTURE, MASK = "_leftImg8bit.png", "_gtFine_labelIds.png"


@dataclass(frozen=True)
class CityscapesOptions(MaskOptions):
    """How large pictures are."""

    size: int | None = param(512, "height in pixels to which pictures are brought (of 1024); none: as they are", low=1)


@dataclass(frozen=True)
class Cityscapes(Source):
    """Cityscapes with fine labels."""

    options: CityscapesOptions = field(default=CityscapesOptions(), kw_only=True)
    sizes: tuple[int, int] | None = (2975, 500)
    """How many pictures the two parts must have."""
    roots: tuple[str, ...] = ("cityscapes", "Cityscapes")

    @property
    def files(self) -> tuple[str, ...]:
        """The folders of pictures and of masks."""
        return tuple(f"{self.roots[0]}/{kind}/{part}" for kind in (IMAGES, MASKS) for part in ("train", "val"))

    def find(self, folder: Path, file: str) -> Path | None:
        """A folder, under any of the names of the dataset's own."""
        inside = file.partition("/")[2]
        return next((folder / root / inside for root in self.roots if (folder / root / inside).is_dir()), None)

    def verify(self, folder: Path) -> tuple[FileReport, ...]:
        """The hash over names and bytes of all files of a folder; none is published."""
        tree = self._tree(folder)
        return tuple(FileReport(file, tree.hash(file.partition("/")[2]), None) for file in self.files)

    def read(self, folder: Path) -> Dataset:
        """The dataset, from the cache after the first time."""
        tree = self._tree(folder)
        found = {
            part: [name for name in tree.below(f"{IMAGES}/{part}") if name.endswith(PICTURE)]
            for part in ("train", "val")
        }
        counts = tuple(map(len, found.values()))
        if self.sizes is not None and counts != self.sizes:
            raise UserError(
                f"{tree.where} has {counts[0]} pictures for training and {counts[1]} for validation, "
                f"but {self.sizes[0]} and {self.sizes[1]} were expected; unpack leftImg8bit_trainvaltest.zip anew"
            )
        cities = sorted({name.split("/")[2] for names in found.values() for name in names})
        pairs = Pairs()
        for part, names in found.items():
            for name in names:
                mask = name.replace(IMAGES, MASKS, 1).removesuffix(PICTURE) + MASK
                if mask not in tree.stamps:
                    raise UserError(f"{tree.where}/{mask} is missing; unpack gtFine_trainvaltest.zip beside {IMAGES}")
                pairs.add(name, mask, cities.index(name.split("/")[2]), part == "val")
        ids = dict.fromkeys(range(34), IGNORED) | {number: label for label, number in enumerate(LABEL_IDS)}
        return mask_dataset(self.text, folder, tree, pairs, ids, CLASSES, self.options, cities)

    def _tree(self, folder: Path) -> Tree:
        found = self.find(folder, self.files[0])
        if found is None:
            raise UserError(f"{self.name} is not there; {self.expected(folder)}")
        return open_tree(found.parent.parent)


CITYSCAPES = Cityscapes(
    "cityscapes",
    "streets of 21 cities, each pixel of one of 19 classes",
    instructions=(
        "out of leftImg8bit_trainvaltest.zip and gtFine_trainvaltest.zip at https://www.cityscapes-dataset.com/downloads/ (with an account)"
    ),
)
