"""IDDA (Alberti et al. 2020): drives through simulated cities, each pixel of one of 16 classes; a natural client per domain.

``IDDAsmall/<domain>/RGB/<name>.jpg`` and ``IDDAsmall/<domain>/Semantic/<name>.png`` (IDDA V3). A domain is a town, a weather and a
vehicle, as in ``T03_HRN_B``. ``unseen=country`` holds out the countryside (T07), ``unseen=rainy`` hard rain (HRN): all pictures of such
domains are for testing, and of every other domain every fifth in the order of names, so that the test set has seen and unseen domains
in the proportions of FedDrive (Fantauzzo et al. 2022), though not its very pictures.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from fedflat.data.dataset import IGNORED, Dataset
from fedflat.data.images import TEST_EVERY, is_picture
from fedflat.data.masks import MaskOptions, Pairs, mask_dataset
from fedflat.data.sources.source import FileReport, Source
from fedflat.data.tree import open_tree
from fedflat.errors import UserError, one_of
from fedflat.text import param

CLASSES = (
    "road", "sidewalk", "building", "wall", "fence", "pole", "traffic light", "traffic sign", "vegetation", "terrain", "sky",
    "person", "rider", "car", "motorcycle", "bicycle",
)  # fmt: skip
IDS = {
    7: 0,
    6: 0,
    8: 1,
    1: 2,
    11: 3,
    2: 4,
    5: 5,
    13: 6,
    12: 7,
    9: 8,
    19: 9,
    20: 10,
    4: 11,
    18: 12,
    10: 13,
    17: 14,
    16: 15,
}
"""The class of each id of a mask; road lines (6) are road, and of the ids from 0 to 23 all others do not count."""
ROOT = "IDDAsmall"
HELD_OUT = {"country": ("T07", 0), "rainy": ("HRN", 1)}
"""By which piece of its name a domain is unseen."""


@dataclass(frozen=True)
class IddaOptions(MaskOptions):
    """Which domains are unseen, and how large pictures are."""

    size: int | None = param(540, "height in pixels to which pictures are brought (of 1080); none: as they are", low=1)
    unseen: str | None = param("country", "which domains are for testing alone: country, rainy (hard rain) or none")


@dataclass(frozen=True)
class Idda(Source):
    """IDDA in the layout of its third version."""

    options: IddaOptions = field(default=IddaOptions(), kw_only=True)

    @property
    def files(self) -> tuple[str, ...]:
        """The folder of domains."""
        return (ROOT,)

    def verify(self, folder: Path) -> tuple[FileReport, ...]:
        """The hash over names and bytes of all files of a domain; none is published."""
        tree = open_tree(folder / ROOT)
        return tuple(FileReport(f"{ROOT}/{domain}", tree.hash(domain), None) for domain in tree.folders(""))

    def read(self, folder: Path) -> Dataset:
        """The dataset, from the cache after the first time."""
        if self.options.unseen not in (None, *HELD_OUT):
            raise one_of("unseen part of idda", self.options.unseen, (*HELD_OUT, "none"))
        tree = open_tree(folder / ROOT)
        domains = [domain for domain in tree.folders("") if any(map(is_picture, tree.below(f"{domain}/RGB")))]
        if not domains:
            raise UserError(
                f"{tree.where} has no domains; expected folders such as T01_CN_A/RGB and T01_CN_A/Semantic in it"
            )
        pairs = Pairs()
        for group, domain in enumerate(domains):
            unseen = self._unseen(domain)
            for place, name in enumerate(filter(is_picture, tree.below(f"{domain}/RGB"))):
                mask = f"{domain}/Semantic/{Path(name).stem}.png"
                if mask not in tree.stamps:
                    raise UserError(
                        f"{tree.where}/{mask} is missing; expected a mask for every picture: unpack the dataset anew"
                    )
                pairs.add(name, mask, group, unseen or place % TEST_EVERY == TEST_EVERY - 1)
        if all(pairs.is_test):
            raise UserError(f"every domain in {tree.where} is unseen with unseen={self.options.unseen}; choose another")
        ids = dict.fromkeys(range(24), IGNORED) | IDS
        return mask_dataset(self.text, folder, tree, pairs, ids, CLASSES, self.options, domains)

    def _unseen(self, domain: str) -> bool:
        pieces = domain.split("_")
        if len(pieces) != 3:
            raise UserError(f"{domain} is no domain of IDDA; expected town, weather and vehicle, as in T01_CN_A")
        if self.options.unseen is None:
            return False
        piece, place = HELD_OUT[self.options.unseen]
        return pieces[place] == piece


IDDA = Idda(
    "idda",
    "drives through simulated cities in 105 domains, each pixel of one of 16 classes",
    instructions="out of IDDA V3, on request at https://idda-dataset.github.io/home/download/",
)
