"""Datasets of several domains, ``<domain>/<class>/*.jpg``: PACS, Office-Home, and user data.

Each domain is a natural client. ``test_domain`` holds out one domain as the test set (leave-one-domain-out); without
it, every fifth image of every class and domain is a test example.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fedflat.data.dataset import Dataset
from fedflat.data.files.images import ImageList, ImageOptions, image_dataset, is_image
from fedflat.data.files.tree import Tree, open_tree
from fedflat.data.sources.source import DatasetCard, FolderSource
from fedflat.errors import UserError, one_of
from fedflat.text import absolute_path, param

FilesByClass = dict[str, list[str]]


@dataclass(frozen=True)
class DomainOptions(ImageOptions):
    """Image size, and which domain is the test set."""

    test_domain: str | None = param(
        None, "domain used as the test set; none tests on every fifth image of each class and domain"
    )


@dataclass(frozen=True)
class UserDomainOptions(DomainOptions):
    """Options of user data, with its location."""

    path: str = param("", "folder or zip archive with one folder per domain", path=True, positional=True)


@dataclass(frozen=True)
class DomainFolders(FolderSource):
    """Each domain is a folder with one subfolder of images per class; each domain is a natural client.

    Attributes:
        sizes: required number of images per domain; empty accepts any domains.
        num_classes: required number of classes; None accepts any.
    """

    options: DomainOptions = field(default=DomainOptions(), kw_only=True)
    sizes: Mapping[str, int] = field(default_factory=dict)
    num_classes: int | None = None

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(self.sizes)

    @property
    def remedy(self) -> str:
        return "correct the folder" if self.example else super().remedy

    def tree(self, data_dir: Path) -> Tree:
        return open_tree(absolute_path(self.path)) if self.example else super().tree(data_dir)

    def read(self, data_dir: Path) -> Dataset:
        """List the images of every domain and class; each domain is a natural client."""
        tree = self.tree(data_dir)
        files = self._list_files(tree)
        test_domain = self.find_test_domain(list(files))
        classes = self._list_classes(tree, files)
        images = ImageList(tree, classes, list(files))
        for group, (domain, by_class) in enumerate(files.items()):
            # None: every fifth image of each class is a test example.
            is_test = None if test_domain is None else domain == test_domain
            for target, name in enumerate(classes):
                images.add(by_class[name], target, group, is_test)
        return image_dataset(self.text, data_dir, images, self.options)

    def _list_files(self, tree: Tree) -> dict[str, FilesByClass]:
        """Return the images by domain and class, in sorted order, after checking their numbers.

        Images that are not exactly in ``<domain>/<class>/`` and, for published datasets, other domains are left out.
        """
        files: dict[str, FilesByClass] = {domain: {} for domain in self.sizes}
        for file in tree.files:
            folders = file.split("/")[:-1]
            if len(folders) == 2 and is_image(file):
                domain, label = folders
                if not self.sizes or domain in self.sizes:
                    files.setdefault(domain, {}).setdefault(label, []).append(file)
        for domain, expected in self.sizes.items():
            count = sum(map(len, files[domain].values()))
            if count != expected:
                raise UserError(f"{tree.path}/{domain} contains {count} images; expected {expected}; {self.remedy}")
        if len(files) < 2:
            raise UserError(
                f"{tree.path} has {len(files)} domains; expected at least 2 folders <domain>/<class> with images"
            )
        return files

    def _list_classes(self, tree: Tree, files: dict[str, FilesByClass]) -> list[str]:
        """Return the class names in alphabetical order, after checking that every domain has every class.

        Args:
            tree: the dataset's folder, for messages.
            files: the images by domain and class.
        """
        classes = sorted(set().union(*files.values()))
        for domain, by_class in files.items():
            for name in classes:
                if name not in by_class:
                    raise UserError(
                        f"{tree.path}/{domain} has no folder {name} with images, unlike other domains; {self.remedy}"
                    )
        if self.num_classes not in (None, len(classes)):
            raise UserError(f"{tree.path} has {len(classes)} classes; expected {self.num_classes}; {self.remedy}")
        return classes

    def find_test_domain(self, domains: list[str]) -> str | None:
        """Return the one of ``domains`` that the option ``test_domain`` names, or None if it is not set.

        Case does not matter, and underscores stand for spaces: ``real_world`` finds ``Real World``.
        """
        if self.options.test_domain is None:
            return None
        for domain in domains:
            if domain.lower().replace(" ", "_") == self.options.test_domain.lower().replace(" ", "_"):
                return domain
        raise one_of("domain", self.options.test_domain, domains, owner=self.name)


_CHECKS = "number of images per domain; every domain has every class"

PACS = DomainFolders(
    "pacs",
    "photos, art, cartoons and sketches of 7 classes",
    roots=("PACS", "pacs", "kfold"),
    sizes={"art_painting": 2048, "cartoon": 2344, "photo": 1670, "sketch": 3929},
    num_classes=7,
    instructions=(
        "download PACS.zip at https://drive.google.com/uc?id=1JFr8f805nMUelQWWmfnJR3y4_SYoN5Pd "
        "(published at https://dali-dl.github.io/project_iccv2017.html), unpack it into the data directory and rename "
        "its folder kfold to PACS"
    ),
    card=DatasetCard(
        examples="9,991 in total",
        shape="3x64x64",
        classes="7",
        clients="4 domains",
        citation="Li et al. 2017",
        licence="none stated",
        checks=_CHECKS,
    ),
)

OFFICE_HOME = DomainFolders(
    "office_home",
    "art, clip art, product images and photos of 65 everyday objects",
    roots=("OfficeHomeDataset_10072016", "office_home", "OfficeHome"),
    sizes={"Art": 2427, "Clipart": 4365, "Product": 4439, "Real World": 4357},
    num_classes=65,
    instructions=(
        "download OfficeHomeDataset_10072016.zip at "
        "https://drive.google.com/uc?id=1uY0pj7oFsjMxRwaD3Sxy0jgel0fsYXLC "
        "(published at https://www.hemanthdv.org/officeHomeDataset.html) and unpack it into the data directory"
    ),
    card=DatasetCard(
        examples="15,588 in total",
        shape="3x64x64",
        classes="65",
        clients="4 domains",
        citation="Venkateswara et al. 2017",
        licence="for non-commercial research and teaching",
        checks=_CHECKS,
    ),
)

USER_DOMAINS = DomainFolders(
    "domains",
    "your images of several domains, as <domain>/<class>/*.jpg",
    options=UserDomainOptions(),
    example="domains(path=pets,size=64)",
)
SOURCES = (OFFICE_HOME, PACS, USER_DOMAINS)
