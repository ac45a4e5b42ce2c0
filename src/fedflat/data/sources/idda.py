"""IDDA (Alberti et al. 2020): simulated driving in 16 classes; natural clients are domains.

Files: ``IDDAsmall/<domain>/RGB/<name>.jpg`` and ``IDDAsmall/<domain>/Semantic/<name>.png`` (IDDA V3). A domain is a
town, a weather and a vehicle, e.g. ``T03_HRN_B``. ``unseen=country`` holds out the countryside (T07), ``unseen=rainy``
hard rain (HRN): all images of these domains are test examples, as is every fifth image of every other domain. The test
set thus has seen and unseen domains in the proportions of FedDrive (Fantauzzo et al. 2022), but not its exact images.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from fedflat.data.dataset import IGNORED, TEST_EVERY, Dataset
from fedflat.data.files.images import ImageList, is_image
from fedflat.data.files.masks import MaskOptions, mask_dataset
from fedflat.data.sources.source import DatasetCard, FolderSource
from fedflat.errors import UserError, one_of
from fedflat.text import param

CLASSES = (
    "road", "sidewalk", "building", "wall", "fence", "pole", "traffic light", "traffic sign", "vegetation", "terrain",
    "sky", "person", "rider", "car", "motorcycle", "bicycle",
)  # fmt: skip
IDS = {7: 0, 6: 0, 8: 1, 1: 2, 11: 3, 2: 4, 5: 5, 13: 6, 12: 7, 9: 8, 19: 9, 20: 10, 4: 11, 18: 12, 10: 13, 17: 14,
       16: 15}  # fmt: skip
"""Class of each mask id; road lines (6) are road, all other ids from 0 to 23 are ignored."""
UNSEEN = {"country": ("T07", 0), "rainy": ("HRN", 1)}
"""Option ``unseen``: the town (position 0 of a domain's name) or weather (position 1) that marks a domain as unseen."""


@dataclass(frozen=True)
class IddaOptions(MaskOptions):
    """Image size, and which domains are unseen in training."""

    size: int | None = param(
        540, "height in pixels to which images are resized (original: 1080); none keeps the original size", low=1
    )
    unseen: str | None = param("country", "domains used only for testing: country, rainy (hard rain) or none")


@dataclass(frozen=True)
class Idda(FolderSource):
    """The files are those of IDDA V3. Every combination of town, weather and vehicle is a domain (a natural client)."""

    options: IddaOptions = field(default=IddaOptions(), kw_only=True)

    def read(self, data_dir: Path) -> Dataset:
        """List the images and masks of every domain.

        Test examples are all images of unseen domains, and every fifth image of the other domains.
        """
        if self.options.unseen not in (None, *UNSEEN):
            raise one_of("unseen domain", self.options.unseen, (*UNSEEN, "none"), owner=self.name)
        tree = self.tree(data_dir)
        domains = [domain for domain in tree.subfolders("") if any(map(is_image, tree.files_below(f"{domain}/RGB")))]
        if not domains:
            raise UserError(
                f"{tree.path} has no domains; expected folders such as T01_CN_A/RGB and T01_CN_A/Semantic in it"
            )
        images = ImageList(tree, CLASSES, domains)
        for group, domain in enumerate(domains):
            is_unseen = self._is_unseen(domain)
            for position, name in enumerate(filter(is_image, tree.files_below(f"{domain}/RGB"))):
                mask = f"{domain}/Semantic/{Path(name).stem}.png"
                if mask not in tree.files:
                    raise UserError(f"{tree.path}/{mask} is missing; expected a mask for every image: {self.remedy}")
                images.add_masked(name, mask, group, is_unseen or position % TEST_EVERY == TEST_EVERY - 1)
        if all(images.is_test):
            raise UserError(
                f"unseen={self.options.unseen} leaves no domain of {tree.path} to train on; choose another value"
            )
        # Mask ids go from 0 to 23; those outside IDS are ignored.
        class_of_id = dict.fromkeys(range(24), IGNORED) | IDS
        return mask_dataset(self.text, data_dir, images, class_of_id, self.options)

    def _is_unseen(self, domain: str) -> bool:
        """Whether a domain is used only for testing, by its name ``town_weather_vehicle`` and the option ``unseen``."""
        town_weather_vehicle = domain.split("_")
        if len(town_weather_vehicle) != 3:
            raise UserError(f"unknown IDDA domain {domain}; expected town_weather_vehicle, e.g. T01_CN_A")
        if self.options.unseen is None:
            return False
        unseen_value, position = UNSEEN[self.options.unseen]
        return town_weather_vehicle[position] == unseen_value


IDDA = Idda(
    "idda",
    "simulated driving in 104 domains, with one of 16 classes for each pixel",
    roots=("IDDAsmall",),
    instructions=(
        "request IDDA V3 at https://idda-dataset.github.io/home/download/ and unpack it into the data directory"
    ),
    card=DatasetCard(
        examples="4,320 / 1,920 (`unseen=country`), 3,312 / 2,928 (`unseen=rainy`)",
        shape="3x540x960, masks",
        classes="16",
        clients="104 domains, seen and unseen",
        citation="Alberti et al. 2020",
        licence="its own terms, on request",
        checks="every image has a mask of its size with known ids",
        model="bisenetv2",
    ),
)
SOURCES = (IDDA,)
