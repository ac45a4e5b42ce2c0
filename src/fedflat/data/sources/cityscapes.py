"""Cityscapes (Cordts et al. 2016): street scenes in 19 classes; natural clients are cities.

Files: ``leftImg8bit/<split>/<city>/<city>_..._leftImg8bit.png`` and
``gtFine/<split>/<city>/<city>_..._gtFine_labelIds.png``. Models train on the 18 cities of ``train`` and are tested on
the 3 unseen cities of ``val``; the labels of the published test set are secret.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from fedflat.data.dataset import IGNORED, Dataset
from fedflat.data.files.images import ImageList
from fedflat.data.files.masks import MaskOptions, mask_dataset
from fedflat.data.sources.source import DatasetCard, FolderSource
from fedflat.errors import UserError
from fedflat.text import param

CLASSES = (
    "road", "sidewalk", "building", "wall", "fence", "pole", "traffic light", "traffic sign", "vegetation", "terrain",
    "sky", "person", "rider", "car", "truck", "bus", "train", "motorcycle", "bicycle",
)  # fmt: skip
LABEL_IDS = (7, 8, 11, 12, 13, 17, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 31, 32, 33)
"""Label id of each class; all other ids from 0 to 33 are ignored."""
IMAGES, MASKS = "leftImg8bit", "gtFine"
IMAGE_SUFFIX, MASK_SUFFIX = "_leftImg8bit.png", "_gtFine_labelIds.png"
SPLITS = ("train", "val")


@dataclass(frozen=True)
class CityscapesOptions(MaskOptions):
    """Image size."""

    size: int | None = param(
        512, "height in pixels to which images are resized (original: 1024); none keeps the original size", low=1
    )


@dataclass(frozen=True)
class Cityscapes(FolderSource):
    """The masks are the fine annotations; each city is a natural client.

    Attributes:
        sizes: required numbers of training and validation images; None accepts any.
    """

    options: CityscapesOptions = field(default=CityscapesOptions(), kw_only=True)
    sizes: tuple[int, int] | None = (2975, 500)

    @property
    def parts(self) -> tuple[str, ...]:
        """The folders that must exist: images and masks, each of train and val."""
        return tuple(f"{kind}/{split}" for kind in (IMAGES, MASKS) for split in SPLITS)

    def read(self, data_dir: Path) -> Dataset:
        """Return the dataset: train is the training set, val the test set, and the folder of an image is its city.

        The file of a mask has the path of its image, with another top folder and another suffix.
        """
        tree = self.tree(data_dir)
        train, val = (
            [name for name in tree.files_below(f"{IMAGES}/{split}") if name.endswith(IMAGE_SUFFIX)] for split in SPLITS
        )
        counts = len(train), len(val)
        if self.sizes is not None and counts != self.sizes:
            raise UserError(
                f"{tree.path} has {counts[0]} training and {counts[1]} validation images; "
                f"expected {self.sizes[0]} and {self.sizes[1]}: unpack leftImg8bit_trainvaltest.zip again"
            )
        cities = sorted({Path(name).parent.name for name in train + val})
        images = ImageList(tree, CLASSES, cities)
        for number, name in enumerate(train + val):
            mask = name.replace(IMAGES, MASKS, 1).removesuffix(IMAGE_SUFFIX) + MASK_SUFFIX
            if mask not in tree.files:
                raise UserError(f"{tree.path}/{mask} is missing; unpack gtFine_trainvaltest.zip next to {IMAGES}")
            images.add_masked(name, mask, cities.index(Path(name).parent.name), test=number >= len(train))
        # Label ids go from 0 to 33; those outside LABEL_IDS are ignored.
        class_of_id = dict.fromkeys(range(34), IGNORED) | {id_: label for label, id_ in enumerate(LABEL_IDS)}
        return mask_dataset(self.text, data_dir, images, class_of_id, self.options)


CITYSCAPES = Cityscapes(
    "cityscapes",
    "street scenes of 21 cities, with one of 19 classes for each pixel",
    roots=("cityscapes", "Cityscapes"),
    instructions=(
        "download leftImg8bit_trainvaltest.zip and gtFine_trainvaltest.zip at "
        "https://www.cityscapes-dataset.com/downloads/ (account required) and unpack both into the folder cityscapes "
        "of the data directory"
    ),
    card=DatasetCard(
        examples="2,975 / 500",
        shape="3x512x1024, masks",
        classes="19",
        clients="18 cities; 3 further cities for testing",
        citation="Cordts et al. 2016",
        licence="its own terms for non-commercial use, accepted on registration",
        checks="number of images; every image has a mask of its size with known ids",
        model="bisenetv2",
    ),
)
SOURCES = (CITYSCAPES,)
