"""Datasets of several domains, ``<domain>/<class>/*.jpg``: PACS, Office-Home, and a user's own.

Each domain is a natural client. With ``test_domain`` one of them is held out whole as the test set (leave-one-domain-out); without it
every fifth picture of every class of every domain, in the order of names, is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fedflat.data.dataset import Dataset
from fedflat.data.images import Listing, PictureOptions, is_picture, picture_dataset
from fedflat.data.sources.source import FileReport, Source
from fedflat.data.tree import Tree, open_tree
from fedflat.errors import UserError, one_of
from fedflat.text import param


@dataclass(frozen=True)
class DomainOptions(PictureOptions):
    """Which domain is held out, and how pictures are brought to one size."""

    test_domain: str | None = param(
        None, "the domain that is the test set; none: every fifth picture of each class and domain"
    )


@dataclass(frozen=True)
class OwnDomainOptions(DomainOptions):
    """Where the domains lie."""

    path: str = param("", "the folder or zip archive with one folder per domain", path=True)


@dataclass(frozen=True)
class Domains(Source):
    """A folder of domains."""

    options: DomainOptions = field(default=DomainOptions(), kw_only=True)
    roots: tuple[str, ...] = ()
    """Names under which the folder is found; the first is the one to recommend."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """The domains, and how many pictures each must have; empty where anything will do."""
    num_classes: int | None = None

    @property
    def files(self) -> tuple[str, ...]:
        """The folder of each domain."""
        return tuple(f"{self.roots[0]}/{domain}" for domain in self.sizes)

    @property
    def remedy(self) -> str:
        """What to do about a folder that is not as expected."""
        return "unpack the dataset anew" if self.roots else "mend the folder"

    def find(self, folder: Path, file: str) -> Path | None:
        """The folder of a domain."""
        inside = file.partition("/")[2]
        return next((folder / root / inside for root in self.roots if (folder / root / inside).is_dir()), None)

    def verify(self, folder: Path) -> tuple[FileReport, ...]:
        """The hash over names and bytes of all files of a domain; none is published."""
        tree = self._tree(folder)
        return tuple(
            FileReport(f"{tree.where.name}/{domain}", tree.hash(domain), None) for domain in self._pictures(tree)
        )

    def read(self, folder: Path) -> Dataset:
        """The dataset, from the cache after the first time."""
        tree = self._tree(folder)
        pictures = self._pictures(tree)
        domains, held_out = list(pictures), self._held_out(list(pictures))
        classes = self._classes(tree, pictures)
        listing = Listing()
        for group, domain in enumerate(domains):
            for target, name in enumerate(classes):
                listing.add(pictures[domain][name], target, group, None if held_out is None else domain == held_out)
        return picture_dataset(self.text, folder, tree, listing, classes, self.options, domains)

    def _tree(self, folder: Path) -> Tree:
        if isinstance(self.options, OwnDomainOptions):
            if not self.options.path:
                raise UserError(f"{self.name} needs to know where the pictures are; write {self.name}(path=FOLDER)")
            return open_tree(Path(self.options.path).expanduser().absolute())
        found = self.find(folder, self.files[0])
        if found is None:
            raise UserError(f"{self.name} is not there; {self.expected(folder)}")
        return open_tree(found.parent)

    def _pictures(self, tree: Tree) -> dict[str, dict[str, list[str]]]:
        """The pictures of every domain and class, all in the order of names."""
        found: dict[str, dict[str, list[str]]] = {domain: {} for domain in self.sizes}
        for file in tree.stamps:
            parts = file.split("/")
            if len(parts) == 3 and is_picture(file) and (not self.sizes or parts[0] in self.sizes):
                found.setdefault(parts[0], {}).setdefault(parts[1], []).append(file)
        for domain, expected in self.sizes.items():
            count = sum(map(len, found[domain].values()))
            if count != expected:
                raise UserError(
                    f"{tree.where}/{domain} holds {count} pictures, but {expected} were expected; {self.remedy}"
                )
        if len(found) < 2:
            raise UserError(
                f"{tree.where} has {len(found)} domains; expected folders <domain>/<class> with pictures, of at least 2 domains"
            )
        return found

    def _classes(self, tree: Tree, pictures: dict[str, dict[str, list[str]]]) -> list[str]:
        classes = sorted({name for of_domain in pictures.values() for name in of_domain})
        for domain, of_domain in pictures.items():
            lacking = [name for name in classes if name not in of_domain]
            if lacking:
                raise UserError(
                    f"{tree.where}/{domain} has no folder {lacking[0]} with pictures, but other domains have; {self.remedy}"
                )
        if self.num_classes not in (None, len(classes)):
            raise UserError(
                f"{tree.where} has {len(classes)} classes, but {self.num_classes} were expected; {self.remedy}"
            )
        return classes

    def _held_out(self, domains: list[str]) -> str | None:
        if self.options.test_domain is None:
            return None
        spelled = {_plain(domain): domain for domain in domains}
        if _plain(self.options.test_domain) not in spelled:
            raise one_of(f"domain of {self.name}", self.options.test_domain, domains)
        return spelled[_plain(self.options.test_domain)]


def _plain(domain: str) -> str:
    """A domain's name without regard to case and spaces, so that 'real_world' is Office-Home's 'Real World'."""
    return domain.lower().replace(" ", "_")


PACS = Domains(
    "pacs",
    "photos, art, cartoons and sketches of 7 kinds of things",
    roots=("PACS", "pacs", "kfold"),
    sizes={"art_painting": 2048, "cartoon": 2344, "photo": 1670, "sketch": 3929},
    num_classes=7,
    instructions=(
        "out of PACS.zip at https://drive.google.com/uc?id=1JFr8f805nMUelQWWmfnJR3y4_SYoN5Pd "
        "(from https://dali-dl.github.io/project_iccv2017.html), whose folder kfold is to be renamed PACS"
    ),
)

OFFICE_HOME = Domains(
    "office_home",
    "art, clip art, product pictures and photos of 65 things of office and home",
    roots=("OfficeHomeDataset_10072016", "office_home", "OfficeHome"),
    sizes={"Art": 2427, "Clipart": 4365, "Product": 4439, "Real World": 4357},
    num_classes=65,
    instructions=(
        "out of OfficeHomeDataset_10072016.zip at https://drive.google.com/uc?id=1uY0pj7oFsjMxRwaD3Sxy0jgel0fsYXLC "
        "(from https://www.hemanthdv.org/officeHomeDataset.html)"
    ),
)

OWN_DOMAINS = Domains("domains", "your own pictures, <domain>/<class>/*.jpg", options=OwnDomainOptions())
